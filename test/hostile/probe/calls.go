//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// calls ask the kernel for what a sandbox has no business with.
var calls = map[string]attempt{
	"mount-tmpfs":    func([]string) (string, error) { return mountAt("tmpfs", "tmpfs", 0) },
	"mount-proc":     func([]string) (string, error) { return mountAt("proc", "proc", 0) },
	"mount-sysfs":    func([]string) (string, error) { return mountAt("sysfs", "sysfs", 0) },
	"mount-cgroup":   func([]string) (string, error) { return mountAt("cgroup", "cgroup", 0) },
	"mount-cgroup2":  func([]string) (string, error) { return mountAt("cgroup2", "cgroup2", 0) },
	"mount-devtmpfs": func([]string) (string, error) { return mountAt("devtmpfs", "devtmpfs", 0) },
	"mount-debugfs":  func([]string) (string, error) { return mountAt("debugfs", "debugfs", 0) },
	"bind-proc1":     func([]string) (string, error) { return mountAt("/proc/1/root", "", unix.MS_BIND) },
	"remount-berth": func([]string) (string, error) {
		return "remounted", unix.Mount("", "/run/berth", "", unix.MS_REMOUNT|unix.MS_BIND, "")
	},
	"remount-sys":  func([]string) (string, error) { return "remounted", unix.Mount("", "/sys", "", unix.MS_REMOUNT, "") },
	"umount-berth": func([]string) (string, error) { return "gone", unix.Unmount("/run/berth", unix.MNT_DETACH) },
	"open-tree": func([]string) (string, error) {
		fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
		return closing(fd, err)
	},
	"pivot-root":   func([]string) (string, error) { return "pivoted", unix.PivotRoot("/", "/") },
	"chroot-dots":  chrootDots,
	"setns-1":      setnsOne,
	"unshare-user": func([]string) (string, error) { return unshared(unix.CLONE_NEWUSER) },
	"unshare-net":  func([]string) (string, error) { return unshared(unix.CLONE_NEWNET) },
	"unshare-ns":   func([]string) (string, error) { return unshared(unix.CLONE_NEWNS) },
	"ptrace-1":     func([]string) (string, error) { return ptraceOne() },
	"vm-readv-1":   vmReadOne,
	"bpf":          raw(unix.SYS_BPF, 5, 0, 0),
	"bpf-map":      bpfMap,
	"io-uring": func([]string) (string, error) {
		var p [120]byte
		fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 8, uintptr(unsafe.Pointer(&p)), 0)
		return closing(int(fd), errno(e))
	},
	"perf-event": perfEvent,
	"userfaultfd": func([]string) (string, error) {
		fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
		return closing(int(fd), errno(e))
	},
	"init-module": func([]string) (string, error) { return "loaded", unix.InitModule([]byte("no module"), "") },
	"finit-module": func([]string) (string, error) {
		f, err := os.Open("/proc/self/exe")
		if err != nil {
			return "", err
		}
		defer f.Close()
		return "loaded", unix.FinitModule(int(f.Fd()), "", 0)
	},
	"delete-module": func([]string) (string, error) { return "removed", unix.DeleteModule("ext4", unix.O_NONBLOCK) },
	"kexec":         raw(unix.SYS_KEXEC_LOAD, 0, 0, 0),
	"kexec-file":    raw(unix.SYS_KEXEC_FILE_LOAD, 0, 0, 0),
	"reboot":        raw(unix.SYS_REBOOT, unix.LINUX_REBOOT_MAGIC1, unix.LINUX_REBOOT_MAGIC2, unix.LINUX_REBOOT_CMD_CAD_OFF),
	"settime": func([]string) (string, error) {
		ts := unix.NsecToTimespec(time.Now().Add(1000 * time.Hour).UnixNano())
		return "set", unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
	},
	"adjtime": func([]string) (string, error) {
		_, err := unix.Adjtimex(&unix.Timex{Modes: 1, Offset: 1000})
		return "adjusted", err
	},
	"sethostname":   func([]string) (string, error) { return "set", unix.Sethostname([]byte("mine")) },
	"setdomainname": func([]string) (string, error) { return "set", unix.Setdomainname([]byte("mine")) },
	"swapon":        func([]string) (string, error) { return "on", withString(unix.SYS_SWAPON, "/etc/passwd") },
	"acct":          func([]string) (string, error) { return "on", unix.Acct("/tmp/acct") },
	"dmesg": func([]string) (string, error) {
		b := make([]byte, 4096)
		n, err := unix.Klogctl(3, b)
		return fmt.Sprintf("%d bytes", n), err
	},
	"iopl":         raw(unix.SYS_IOPL, 3, 0, 0),
	"ioperm":       raw(unix.SYS_IOPERM, 0x70, 2, 1),
	"quotactl":     raw(unix.SYS_QUOTACTL, 0x800002, 0, 0),
	"keyring-add":  keyringAdd,
	"keyring-find": keyringFind,
	"handle-open":  handleOpen,
	"rt-schedule":  rtSchedule,
	"nice":         func([]string) (string, error) { return "nicer", unix.Setpriority(unix.PRIO_PROCESS, 0, -20) },
	"rlimit-files": func([]string) (string, error) { return raiseLimit(unix.RLIMIT_NOFILE) },
	"rlimit-procs": func([]string) (string, error) { return raiseLimit(unix.RLIMIT_NPROC) },
	"mlock":        mlock,
	"personality":  raw(unix.SYS_PERSONALITY, 0x0400000, 0, 0),
	"fanotify": func([]string) (string, error) {
		fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT, unix.O_RDONLY)
		return closing(fd, err)
	},
	"vhangup":        raw(unix.SYS_VHANGUP, 0, 0, 0),
	"lookup-dcookie": raw(212, 0, 0, 0),
	"tiocsti":        tiocsti,
	"kill-1":         func([]string) (string, error) { return "killed", unix.Kill(1, unix.SIGKILL) },
	"kill-all":       func([]string) (string, error) { return "killed", unix.Kill(-1, unix.SIGCONT) },
	"mknod-disk":     mknodDisk,
	"mknod-port":     mknodPort,
	"sysvshm":        sysvShm,
	"suid":           suid,
	"modprobe":       modprobe,
}

func errno(e syscall.Errno) error {
	if e != 0 {
		return e
	}
	return nil
}

func closing(fd int, err error) (string, error) {
	if err != nil {
		return "", err
	}
	_ = unix.Close(fd)
	return fmt.Sprintf("descriptor %d", fd), nil
}

func raw(nr, a, b, c uintptr) attempt {
	return func([]string) (string, error) {
		r, _, e := unix.Syscall(nr, a, b, c)
		return fmt.Sprintf("returned %d", r), errno(e)
	}
}

func withString(nr uintptr, s string) error {
	p, err := unix.BytePtrFromString(s)
	if err != nil {
		return err
	}
	_, _, e := unix.Syscall(nr, uintptr(unsafe.Pointer(p)), 0, 0)
	return errno(e)
}

func mountAt(source, kind string, flags uintptr) (string, error) {
	dir, err := os.MkdirTemp("/tmp", "m")
	if err != nil {
		return "", err
	}
	if err := unix.Mount(source, dir, kind, flags, ""); err != nil {
		return "", err
	}
	seen, _ := list([]string{dir})
	_ = unix.Unmount(dir, unix.MNT_DETACH)
	return "mounted; in it: " + seen[:min(len(seen), 200)], nil
}

// chrootDots is the old way out: a folder that stays open above a new root.
func chrootDots([]string) (string, error) {
	dir, err := os.MkdirTemp("/tmp", "c")
	if err != nil {
		return "", err
	}
	up, err := os.Open("/")
	if err != nil {
		return "", err
	}
	if err := unix.Chroot(dir); err != nil {
		return "", err
	}
	if err := up.Chdir(); err != nil {
		return "", err
	}
	for range 64 {
		_ = os.Chdir("..")
	}
	if err := unix.Chroot("."); err != nil {
		return "", err
	}
	return list([]string{"/"})
}

func setnsOne([]string) (string, error) {
	all, _ := filepath.Glob("/proc/1/ns/*")
	for _, path := range all {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		runtime.LockOSThread()
		err = unix.Setns(int(f.Fd()), 0)
		_ = f.Close()
		if err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("none of %d namespaces can be entered", len(all))
}

func unshared(flags int) (string, error) {
	cmd := exec.Command("/proc/self/exe", "list", "/proc/self")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: uintptr(flags)}
	_, err := cmd.Output()
	return "unshared", err
}

func ptraceOne() (string, error) {
	runtime.LockOSThread()
	if err := unix.PtraceSeize(1); err != nil {
		return "", err
	}
	return "process 1 is traced", nil
}

func vmReadOne([]string) (string, error) {
	b := make([]byte, 16)
	local := []unix.Iovec{{Base: &b[0], Len: 16}}
	maps, err := os.ReadFile("/proc/1/maps")
	if err != nil {
		return "", err
	}
	var from uint64
	if _, err := fmt.Sscanf(string(maps), "%x-", &from); err != nil {
		return "", err
	}
	n, err := unix.ProcessVMReadv(1, local, []unix.RemoteIovec{{Base: uintptr(from), Len: 16}}, 0)
	return fmt.Sprintf("%d bytes of process 1", n), err
}

func bpfMap([]string) (string, error) {
	attr := [72]byte{0: 2, 4: 4, 8: 4, 12: 1} // an array of one
	fd, _, e := unix.Syscall(unix.SYS_BPF, 0, uintptr(unsafe.Pointer(&attr)), 72)
	return closing(int(fd), errno(e))
}

func perfEvent([]string) (string, error) {
	fd, err := unix.PerfEventOpen(&unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{}))}, -1, 0, -1, 0)
	return closing(fd, err)
}

func keyringAdd(a []string) (string, error) {
	id, err := unix.AddKey("user", "berth-hostile", []byte(a[0]), unix.KEY_SPEC_USER_KEYRING)
	return fmt.Sprintf("key %d", id), err
}

func keyringFind([]string) (string, error) {
	id, err := unix.KeyctlSearch(unix.KEY_SPEC_USER_KEYRING, "user", "berth-hostile", 0)
	if err != nil {
		return "", err
	}
	b := make([]byte, 200)
	n, err := unix.KeyctlBuffer(unix.KEYCTL_READ, id, b, 0)
	return string(b[:max(0, n)]), err
}

// handleOpen asks for the root of the file system by number, as the "shocker" exploit did.
func handleOpen([]string) (string, error) {
	dir, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return "", err
	}
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/etc", 0)
	if err != nil {
		h = unix.NewFileHandle(1, []byte{2, 0, 0, 0, 0, 0, 0, 0})
	}
	for _, at := range []string{"/", "/etc/passwd", "/run/berth"} {
		if fd, err := unix.Open(at, unix.O_RDONLY, 0); err == nil {
			if got, err := unix.OpenByHandleAt(fd, h, unix.O_RDONLY); err == nil {
				return closing(got, nil)
			}
		}
	}
	fd, err := unix.OpenByHandleAt(dir, h, unix.O_RDONLY)
	return closing(fd, err)
}

func rtSchedule([]string) (string, error) {
	return "real time", unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 50}, 0)
}

func raiseLimit(what int) (string, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(what, &l); err != nil {
		return "", err
	}
	l.Max++
	if l.Max == 0 {
		return "", fmt.Errorf("it has no limit to raise")
	}
	return fmt.Sprintf("now %d", l.Max), unix.Setrlimit(what, &l)
}

func mlock([]string) (string, error) {
	b, err := unix.Mmap(-1, 0, 512<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return "", err
	}
	return "512 MiB are locked", unix.Mlock(b)
}

func tiocsti([]string) (string, error) {
	f, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	c := byte('x')
	_, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.TIOCSTI, uintptr(unsafe.Pointer(&c)))
	return "typed", errno(e)
}

// mknodDisk makes nodes of every block device that a machine might have and reads one.
func mknodDisk([]string) (string, error) {
	var last error
	for _, major := range []uint32{7, 8, 9, 252, 253, 254, 259} {
		for minor := range uint32(4) {
			path := fmt.Sprintf("/tmp/dev-%d-%d", major, minor)
			if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor))); err != nil {
				last = err
				continue
			}
			got, err := readSome(path)
			_ = os.Remove(path)
			if err == nil {
				return fmt.Sprintf("%d:%d %.60s", major, minor, got), nil
			}
			last = err
		}
	}
	return "", last
}

// mknodPort makes nodes of the serial ports by which a machine talks with its host, whose number the
// kernel chose when it started.
func mknodPort([]string) (string, error) {
	last := errors.New("no number could be tried")
	for major := uint32(229); major < 512; major++ {
		for minor := range uint32(4) {
			path := fmt.Sprintf("/tmp/port-%d-%d", major, minor)
			if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(major, minor))); err != nil {
				last = err
				continue
			}
			f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
			_ = os.Remove(path)
			if err == nil {
				_ = f.Close()
				return fmt.Sprintf("%d:%d is open", major, minor), nil
			}
			last = err
		}
	}
	return "", last
}

func sysvShm(a []string) (string, error) {
	id, err := unix.SysvShmGet(0x62657274, 4096, 0o666|map[bool]int{true: unix.IPC_CREAT}[a[0] == "make"])
	if err != nil {
		return "", err
	}
	b, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		return "", err
	}
	if a[0] == "make" {
		copy(b, a[1])
		return "made", nil
	}
	return string(b[:32]), nil
}

// suid makes this program set-user-id of root and runs it: it says which user it was then.
func suid([]string) (string, error) {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	path := "/tmp/suid"
	if err := os.WriteFile(path, b, 0o755); err != nil {
		return "", err
	}
	defer os.Remove(path)
	if err := os.Chmod(path, 0o4755); err != nil {
		return "", err
	}
	cmd := exec.Command(path, "look-self")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
	out, err := cmd.Output()
	if err != nil {
		return "", err
	}
	if !strings.Contains(string(out), "Uid: 12345 0") {
		return "", fmt.Errorf("it stayed who it was: %s", out)
	}
	return string(out), nil
}

// modprobe asks for a socket family that only a module could serve.
func modprobe([]string) (string, error) {
	before, _ := os.ReadFile("/proc/modules")
	for _, family := range []int{unix.AF_RDS, unix.AF_TIPC, unix.AF_ALG, unix.AF_CAN, unix.AF_SMC} {
		if fd, err := unix.Socket(family, unix.SOCK_SEQPACKET, 0); err == nil {
			_ = unix.Close(fd)
		}
	}
	after, _ := os.ReadFile("/proc/modules")
	if len(after) > len(before) {
		return "a module was loaded", nil
	}
	return "", fmt.Errorf("no module was loaded")
}
