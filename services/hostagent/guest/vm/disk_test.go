package vm_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/internal/idroot"
)

// newDisk makes an ext4 image as the store makes it.
func newDisk(t *testing.T, size string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.ext4")
	command(t, "truncate", "-s", size, path)
	command(t, "mkfs.ext4", "-q", "-F", "-m", "0", path)
	return path
}

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// onHost runs a shell command in the root that another tier would make of disk and the image.
func onHost(t *testing.T, lower, disk, script string) string {
	t.Helper()
	mnt, root := t.TempDir(), t.TempDir()
	if out, err := exec.Command("mount", "-o", "loop,nosuid,nodev,noatime", disk, mnt).CombinedOutput(); err != nil {
		t.Skipf("no loop mounts here: %s", out)
	}
	defer command(t, "umount", "-d", mnt)
	for _, name := range []string{"upper", "work"} {
		if err := os.Mkdir(filepath.Join(mnt, name), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	if err := idroot.MountPlain(lower, mnt, root); err != nil {
		t.Fatal(err)
	}
	defer command(t, "umount", root)
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return strings.TrimSpace(string(out))
}

// What another tier deleted, replaced and gave away stays so in a machine.
func TestADiskOfAnotherTierShowsTheSameFiles(t *testing.T) {
	k := needKit(t)
	disk := newDisk(t, "64M")
	onHost(t, k.lower(), disk, `
		ls etc | head -1 > first; rm etc/passwd; mkdir -p home/u/.x; echo hi > home/u/.x/f; chown -R 1234:4321 home/u; chmod 2750 home/u
		rm -rf usr; mkdir usr; echo new > usr/only; ln -s only usr/link; ln usr/only usr/hard; mknod pipe p`)
	m := k.clone(t, disk)
	a := m.become(personal(func(p *vmwire.Personalise) { p.Disk = &vmwire.Disk{Bytes: 64 << 20} }))
	t.Logf("with a disk: %v", a.Steps)
	c := m.attach()
	for line, want := range map[string]string{
		"ls /etc/passwd":                        "ls: /etc/passwd: No such file or directory",
		"ls /usr":                               "hard\nlink\nonly",
		"stat -c '%u:%g %a' /home/u":            "1234:4321 2750",
		"stat -c '%u:%g %F' /home/u/.x/f /pipe": "1234:4321 regular file\n0:0 fifo",
		"stat -c %h /usr/only; cat /usr/link":   "2\nnew",
		"grep -c ' ext4 ' /proc/mounts":         "0",
	} {
		if got, _ := run(t, c, line); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
	must(t, c, "echo vm > /root/from-vm; rm /usr/only; chown 7:8 /root/from-vm; sync")
	if d := m.call(vmwire.Call{Op: vmwire.OpOff}); !d.OK {
		t.Fatalf("off: %+v", d)
	}
	m.wait()
	// Only a test mounts on the host what a machine wrote.
	command(t, "fsck.ext4", "-fn", disk)
	if out := command(t, "dumpe2fs", "-h", disk); strings.Contains(out, "needs_recovery") {
		t.Error("the machine left its disk mounted")
	}
	got := onHost(t, k.lower(), disk, "cat root/from-vm; stat -c %u:%g root/from-vm; ls usr; cat usr/hard")
	if got != "vm\n7:8\nhard\nlink\nnew" {
		t.Errorf("back on the host: %q", got)
	}
}

// A frozen disk holds still, thaws on demand and by itself, and says which of the two it was.
func TestAFrozenDiskIsOneStateAndThawsByItself(t *testing.T) {
	k := needKit(t)
	disk := newDisk(t, "64M")
	m := k.clone(t, disk)
	m.become(personal(func(p *vmwire.Personalise) { p.Disk = &vmwire.Disk{Create: true} }))
	c := m.attach()
	if !c.OwnDisk() {
		t.Error("the guest does not say that its disk is its own")
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	must(t, c, "echo before > /root/f")
	if expired, err := c.Thaw(ctx); err != nil || !expired {
		t.Errorf("a thaw without a freeze: %v, %v", expired, err)
	}
	if err := c.Freeze(ctx, 0); err != nil {
		t.Fatal(err)
	}
	wrote := make(chan string, 1)
	go func() {
		out, _ := run(t, c, "echo during > /root/f; cat /root/f")
		wrote <- out
	}()
	shot := filepath.Join(t.TempDir(), "shot")
	command(t, "cp", "--sparse=always", disk, shot)
	select {
	case out := <-wrote:
		t.Errorf("a write went on: %s", out)
	default:
	}
	if expired, err := c.Thaw(ctx); err != nil || expired {
		t.Fatalf("thaw: expired %v, %v", expired, err)
	}
	if out := <-wrote; out != "during" {
		t.Errorf("the write after the thaw: %s", out)
	}
	command(t, "fsck.ext4", "-fn", shot)
	if got := onHost(t, k.lower(), shot, "cat root/f"); got != "before" {
		t.Errorf("the shot holds %q", got)
	}
	if err := c.Freeze(ctx, 200*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	must(t, c, "echo after > /root/f") // waits for the end of the freeze
	if expired, err := c.Thaw(ctx); err != nil || !expired {
		t.Errorf("a freeze that ended by itself: expired %v, %v", expired, err)
	}
	command(t, "truncate", "-s", "128M", disk)
	m.resize(disk)
	if got, err := c.Grow(ctx, 128<<20); err != nil || got != 128<<20 {
		t.Errorf("grown to %d, %v", got, err)
	}
	if got := must(t, c, "df -m / | tail -1 | awk '{print ($2>90)}'"); got != "1" {
		t.Errorf("the session's disk has not grown: %s", must(t, c, "df -m /"))
	}
	if d := m.call(vmwire.Call{Op: vmwire.OpGrow, Bytes: 0}); !d.OK || d.Bytes != 128<<20 {
		t.Errorf("grown again: %+v", d)
	}
}

// A damaged disk is an answer that says so, in bounded time; the machine ends.
func TestADamagedDiskIsAnError(t *testing.T) {
	k := needKit(t)
	for name, damage := range map[string]func(f *os.File) error{
		"no file system":    func(f *os.File) error { return zero(f, 0, 64<<10) },
		"no descriptors":    func(f *os.File) error { return junk(f, 2048, 62<<10) },
		"no root folder":    func(f *os.File) error { return junk(f, 0x20000, 30<<20) },
		"marked as damaged": func(f *os.File) error { _, err := f.WriteAt([]byte{2}, 1024+0x3a); return err },
		"no folders":        func(*os.File) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			disk := newDisk(t, "64M")
			f, err := os.OpenFile(disk, os.O_RDWR, 0)
			if err == nil {
				err = errors.Join(damage(f), f.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
			m := k.clone(t, disk)
			a := m.personalise(personal(func(p *vmwire.Personalise) { p.Disk = &vmwire.Disk{} }))
			if a.OK || a.Reason != vmwire.ReasonDisk || a.Error == "" {
				t.Errorf("the answer is %+v", a)
			}
			t.Log(a.Error)
			m.wait()
		})
	}
}

func zero(f *os.File, at, n int64) error { return fill(f, at, n, 0) }

func junk(f *os.File, at, n int64) error { return fill(f, at, n, 0xa5) }

func fill(f *os.File, at, n int64, b byte) error {
	block := make([]byte, 4096)
	for i := range block {
		block[i] = b
	}
	for end := at + n; at < end; at += int64(len(block)) {
		if _, err := f.WriteAt(block, at); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
	}
	return nil
}

// A machine that was killed leaves a journal, which the next one replays and says so.
func TestAJournalIsReplayed(t *testing.T) {
	k := needKit(t)
	disk := newDisk(t, "64M")
	m := k.clone(t, disk)
	m.become(personal(func(p *vmwire.Personalise) { p.Disk = &vmwire.Disk{Create: true} }))
	c := m.attach()
	must(t, c, "echo kept > /root/f; sync /root/f || sync")
	_ = m.cmd.Process.Kill()
	m.wait()
	m = k.clone(t, disk)
	a := m.become(personal(func(p *vmwire.Personalise) { p.Disk = &vmwire.Disk{} }))
	if !a.Repaired {
		t.Error("it does not say that the disk was not unmounted")
	}
	if got := must(t, m.attach(), "cat /root/f"); got != "kept" {
		t.Errorf("after the replay: %q", got)
	}
}
