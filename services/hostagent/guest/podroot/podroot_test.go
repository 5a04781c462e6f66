package podroot

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/cover"
)

// The test binary plays the parts of the container, which it is put into as a runtime would, and of
// what is executed there.
func TestMain(m *testing.M) {
	switch os.Getenv("PODROOT_ROLE") {
	case "container":
		if err := container(os.Getenv("PODROOT_DIR")); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
	case "session":
		session()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// container is what a runtime does before the first process: a read-only root with its file systems.
func container(dir string) error {
	root := filepath.Join(dir, "image")
	mount := func(from, to, fs string, flags uintptr) error {
		if err := unix.Mount(from, filepath.Join(root, to), fs, flags, ""); err != nil {
			return fmt.Errorf("mount %s: %w", to, err)
		}
		return nil
	}
	err := errors.Join(
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), mount(root, "", "", unix.MS_BIND|unix.MS_REC),
		mount("proc", "proc", "proc", 0), mount("/dev", "dev", "", unix.MS_BIND|unix.MS_REC), mount("sysfs", "sys", "sysfs", unix.MS_RDONLY),
		mount("tmpfs", "tmp", "tmpfs", 0), mount("tmpfs", "run", "tmpfs", 0))
	for _, d := range []string{"run/berth", "run/berth-disk"} {
		err = errors.Join(err, os.Mkdir(filepath.Join(root, d), 0o755))
	}
	err = errors.Join(err, mount(filepath.Join(dir, "run"), "run/berth", "", unix.MS_BIND), mount(filepath.Join(dir, "disk"), "run/berth-disk", "", unix.MS_BIND),
		unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Chdir(root), unix.PivotRoot(".", "."), unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/")); err != nil {
		return err
	}
	if err := os.WriteFile("/etc/mark", nil, 0o644); !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("the image can be written: %w", err)
	}
	if err := os.Setenv("PODROOT_ROLE", "session"); err != nil {
		return err
	}
	return Enter("/run/berth-disk", []cover.File{{From: "trust", To: "/etc/trust"}, {From: "trust", To: cover.Resolver}}, []string{"/run/berth/guest", "a"})
}

// session says what it sees.
func session() {
	say := func(name string, v any) { fmt.Printf("%s=%v\n", name, v) }
	say("args", strings.Join(os.Args[1:], " "))
	b, err := os.ReadFile("/etc/mark")
	say("mark", string(b)+fmt.Sprint(err))
	say("write", os.WriteFile("/etc/new", []byte("new"), 0o644))
	trust, _ := os.ReadFile("/etc/trust")
	resolver, _ := os.ReadFile("/etc/resolv.conf")
	say("over", string(trust)+string(resolver)+fmt.Sprint(os.WriteFile("/etc/trust", nil, 0o644)))
	_, err = os.Stat("/etc/gone")
	say("gone", errors.Is(err, os.ErrNotExist))
	st, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(st)) {
		for _, name := range []string{"NoNewPrivs", "CapBnd", "CapEff", "CapInh"} {
			if rest, ok := strings.CutPrefix(line, name+":"); ok {
				say(name, strings.TrimSpace(rest))
			}
		}
	}
	run, _ := filepath.Glob("/run/*")
	say("run", strings.Join(run, " "))
	_, null := os.Stat("/dev/null")
	_, sys := os.Stat("/sys/kernel")
	say("places", errors.Join(null, sys))
	say("mount", unix.Mount("tmpfs", "/tmp", "tmpfs", 0, ""))
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	disks := 0
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); strings.Contains(f[3]+f[4], "berth-") || strings.Contains(f[3], "/disk") {
			disks++
		}
	}
	say("disks", disks)
	link, _ := os.Readlink("/tmp")
	say("tmp", link)
}

// needStatic skips where this very program cannot start in a root that holds nothing else.
func needStatic(t *testing.T) {
	t.Helper()
	f, err := elf.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Skip("skipped: this test program is linked dynamically, as with the race detector, and cannot start in an empty root")
		}
	}
}

// enter makes a container on an image and a disk, and returns what the session in it sees.
func enter(t *testing.T, prepare func(dir string)) map[string]string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: needs root")
	}
	needStatic(t)
	dir := t.TempDir()
	for _, d := range []string{"image/proc", "image/dev", "image/sys", "image/run", "image/tmp", "image/etc", "disk/upper", "disk/work", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{"image/etc/mark": "image", "image/etc/gone": "x", "image/etc/trust": "image", "run/trust": "ours"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	guest, err := os.OpenFile(filepath.Join(dir, "run/guest"), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(guest, self); err != nil {
		t.Fatal(err)
	}
	guest.Close()
	prepare(dir)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PODROOT_ROLE=container", "PODROOT_DIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got := map[string]string{}
	for line := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		got[name] = value
	}
	got["upper"] = filepath.Join(dir, "disk/upper")
	return got
}

// TestTheRootIsTheImageUnderTheDisk, as in every tier; nothing leads back beneath, and privileges are
// those of a container.
func TestTheRootIsTheImageUnderTheDisk(t *testing.T) {
	got := enter(t, func(dir string) {
		etc := filepath.Join(dir, "disk/upper/etc")
		if err := os.Mkdir(etc, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mknod(filepath.Join(etc, "gone"), unix.S_IFCHR, 0); err != nil { // deleted in an earlier epoch
			t.Fatal(err)
		}
	})
	for name, want := range map[string]string{
		"args": "a", "mark": "image<nil>", "write": "<nil>", "gone": "true", "NoNewPrivs": "1", "CapBnd": "00000000800405fb",
		"CapEff": "00000000800405fb", "CapInh": "0000000000000000", "run": "/run/berth", "places": "<nil>",
		"mount": "operation not permitted", "disks": "0", "over": "oursoursopen /etc/trust: read-only file system",
	} {
		if got[name] != want {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
	if b, err := os.ReadFile(got["upper"] + "/etc/new"); err != nil || string(b) != "new" {
		t.Errorf("on the disk: %q, %v", b, err)
	}
	if b, err := os.ReadFile(got["upper"] + "/etc/resolv.conf"); err != nil || len(b) > 0 {
		t.Errorf("on the disk: %q, %v", b, err)
	}
	if _, err := os.Lstat(got["upper"] + "/etc/trust"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a covered file is on the disk: %v", err)
	}
}

// TestALinkInPlaceOfAFolderLeadsIntoTheRoot: a session that replaced /tmp still starts, and nothing is
// mounted outside.
func TestALinkInPlaceOfAFolderLeadsIntoTheRoot(t *testing.T) {
	got := enter(t, func(dir string) {
		up := filepath.Join(dir, "disk/upper")
		if err := errors.Join(os.Mkdir(up+"/elsewhere", 0o755), os.Symlink("/elsewhere", up+"/tmp")); err != nil {
			t.Fatal(err)
		}
	})
	if got["tmp"] != "/elsewhere" || got["write"] != "<nil>" || got["disks"] != "0" {
		t.Errorf("%v", got)
	}
}
