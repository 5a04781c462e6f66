package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

const (
	runPoint   = "/run/berth"
	guestName  = "guest"
	maxFiles   = 65536
	runBytes   = 16 << 20
	shmBytes   = 64 << 20
	minTmp     = 16 << 20
	tmpDivisor = 2 // /tmp may take this part of the memory limit
)

// capabilities are what a package manager or a build needs of root, and nothing that reaches the
// network, devices or the kernel.
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_SETFCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT",
}

// maskedPaths are not for a sandbox to see. The loop devices of the host name the disks, and so the
// keys, of all its sessions, and every disk counts what is written to it. The number of the host's last
// boot tells two sandboxes that they are on one machine.
var maskedPaths = []string{
	"/sys/block", "/sys/class/block", "/sys/class/bdi", "/sys/dev/block", "/sys/devices/virtual/block",
	"/sys/devices/virtual/bdi", "/sys/fs/ext4", "/proc/fs/ext4", "/proc/fs/jbd2", "/proc/diskstats", "/proc/partitions",
	"/proc/sys/kernel/random/boot_id", "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
	"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
	"/sys/devices/virtual/powercap", "/sys/devices/system/cpu/cpu0/thermal_throttle", "/sys/fs/cgroup", "/sys/kernel/security",
}

var readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}

var basePath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func (m *making) ociSpec() *specs.Spec {
	s := &specs.Spec{
		Version:  specs.Version,
		Root:     &specs.Root{Path: m.d.root(m.id)},
		Hostname: m.hostname(),
		Process:  m.process(),
		Mounts:   m.mounts(),
		Annotations: map[string]string{
			criType:    "sandbox",
			criSandbox: string(m.id),
		},
		Linux: &specs.Linux{
			CgroupsPath:   "/" + m.d.cgroupOf(m.id) + "/box",
			Namespaces:    m.namespaces(),
			MaskedPaths:   maskedPaths,
			ReadonlyPaths: readonlyPaths,
			Resources:     &specs.LinuxResources{Devices: deviceRules()},
		},
	}
	s.Linux.Seccomp = m.filter(s)
	if m.warm != nil {
		m.warm.shape(m, s)
	}
	return s
}

// filter is containerd's default system call filter, for this machine's own calls alone: 32-bit
// programs do not run, and it is built three times as fast, a third of what a start takes. Of the
// kinds of socket it leaves those that programs without a network use.
func (m *making) filter(s *specs.Spec) *specs.LinuxSeccomp {
	f := seccomp.DefaultProfile(s)
	f.Architectures = nil
	f.Syscalls = slices.DeleteFunc(f.Syscalls, func(c specs.LinuxSyscall) bool {
		return slices.Equal(c.Names, []string{"socket"})
	})
	for _, family := range socketFamilies {
		f.Syscalls = append(f.Syscalls, specs.LinuxSyscall{Names: []string{"socket"}, Action: specs.ActAllow,
			Args: []specs.LinuxSeccompArg{{Index: 0, Value: family, Op: specs.OpEqualTo}}})
	}
	if m.spec.Tier != driver.GVisor {
		return f
	}
	// The profile answers clone3 with ENOSYS, upon which every libc uses clone. gVisor knows no answer
	// but EPERM, upon which no thread starts. Its own kernel stands behind the call.
	for i, c := range f.Syscalls {
		if len(c.Names) == 1 && c.Names[0] == "clone3" {
			f.Syscalls[i].Action, f.Syscalls[i].ErrnoRet = specs.ActAllow, nil
		}
	}
	return f
}

var socketFamilies = []uint64{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}

func (m *making) process() *specs.Process {
	args := m.spec.Init
	if len(args) == 0 {
		args = []string{runPoint + "/" + guestName}
	}
	return &specs.Process{
		Args: args, Cwd: "/", Env: environment(m.spec), NoNewPrivileges: true,
		Capabilities: &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
		Rlimits:      m.rlimits(),
	}
}

func (m *making) rlimits() []specs.POSIXRlimit {
	out := []specs.POSIXRlimit{
		{Type: "RLIMIT_NOFILE", Soft: files(m.spec.Limits), Hard: files(m.spec.Limits)},
		{Type: "RLIMIT_CORE"},
	}
	if m.spec.Tier == driver.GVisor {
		out = append(out, specs.POSIXRlimit{Type: "RLIMIT_NPROC", Soft: tasks(m.spec.Limits), Hard: tasks(m.spec.Limits)})
	}
	return out
}

// environment is the image's, then the session's; a PATH is always there.
func environment(spec driver.Spec) []string {
	return append(append([]string{basePath}, spec.Image.Env...), spec.Env...)
}

// files is how many files a process may have open.
func files(l driver.Limits) uint64 {
	if n := l.OpenFiles; n > 0 {
		return n
	}
	return min(mostFiles(), maxFiles)
}

// mostFiles is what this process may give away.
func mostFiles() uint64 {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 1024
	}
	return l.Max
}

func (m *making) namespaces() []specs.LinuxNamespace {
	ns := []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
		{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
	}
	if m.spec.Tier == driver.Container {
		ns = append(ns, specs.LinuxNamespace{Type: specs.CgroupNamespace},
			specs.LinuxNamespace{Type: specs.UserNamespace, Path: m.space.Path()})
	}
	return ns
}

func (m *making) mounts() []specs.Mount {
	tmpfs := func(to, mode string, bytes uint64, more ...string) specs.Mount {
		return specs.Mount{Destination: to, Type: "tmpfs", Source: "tmpfs",
			Options: append([]string{"nosuid", "mode=" + mode, fmt.Sprintf("size=%d", bytes)}, more...)}
	}
	tmp := tmpSize(m.spec.Limits)
	out := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		tmpfs("/dev", "755", 64<<10, "strictatime"),
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		tmpfs("/dev/shm", "1777", min(shmBytes, tmp), "noexec", "nodev"),
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		tmpfs("/run", "755", runBytes, "nodev"),
		tmpfs("/tmp", "1777", tmp, "nodev"),
		{Destination: runPoint, Type: "bind", Source: m.spec.RunDir, Options: []string{"bind", "ro", "nosuid", "nodev"}},
	}
	if m.spec.Guest != "" && !m.linked {
		out = append(out, specs.Mount{Destination: filepath.Join(runPoint, guestName), Type: "bind", Source: m.spec.Guest,
			Options: []string{"bind", "ro", "nosuid", "nodev"}})
	}
	return out
}

// tmpSize is how much /tmp may hold.
func tmpSize(l driver.Limits) uint64 { return max(l.MemoryBytes/tmpDivisor, minTmp) }

// deviceRules deny everything but what /dev of a container holds.
func deviceRules() []specs.LinuxDeviceCgroup {
	rules := []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	allow := func(major, minor int64) {
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &major, Minor: &minor, Access: "rw"})
	}
	for _, minor := range []int64{3, 5, 7, 8, 9} { // null zero full random urandom
		allow(1, minor)
	}
	allow(5, 0) // tty
	allow(5, 2) // ptmx
	allow(136, -1)
	return rules
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// exists reports whether anything is at path.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
