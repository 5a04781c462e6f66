package hostile

// Row is one attempt from inside a sandbox. It must be refused in every tier, unless Own says why it
// may come through there: it then reaches nothing but the sandbox's own kernel or files, and what the
// host looks like is compared before and after all rows.
type Row struct {
	// Name is what is tried, in words; the test's name.
	Name string
	// Do are the probe's arguments. MARK stands for what only the other session knows, KEY for that
	// session's key, BUS for the port of the bus, HOSTS for the host's addresses.
	Do []string
	// Own says for a tier why the attempt may come through.
	Own map[string]string
	// Users: root, user, or empty for both.
	Users string
}

// Reasons that several rows share.
const (
	ownKernel = "it is the machine's own kernel, which nobody else uses"
	sentry    = "gVisor's own kernel answers, which nobody else uses"
)

func only(reason string, tiers ...string) map[string]string {
	out := map[string]string{}
	for _, t := range tiers {
		out[t] = reason
	}
	return out
}

func join(all ...map[string]string) map[string]string {
	out := map[string]string{}
	for _, m := range all {
		for t, why := range m {
			out[t] = why
		}
	}
	return out
}

// Group is rows that would lose the same.
type Group struct {
	Name string
	// Loss is what a session could take if a row came through.
	Loss string
	Rows []Row
}

// groups are the rows in the order of docs/threat-model.md.
var groups = []Group{
	{"another session", "files, secrets and work of another user's session", anotherSession},
	{"network", "what can be reached from the host: the bus, credentials of the machine in the cloud, other networks", network},
	{"host", "the host, and with it every session on it", theHost},
	{"kernel", "the kernel: of the machine where it is the host's own, else of this one session", theKernel},
	{"limits", "what neighbours need: memory, descriptors", theLimits},
}

// anotherSession: the other session holds MARK in a file, its memory, its arguments, its environment,
// a shared memory segment, its keyring, a TCP port and an abstract socket, and locks a file of the image.
var anotherSession = []Row{
	{Name: "read its files", Do: []string{"look-files", "MARK"}},
	{Name: "find its files by name", Do: []string{"look-names", "MARK"}},
	{Name: "see its processes", Do: []string{"look-procs", "MARK"}},
	{Name: "read its environment", Do: []string{"look-environ", "MARK"}},
	{Name: "read its memory", Do: []string{"look-memory", "MARK"}},
	{Name: "learn its key", Do: []string{"look-ids", "KEY"}},
	{Name: "find a grant, a bus seed or a private key", Do: []string{"look-tokens"}},
	{Name: "see its shared memory files", Do: []string{"shm-file", "MARK"}},
	{Name: "attach its System V shared memory", Do: []string{"sysvshm", "use"}},
	{Name: "read its keyring", Do: []string{"keyring-find"}},
	{Name: "connect to its port on loopback", Do: []string{"dial", "tcp", "127.0.0.1:7777"}},
	{Name: "connect to its port on IPv6 loopback", Do: []string{"dial", "tcp", "[::1]:7777"}},
	{Name: "connect to its abstract socket", Do: []string{"abstract"}},
	{Name: "feel its lock on a file of the image", Do: []string{"lock-lower"}},
	{Name: "see its raw disk layer", Do: []string{"upper-out"}},
}

var network = []Row{
	{Name: "reach the bus", Do: []string{"dial-all", "BUS", "HOSTS"}},
	{Name: "reach the host's ssh", Do: []string{"dial-all", "22", "HOSTS"}},
	{Name: "reach the metadata service", Do: []string{"dial", "tcp", "169.254.169.254:80"}},
	{Name: "reach the metadata service over IPv6", Do: []string{"dial", "tcp", "[fd00:ec2::254]:80"}},
	{Name: "reach a container's metadata service", Do: []string{"dial", "tcp", "169.254.170.2:80"}},
	{Name: "send to an address of documentation", Do: []string{"dial", "tcp", "192.0.2.1:443"}},
	{Name: "ask a resolver over UDP", Do: []string{"udp", "192.0.2.53:53"}},
	{Name: "look a name up", Do: []string{"resolve", "example.com"}},
	{Name: "ping through a raw socket", Do: []string{"raw-icmp", "192.0.2.1"}},
	{Name: "listen to the wire", Do: []string{"packet"}},
	{Name: "connect by vsock to the host", Do: []string{"vsock"}},
	{Name: "leave by a route of its own", Do: []string{"add-route", "192.0.2.1:443"}},
	{Name: "have an interface that leads out", Do: []string{"interfaces"}},
	{Name: "make a tunnel device", Do: []string{"tun"}, Own: join(only(ownKernel, "kata", "microvm"), only(sentry, "gvisor"))},
	{Name: "unshare the network", Do: []string{"unshare-net"}, Own: only(ownKernel, "kata", "microvm")},
}

var theHost = []Row{
	{Name: "find a socket of the host", Do: []string{"look-sockets"}},
	{Name: "find a pipe of the host", Do: []string{"look-pipes"}},
	{Name: "open containerd's socket", Do: []string{"dial", "unix", "/run/containerd/containerd.sock"}},
	{Name: "open Docker's socket", Do: []string{"dial", "unix", "/var/run/docker.sock"}},
	{Name: "list the host's run folder of Berth", Do: []string{"list", "/run/berth/ids"}},
	{Name: "find a descriptor of the host", Do: []string{"look-fds"}},
	{Name: "find a device", Do: []string{"look-devices"}, Own: only("gVisor's own /dev/fuse and /dev/net/tun, which end in its kernel", "gvisor")},
	{Name: "make and read a block device", Do: []string{"mknod-disk"}},
	{Name: "open /dev/mem", Do: []string{"open", "/dev/mem"}},
	{Name: "open /dev/kmsg", Do: []string{"open", "/dev/kmsg"}},
	{Name: "open /dev/kvm", Do: []string{"open", "/dev/kvm"}},
	{Name: "open /dev/fuse", Do: []string{"open", "/dev/fuse"}, Own: only(sentry, "gvisor")},
	{Name: "open /dev/loop-control", Do: []string{"open", "/dev/loop-control"}},
	{Name: "open the control port of its machine", Do: []string{"open", "/dev/virtio-ports/berth.control"}},
	{Name: "open the first disk of its machine", Do: []string{"open", "/dev/vda"}},
	{Name: "make and open a port of its machine", Do: []string{"mknod-port"}},
	{Name: "list the ports of its machine", Do: []string{"list", "/sys/class/virtio-ports"}},
	{Name: "take a device of its machine away", Do: []string{"write", "/sys/bus/virtio/drivers/virtio_blk/unbind", "virtio1"}},
	{Name: "open the second disk of its machine", Do: []string{"open", "/dev/vdb"}},
	{Name: "write session.json", Do: []string{"write", "/run/berth/session.json", "{}"}},
	{Name: "write the guest agent", Do: []string{"write", "/run/berth/guest", "x"}},
	{Name: "raise limits in cgroup files", Do: []string{"cgroup-grow"}},
	{Name: "write core_pattern", Do: []string{"write", "/proc/sys/kernel/core_pattern", "|/tmp/x"}},
	{Name: "write modprobe's path", Do: []string{"write", "/proc/sys/kernel/modprobe", "/tmp/x"}},
	{Name: "write a sysctl of memory", Do: []string{"write", "/proc/sys/vm/panic_on_oom", "1"}},
	{Name: "write a sysctl of the network's core", Do: []string{"write", "/proc/sys/net/core/rmem_max", "1"}},
	{Name: "write the limit of processes of everybody", Do: []string{"write", "/proc/sys/kernel/pid_max", "4194304"}},
	{Name: "write the limit of open files of everybody", Do: []string{"write", "/proc/sys/fs/file-max", "9223372036854775807"}},
	{Name: "drop caches", Do: []string{"write", "/proc/sys/vm/drop_caches", "3"}},
	{Name: "write binfmt_misc", Do: []string{"write", "/proc/sys/fs/binfmt_misc/register", ":x:M::x::/tmp/x:"}},
	{Name: "press a magic key", Do: []string{"write", "/proc/sysrq-trigger", "h"}},
	{Name: "read the kernel's memory", Do: []string{"read", "/proc/kcore"}},
	{Name: "read the host's kernel keys", Do: []string{"read", "/proc/keys"}},
	{Name: "read the host's timers", Do: []string{"read", "/proc/timer_list"}},
	{Name: "read the scheduler's secrets", Do: []string{"read", "/proc/sched_debug"}},
	{Name: "list firmware", Do: []string{"list", "/sys/firmware"}},
	{Name: "write uevent_helper", Do: []string{"write", "/sys/kernel/uevent_helper", "/tmp/x"}},
	{Name: "write the power state", Do: []string{"write", "/sys/power/state", "mem"}},
	{Name: "list debugfs", Do: []string{"list", "/sys/kernel/debug"}},
	{Name: "list the host's block devices", Do: []string{"list", "/sys/block"}, Own: only("names only; sizes of devices that no sandbox can open", "container")},
}

var theKernel = []Row{
	{Name: "mount tmpfs", Do: []string{"mount-tmpfs"}},
	{Name: "mount proc", Do: []string{"mount-proc"}},
	{Name: "mount sysfs", Do: []string{"mount-sysfs"}},
	{Name: "mount cgroup", Do: []string{"mount-cgroup"}},
	{Name: "mount cgroup2", Do: []string{"mount-cgroup2"}},
	{Name: "mount devtmpfs", Do: []string{"mount-devtmpfs"}},
	{Name: "mount debugfs", Do: []string{"mount-debugfs"}},
	{Name: "bind the root of process 1", Do: []string{"bind-proc1"}},
	{Name: "remount /run/berth writable", Do: []string{"remount-berth"}},
	{Name: "remount /sys writable", Do: []string{"remount-sys"}},
	{Name: "unmount /run/berth", Do: []string{"umount-berth"}},
	{Name: "clone the mount tree", Do: []string{"open-tree"}},
	{Name: "pivot the root", Do: []string{"pivot-root"}},
	{Name: "enter a namespace of process 1", Do: []string{"setns-1"}},
	{Name: "make a user namespace", Do: []string{"unshare-user"}},
	{Name: "make a mount namespace", Do: []string{"unshare-ns"}},
	{Name: "trace process 1", Do: []string{"ptrace-1"}},
	{Name: "read the memory of process 1", Do: []string{"vm-readv-1"}},
	{Name: "load a BPF program", Do: []string{"bpf"}},
	{Name: "make a BPF map", Do: []string{"bpf-map"}},
	{Name: "use io_uring", Do: []string{"io-uring"}, Own: only(ownKernel, "kata", "microvm")},
	{Name: "use perf events", Do: []string{"perf-event"}},
	{Name: "use userfaultfd", Do: []string{"userfaultfd"}},
	{Name: "load a module", Do: []string{"init-module"}},
	{Name: "load a module from a file", Do: []string{"finit-module"}},
	{Name: "remove a module", Do: []string{"delete-module"}},
	{Name: "have a module loaded for a socket", Do: []string{"modprobe"}},
	{Name: "load another kernel", Do: []string{"kexec"}},
	{Name: "load another kernel from a file", Do: []string{"kexec-file"}},
	{Name: "reboot", Do: []string{"reboot"}},
	{Name: "set the clock", Do: []string{"settime"}},
	{Name: "adjust the clock", Do: []string{"adjtime"}},
	{Name: "set the host name", Do: []string{"sethostname"}},
	{Name: "set the domain name", Do: []string{"setdomainname"}},
	{Name: "swap to a file", Do: []string{"swapon"}},
	{Name: "write process accounting", Do: []string{"acct"}},
	{Name: "read the kernel's log", Do: []string{"dmesg"}},
	{Name: "use I/O ports by iopl", Do: []string{"iopl"}},
	{Name: "use I/O ports by ioperm", Do: []string{"ioperm"}},
	{Name: "use quotas of the disk", Do: []string{"quotactl"}},
	{Name: "add a key to the user's keyring", Do: []string{"keyring-add", "x"}, Own: only(ownKernel, "kata", "microvm")},
	{Name: "open a file by its handle", Do: []string{"handle-open"}},
	{Name: "schedule in real time", Do: []string{"rt-schedule"}},
	{Name: "be nicer than the others", Do: []string{"nice"}, Own: only("gVisor keeps the number and schedules by none", "gvisor")},
	{Name: "raise the limit of open files", Do: []string{"rlimit-files"}},
	{Name: "raise the limit of processes", Do: []string{"rlimit-procs"}},
	{Name: "watch the whole file system", Do: []string{"fanotify"}},
	{Name: "hang up the terminal", Do: []string{"vhangup"}},
	{Name: "type into the terminal", Do: []string{"tiocsti"}},
	{Name: "become root by a set-user-id file", Do: []string{"suid"}, Users: "root"},
	{Name: "kill process 1", Do: []string{"kill-1"}, Users: "user"},
}

// theLimits take what they can get; each must be refused something in the end. That the neighbour
// goes on is a test of its own.
var theLimits = []Row{
	{Name: "open files without end", Do: []string{"fd-hog"}},
	{Name: "lock half a gigabyte of memory", Do: []string{"mlock"}},
}
