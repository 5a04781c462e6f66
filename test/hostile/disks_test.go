package hostile

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// damages are what the kernel of a hostile machine can leave in its disk's image: whatever it likes.
var damages = []struct {
	name string
	do   func(t *testing.T, image string)
}{
	{"a superblock of noise", func(t *testing.T, image string) { scribble(t, image, 1024, 1024) }},
	{"a superblock that lies about the size", func(t *testing.T, image string) {
		debugfs(t, image, "set_super_value blocks_count 999999999999")
	}},
	{"a folder of noise", func(t *testing.T, image string) { scribbleBlocks(t, image, "/upper", 1) }},
	{"a journal of noise", func(t *testing.T, image string) {
		scribbleBlocks(t, image, "<8>", 64)
		debugfs(t, image, "feature needs_recovery")
	}},
	{"inodes of noise", func(t *testing.T, image string) { scribble(t, image, inodeTable(t, image), 256<<10) }},
	{"upper is a link to a folder of the host", func(t *testing.T, image string) {
		debugfs(t, image, "unlink /upper", "symlink /upper /etc")
	}},
	{"work is a link that climbs out", func(t *testing.T, image string) {
		debugfs(t, image, "rmdir /work/work", "unlink /work", "symlink /work ../../../../../../etc")
	}},
}

// diskRows: an image that a machine left is looked at by machines alone. The wake
// ends with a reason or with a session that works, nobody else notices, and it can be deleted.
func diskRows(t *testing.T, e *testenv.Env) {
	t.Run("microvm", func(t *testing.T) {
		if _, err := exec.LookPath("debugfs"); err != nil {
			t.Skipf("no images are damaged: %v", err)
		}
		w := sessions(t, e, "microvm")
		put(t, w.victim, "/root/"+w.mark, []byte(w.mark))
		for i, d := range damages {
			t.Run(d.name, func(t *testing.T) {
				counted(t, "microvm")
				one := *w
				one.t, one.client = t, w.env.For(t).Client("acme", fmt.Sprint("mallory-disk-", i))
				one.attacker = one.open(one.client)
				one.damaged(t, d.do)
			})
		}
		t.Run("a container asks for the disk of a machine", func(t *testing.T) { counted(t, "microvm"); w.weaker(t) })
	})
}

func (w *world) damaged(t *testing.T, damage func(*testing.T, string)) {
	put(t, w.attacker, "/root/kept", []byte("kept"))
	w.sleep(t)
	image := w.image(t)
	name := uuid(t, image)
	damage(t, image)
	before := kernelSays(t, name)
	stop, seen := make(chan struct{}), make(chan string, 1)
	go func() { seen <- watchHost(image, stop) }()
	err := w.wake(t)
	close(stop)
	if hit := <-seen; hit != "" {
		t.Errorf("the host opened the image as a file system: %s", hit)
	}
	if err != nil {
		t.Logf("the wake is refused: %v", err)
		if strings.TrimSpace(err.Error()) == "" {
			t.Error("without a reason")
		}
	} else {
		got, rerr := w.attacker.Files().ReadAll(t.Context(), "/root/kept")
		t.Logf("it woke in tier %s, and its file says %q, %v", w.attacker.Place().Tier, got, rerr)
		if tier := string(w.attacker.Place().Tier); tier != "microvm" {
			t.Errorf("it woke in tier %s", tier)
		}
	}
	if after := kernelSays(t, name); after != before {
		t.Errorf("the host's kernel speaks of the file system %s: %d lines were %d", name, after, before)
	}
	w.wellElsewhere(t)
}

// wellElsewhere: the other session answers and has its file.
func (w *world) wellElsewhere(t *testing.T) {
	t.Helper()
	if out, err := w.victim.Output(t.Context(), "cat", "/root/"+w.mark); err != nil || string(out) != w.mark {
		t.Errorf("the other session: %q, %v", out, err)
	}
}

// weaker asks for a container where a machine wrote the disk: as it is, and with a link in the place of
// what a container's root is made of.
func (w *world) weaker(t *testing.T) {
	one := *w
	one.t, one.client = t, w.env.For(t).Client("acme", "mallory-weaker")
	one.attacker = one.open(one.client)
	put(t, one.attacker, "/root/kept", []byte("kept"))
	image := one.image(t)
	for _, damage := range [][]string{nil, {"unlink /upper", "symlink /upper /etc"}} {
		one.sleep(t)
		if damage != nil {
			debugfs(t, image, damage...)
		}
		stop, seen := make(chan struct{}), make(chan string, 1)
		go func() { seen <- watchHost(image, stop) }()
		s, err := one.client.Open(t.Context(), sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()})
		close(stop)
		if hit := <-seen; hit != "" {
			t.Errorf("the host opened the image as a file system: %s", hit)
		}
		switch {
		case err != nil:
			t.Logf("refused: %v", err)
		case string(s.Place().Tier) != "microvm":
			t.Errorf("it woke in tier %s", s.Place().Tier)
		default:
			t.Log("it woke in a machine all the same")
			one.attacker = s
		}
	}
	w.wellElsewhere(t)
}

// image is the file of the attacker's disk.
func (w *world) image(t *testing.T) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(w.env.PoolDir(), "sessions", "*"+w.attacker.Key()+"*", "disk.img"))
	if err != nil || len(found) != 1 {
		t.Fatalf("the session's images are %v, %v", found, err)
	}
	return found[0]
}

func scribble(t *testing.T, image string, at int64, n int) {
	t.Helper()
	noise := make([]byte, n)
	_, _ = rand.Read(noise)
	f, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(noise, at)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// scribbleBlocks fills the first blocks of a file or folder.
func scribbleBlocks(t *testing.T, image, of string, most int) {
	t.Helper()
	size := int64(1024) << binary.LittleEndian.Uint32(superblock(t, image)[0x18:])
	fields := strings.Fields(debugfs(t, image, "blocks "+of))
	for i, field := range fields {
		var block int64
		if _, err := fmt.Sscan(field, &block); err == nil && block > 0 && i < most {
			scribble(t, image, block*size, int(size))
		}
	}
	if len(fields) == 0 {
		t.Fatalf("%s has no blocks", of)
	}
}

// inodeTable is where the inodes of the first group are.
func inodeTable(t *testing.T, image string) int64 {
	t.Helper()
	for line := range strings.Lines(debugfs(t, image, "stats")) {
		var block int64
		if i := strings.Index(line, "inode table at "); i >= 0 {
			if _, err := fmt.Sscan(strings.TrimRight(strings.Fields(line[i:])[3], ","), &block); err == nil {
				return block * (1024 << binary.LittleEndian.Uint32(superblock(t, image)[0x18:]))
			}
		}
	}
	t.Fatal("no table of inodes")
	return 0
}

// debugfs changes a file system in its file, without mounting it.
func debugfs(t *testing.T, image string, commands ...string) string {
	t.Helper()
	cmd := exec.Command("debugfs", "-w", "-f", "-", image)
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("debugfs: %v: %s", err, errOut.String())
	}
	var answer []string
	for line := range strings.Lines(out.String()) {
		if !strings.HasPrefix(line, "debugfs:") {
			answer = append(answer, line)
		}
	}
	return strings.Join(answer, "")
}

func superblock(t *testing.T, image string) []byte {
	t.Helper()
	f, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1024)
	if _, err := f.ReadAt(b, 1024); err != nil {
		t.Fatal(err)
	}
	return b
}

// uuid is the name by which the kernel speaks of a file system.
func uuid(t *testing.T, image string) string {
	t.Helper()
	h := hex.EncodeToString(superblock(t, image)[0x68:0x78])
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

// kernelSays counts the lines of the host's log that name a file system.
func kernelSays(t *testing.T, name string) int {
	t.Helper()
	b := make([]byte, 1<<20)
	const readAll = 3
	n, err := unix.Klogctl(readAll, b)
	if err != nil {
		t.Fatalf("read the kernel's log: %v", err)
	}
	return bytes.Count(b[:n], []byte(name))
}

// watchHost looks, until stop, whether a loop device or a mount of the host has the image.
func watchHost(image string, stop chan struct{}) string {
	for {
		files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == image {
				return f
			}
		}
		if b, err := os.ReadFile("/proc/self/mountinfo"); err == nil && bytes.Contains(b, []byte(image)) {
			return "/proc/self/mountinfo"
		}
		select {
		case <-stop:
			return ""
		default:
		}
	}
}
