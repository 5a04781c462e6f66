package vm

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/cover"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// Folders that the stage builds the root from.
const (
	lowerDir   = newDir + "/lower"
	stageDisk  = newDir + "/disk"
	memoryDisk = newDir + "/memory"
	rootDir    = newDir + "/root"
	procTree   = newDir + "/proc"
	sysTree    = newDir + "/sys"
	devTree    = newDir + "/dev"
)

// Sizes as in the other tiers.
const (
	shmBytes   = 64 << 20
	minTmp     = 16 << 20
	tmpDivisor = 2
	private    = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	maxHold    = 1 << 30 // memory that a session without a disk may fill, at most
)

// maskedPaths and readonlyPaths are those of the other tiers that are there in a machine.
var (
	maskedPaths = []string{
		"/sys/block", "/sys/class/block", "/sys/class/bdi", "/sys/dev/block", "/sys/devices/virtual/block",
		"/sys/devices/virtual/bdi", "/sys/class/virtio-ports", "/sys/fs/ext4", "/sys/fs/cgroup", "/sys/firmware",
		"/sys/kernel/security", "/sys/kernel/debug", "/sys/kernel/tracing", "/sys/bus/virtio",
		"/proc/fs/ext4", "/proc/fs/jbd2", "/proc/acpi", "/proc/scsi",
		"/proc/diskstats", "/proc/partitions", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/kallsyms",
		"/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug", "/proc/cmdline", "/proc/iomem", "/proc/kpagecount",
		"/proc/kpageflags", "/proc/kpagecgroup",
	}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// devices of a session: name, minor of major 1 or 5.
var devices = []struct {
	name         string
	major, minor uint32
}{
	{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
}

// trees are detached mounts that move into the root as soon as it is there.
type trees struct{ proc, sys, dev, run, guest int }

// prepare does all that does not depend on whose machine it is.
func (s *stage) prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	_ = mountLower("vda") // again, with a clear error, when it is wanted
	if err := mount("proc", procTree, "proc", private, ""); err != nil {
		return err
	}
	if err := mount("sysfs", sysTree, "sysfs", private|unix.MS_RDONLY, ""); err != nil {
		return err
	}
	if err := makeDevices(); err != nil {
		return err
	}
	for _, p := range maskedPaths {
		if err := mask(newDir + p); err != nil {
			return err
		}
	}
	for _, p := range readonlyPaths {
		if err := readonly(newDir + p); err != nil {
			return err
		}
	}
	for _, t := range []struct {
		path string
		fd   *int
	}{{procTree, &s.trees.proc}, {sysTree, &s.trees.sys}, {devTree, &s.trees.dev}, {runDir, &s.trees.run}, {"/init", &s.trees.guest}} {
		fd, err := unix.OpenTree(unix.AT_FDCWD, t.path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("detach %s: %w", t.path, err)
		}
		*t.fd = fd
	}
	var err error
	if s.cgroup, err = os.Open(usersCgroup); err != nil {
		return err
	}
	if err := boundPrivileges(); err != nil {
		return err
	}
	debug.FreeOSMemory() // now, when nobody waits
	return nil
}

func mountLower(device string) error {
	if err := mount("/dev/"+device, lowerDir, "erofs", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOATIME, ""); err != nil {
		return fmt.Errorf("the image: %w", err)
	}
	return nil
}

// look mounts the image if that was not possible before; an error is for when it is wanted.
func (s *stage) look() error {
	if !mounted(lowerDir) {
		_ = mountLower("vda")
	}
	return nil
}

func makeDevices() error {
	if err := mount("tmpfs", devTree, "tmpfs", unix.MS_NOSUID|unix.MS_STRICTATIME, "mode=755,size=64k"); err != nil {
		return err
	}
	for _, d := range devices {
		path := devTree + "/" + d.name
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("make %s: %w", d.name, err)
		}
		if err := os.Chmod(path, 0o666); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, devTree+"/"+name); err != nil {
			return err
		}
	}
	if err := mount("devpts", devTree+"/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"); err != nil {
		return err
	}
	if err := mount("mqueue", devTree+"/mqueue", "mqueue", private, ""); err != nil {
		return err
	}
	return os.Mkdir(devTree+"/shm", 0o755) // sized with the session's memory
}

// mask puts something empty over path; what is not there needs none.
func mask(path string) error {
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.IsDir() {
		err = unix.Mount("tmpfs", path, "tmpfs", private|unix.MS_RDONLY, "size=0,mode=755")
	} else {
		err = unix.Mount(devTree+"/null", path, "", unix.MS_BIND, "")
	}
	if err != nil {
		return fmt.Errorf("mask %s: %w", path, err)
	}
	return nil
}

func readonly(path string) error {
	if _, err := os.Stat(path); err != nil {
		return nil
	}
	err := unix.Mount(path, path, "", unix.MS_BIND|unix.MS_REC, "")
	if err == nil {
		err = unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|private, "")
	}
	if err != nil {
		return fmt.Errorf("make %s read-only: %w", path, err)
	}
	return nil
}

// enterRoot mounts the session's root and makes it the only thing that this process sees.
func (s *stage) enterRoot(p *vmwire.Personalise, t *timer) error {
	if err := mountRoot(p); err != nil {
		return err
	}
	t.step("root")
	layer := memoryDisk
	if p.Disk != nil {
		layer = stageDisk
	}
	var err error
	if s.upper, err = os.Open(layer + "/upper"); err != nil { // it stays readable after its mount is gone from here
		return because(vmwire.ReasonDisk, err)
	}
	for _, dir := range []string{lowerDir, stageDisk, memoryDisk, procTree, sysTree, devTree, diskDir, runDir, cgroupDir, "/dev", "/sys", "/proc"} {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	}
	t.step("unmount")
	if err := unix.Chdir(rootDir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	if err := errors.Join(unix.Chroot("."), unix.Chdir("/")); err != nil {
		return fmt.Errorf("switch root: %w", err)
	}
	tmp := max(p.Limits.Memory/tmpDivisor, minTmp)
	if err := s.fill(tmp); err != nil {
		return err
	}
	t.step("switch")
	return files(p)
}

// mountRoot mounts the image with the session's files on top.
func mountRoot(p *vmwire.Personalise) error {
	root := p.Root
	if root == "" {
		root = "vda"
	}
	if !mounted(lowerDir) || root != "vda" {
		if err := mountLower(root); err != nil {
			return because(vmwire.ReasonRoot, err)
		}
	}
	dir := stageDisk
	if p.Disk != nil {
		device := p.Disk.Device
		if device == "" {
			device = "vdb"
		}
		if err := mount("/dev/"+device, stageDisk, "ext4", diskFlags, diskOptions); err != nil {
			return because(vmwire.ReasonDisk, err)
		}
	} else {
		dir = memoryDisk
		options := fmt.Sprintf("mode=755,size=%d", min(max(p.Limits.Memory/tmpDivisor, minTmp), maxHold))
		if err := mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return err
		}
		for _, name := range []string{"upper", "work"} {
			if err := os.Mkdir(dir+"/"+name, 0o755); err != nil {
				return err
			}
		}
	}
	options := "lowerdir=" + lowerDir + ",upperdir=" + dir + "/upper,workdir=" + dir +
		"/work,userxattr,index=off,metacopy=off,redirect_dir=nofollow"
	if err := mount("berth", rootDir, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return because(vmwire.ReasonDisk, err)
	}
	return nil
}

func mounted(dir string) bool {
	var a, b unix.Stat_t
	return unix.Stat(dir, &a) == nil && unix.Stat(dir+"/..", &b) == nil && a.Dev != b.Dev
}

// fill puts into the root what every session has there. The process is in it already, so a link in it
// leads nowhere else.
func (s *stage) fill(tmp uint64) error {
	for _, m := range []struct {
		fd  int
		dir string
	}{{s.trees.proc, "/proc"}, {s.trees.sys, "/sys"}, {s.trees.dev, "/dev"}} {
		if err := place(m.fd, m.dir); err != nil {
			return err
		}
	}
	for _, m := range []struct {
		dir     string
		flags   uintptr
		options string
	}{
		{"/dev/shm", private, fmt.Sprintf("mode=1777,size=%d", min(shmBytes, tmp))},
		{"/run", unix.MS_NOSUID | unix.MS_NODEV, fmt.Sprintf("mode=755,size=%d", runBytes)},
		{"/tmp", unix.MS_NOSUID | unix.MS_NODEV, fmt.Sprintf("mode=1777,size=%d", tmp)},
	} {
		if err := mount("tmpfs", m.dir, "tmpfs", m.flags, m.options); err != nil {
			return err
		}
	}
	if err := place(s.trees.run, "/run/berth"); err != nil {
		return err
	}
	if err := place(s.trees.guest, "/run/berth/guest"); err != nil {
		return err
	}
	for _, dir := range []string{"/run/berth", "/run/berth/guest"} {
		if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", dir, err)
		}
	}
	return nil
}

// place attaches a detached mount; no link leads it elsewhere.
func place(fd int, dir string) error {
	if dir != "/run/berth/guest" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	return unix.Close(fd)
}

// files are those of /etc that belong to the machine and not to the image.
func files(p *vmwire.Personalise) error {
	if st, err := os.Lstat("/etc/machine-id"); err == nil && st.Mode().IsRegular() {
		var id [16]byte
		_, _ = rand.Read(id[:])
		if err := over("/etc/machine-id", hex.EncodeToString(id[:])+"\n"); err != nil {
			return err
		}
	}
	if err := lay(p.Over); err != nil {
		return err
	}
	if p.Network == nil || len(p.Network.DNS) == 0 {
		return nil
	}
	if _, err := os.Lstat("/etc/resolv.conf"); errors.Is(err, os.ErrNotExist) {
		if err := os.WriteFile("/etc/resolv.conf", nil, 0o644); err != nil {
			return err
		}
	}
	return over("/etc/resolv.conf", "nameserver "+strings.Join(p.Network.DNS, "\nnameserver ")+"\n")
}

// lay lays files of the run folder over those of the root, which this process is in.
func lay(list []vmwire.Over) error {
	if len(list) == 0 {
		return nil
	}
	var want []cover.File
	for _, o := range list {
		want = append(want, cover.File{From: o.From, To: o.To})
	}
	run, err := cover.Folder("/run/berth")
	if err != nil {
		return err
	}
	defer func() { _ = run.Close() }()
	top, err := cover.Folder("/")
	if err != nil {
		return err
	}
	defer func() { _ = top.Close() }()
	all, err := cover.Open(int(run.Fd()), want)
	if err != nil {
		return err
	}
	defer all.Close()
	return cover.Root{FD: int(top.Fd())}.Put(all)
}

// over puts a file in memory over one of the root.
func over(path, text string) error {
	tmp := "/run/." + strings.ReplaceAll(path[1:], "/", "-")
	if err := os.WriteFile(tmp, []byte(text), 0o444); err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp) }()
	if err := unix.Mount(tmp, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", path, err)
	}
	return unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|private, "")
}
