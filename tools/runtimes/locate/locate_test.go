package locate

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/tools/runtimes/cache"
)

// set makes a set of empty binaries below the test's own cache and selects it.
func set(t *testing.T) string {
	t.Helper()
	t.Setenv(EnvDir, "")
	t.Setenv(cache.EnvRoot, t.TempDir())
	home, err := Home()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(home, "set-1")
	if err := os.MkdirAll(Bin(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range All() {
		if err := os.WriteFile(filepath.Join(Bin(dir), name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := WriteSet(dir); err != nil {
		t.Fatal(err)
	}
	if err := Select(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestDir(t *testing.T) {
	want := Bin(set(t))
	if got, err := Dir(); err != nil || got != want {
		t.Fatalf("Dir() = %q, %v; want %q", got, err, want)
	}
}

func TestDirSaysWhatIsWrong(t *testing.T) {
	cases := map[string]struct {
		spoil func(dir string)
		want  string
	}{
		"nothing built":  {func(dir string) { os.Remove(filepath.Join(filepath.Dir(dir), "current")) }, "not built"},
		"other versions": {func(dir string) { os.WriteFile(filepath.Join(dir, "versions.txt"), []byte("x"), 0o644) }, "other versions"},
		"binary missing": {func(dir string) { os.Remove(filepath.Join(Bin(dir), Runsc)) }, "lack runsc"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			c.spoil(set(t))
			_, err := Dir()
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "go run ./tools/runtimes") {
				t.Fatalf("Dir() error %v; want %q and the command to run", err, c.want)
			}
		})
	}
}

func TestDirFromEnvironment(t *testing.T) {
	bin := Bin(set(t))
	t.Setenv(cache.EnvRoot, t.TempDir())
	t.Setenv(EnvDir, bin)
	if got, err := Dir(); err != nil || got != bin {
		t.Fatalf("Dir() = %q, %v; want %q", got, err, bin)
	}
	t.Setenv(EnvDir, t.TempDir())
	if _, err := Dir(); err == nil {
		t.Fatal("Dir() accepts an empty directory")
	}
}

// The handler names lead containerd to the shims by its own rule: the last two
// parts of the name.
func TestHandlersNameTheirShims(t *testing.T) {
	for handler, shim := range map[string]string{HandlerRunc: ShimRunc, HandlerRunsc: ShimRunsc} {
		parts := strings.Split(handler, ".")
		n := len(parts)
		if got := "containerd-shim-" + parts[n-2] + "-" + parts[n-1]; got != shim {
			t.Errorf("containerd looks for %s; the shim is %s", got, shim)
		}
	}
}
