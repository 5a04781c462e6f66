package initramfs_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/initramfs"
)

func modules(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	err := initramfs.WriteModules(&b, []string{"b.ko", "a.ko"}, func(name string) ([]byte, error) { return []byte("code of " + name), nil })
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// parse reads the archives of an initramfs as the kernel does, one after the other.
func parse(t *testing.T, b []byte) map[string]string {
	t.Helper()
	out := map[string]string{}
	for at := 0; at < len(b); {
		if b[at] == 0 {
			at++
			continue
		}
		if at%4 != 0 || string(b[at:at+6]) != "070701" {
			t.Fatalf("no header at %d", at)
		}
		field := func(i int) (n int) {
			for _, c := range string(b[at+6+8*i : at+14+8*i]) {
				n = n*16 + strings.IndexRune("0123456789ABCDEF", c)
			}
			return n
		}
		size, length := field(6), field(11)
		name := string(b[at+110 : at+110+length-1])
		data := (at + 110 + length + 3) / 4 * 4
		if name != "TRAILER!!!" {
			out[name] = string(b[data : data+size])
		}
		at = (data + size + 3) / 4 * 4
	}
	return out
}

func TestArchiveHoldsEverything(t *testing.T) {
	var b bytes.Buffer
	if err := initramfs.Build(&b, modules(t), []byte("guest")); err != nil {
		t.Fatal(err)
	}
	got := parse(t, b.Bytes())
	for name, want := range map[string]string{"init": "guest", "modules/order": "b.ko\na.ko\n", "modules/a.ko": "code of a.ko", "modules/b.ko": "code of b.ko"} {
		if got[name] != want {
			t.Errorf("%s holds %q", name, got[name])
		}
	}
	for _, name := range []string{"dev/console", "dev/null", "proc", "sys"} {
		if _, ok := got[name]; !ok {
			t.Errorf("%s is missing", name)
		}
	}
	if _, err := exec.LookPath("cpio"); err != nil {
		return // the parser above has read it
	}
	cmd := exec.Command("cpio", "-t")
	cmd.Stdin = bytes.NewReader(b.Bytes())
	if out, err := cmd.Output(); err != nil || !strings.Contains(string(out), "init\n") {
		t.Errorf("cpio: %s, %v", out, err)
	}
}

// Many hosts and processes make one file, whole, whose name says what is in it.
func TestEnsureMakesOneWholeFile(t *testing.T) {
	dir := t.TempDir()
	mods, guest := filepath.Join(dir, "modules"), filepath.Join(dir, "guest")
	if err := os.WriteFile(mods, modules(t), 0o600); err != nil {
		t.Fatal(err)
	}
	ensure := func(text string) string {
		if err := os.WriteFile(guest, []byte(text), 0o600); err != nil {
			t.Error(err)
		}
		var wait sync.WaitGroup
		paths := make([]string, 8)
		for i := range paths {
			wait.Go(func() {
				var err error
				if paths[i], err = initramfs.Ensure(dir, mods, guest); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		for _, p := range paths {
			if p != paths[0] {
				t.Errorf("two files: %v", paths)
			}
		}
		return paths[0]
	}
	one, two, again := ensure("1"), ensure("2"), ensure("1")
	if one == two || one != again {
		t.Errorf("%s, %s, %s", one, two, again)
	}
	b, err := os.ReadFile(two)
	if err != nil || parse(t, b)["init"] != "2" {
		t.Errorf("it is not whole: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".initramfs-*")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if _, err := initramfs.Ensure(dir, mods, filepath.Join(dir, "nothing")); err == nil {
		t.Error("made without a guest")
	}
}
