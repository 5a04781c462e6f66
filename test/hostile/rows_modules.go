package hostile

// wasmRows are the attempts of a module, the only kind of program that runs in tier wasm. Own says why
// one may come through.
var wasmGroups = []Group{
	{"another session", "files, secrets and work of another user's session, or of another call", wasmOther},
	{"network", "what can be reached from the host", wasmNetwork},
	{"host", "the host, and with it every session on it", wasmHost},
	{"limits", "time and memory of neighbours", wasmLimits},
}

var wasmOther = []Row{
	{Name: "read its files", Do: []string{"look-files", "MARK"}},
	{Name: "find its files by name", Do: []string{"look-names", "MARK"}},
	{Name: "find its secret in its own arguments and environment", Do: []string{"look-self", "MARK", "KEY"}},
	{Name: "learn its key", Do: []string{"look-files", "KEY"}},
	{Name: "find a grant, a bus seed or a private key", Do: []string{"look-tokens"}},
	{Name: "see its processes", Do: []string{"list", "/proc", "/proc/1/root", "/proc/self"}},
	{Name: "read its environment", Do: []string{"read", "/proc/1/environ", "/proc/self/environ", "/proc/2/environ"}},
	{Name: "read its memory", Do: []string{"read", "/proc/self/mem", "/proc/self/maps", "/proc/1/maps"}},
	{Name: "see its raw disk layer", Do: []string{"list", "/upper", "/work", "/../upper", "/tmp/u", "/tmp/l"}},
	{Name: "read machine code that is shared", Do: []string{"list", "/cache", "/tmp/wazero", "/.cache"}},
	{Name: "find the descriptors of another call", Do: []string{"fds"}},
}

var wasmNetwork = []Row{
	{Name: "reach the bus", Do: []string{"dial", "tcp", "BUS ADDRESS"}},
	{Name: "reach the metadata service", Do: []string{"dial", "tcp", "169.254.169.254:80"}},
	{Name: "ask a resolver over UDP", Do: []string{"dial", "udp", "192.0.2.53:53"}},
	{Name: "look a name up", Do: []string{"resolve", "example.com"}},
	{Name: "connect to a socket of the host", Do: []string{"dial", "unix", "/run/containerd/containerd.sock"}},
	{Name: "accept on a socket that was left open", Do: []string{"listen"}},
}

var wasmHost = []Row{
	{Name: "read files of the kernel", Do: []string{"read", "/proc/version", "/proc/kcore", "/proc/keys", "/proc/sched_debug", "/sys/kernel/notes"}},
	{Name: "list what the kernel shows", Do: []string{"list", "/sys", "/sys/kernel", "/proc/sys"}},
	{Name: "climb out by dots", Do: []string{"read", "/../../../../../../../../proc/version", "../../../../../../../../sys/kernel/uevent_seqnum", "/root/../../../proc/1/environ"}},
	{Name: "climb out by a link", Do: []string{"link-read", "/proc/1/root/etc/shadow", "/proc/self/root/proc/version", "../../../../../../../../proc/version", "/sys/kernel"}},
	{Name: "give a file of the host another name", Do: []string{"hard-link", "/proc/version", "/dev/berth-wasm", "/run/berth/session.json", "/dev/null"}},
	{Name: "find a device", Do: []string{"devices"}},
	{Name: "open a device of the host", Do: []string{"read", "/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/vda", "/dev/loop0", "/dev/loop-control", "/dev/fuse", "/dev/net/tun"}},
	{Name: "write the program that runs it", Do: []string{"write", "/dev/berth-wasm"}},
	{Name: "make a file in /dev", Do: []string{"make", "/dev/new", "/dev/shm/new"}},
	{Name: "write session.json", Do: []string{"write", "/run/berth/session.json"}},
	{Name: "add a file to /run/berth", Do: []string{"make", "/run/berth/new"}},
	{Name: "move the parts of its sandbox away", Do: []string{"rename-in", "/dev", "/dev/berth-wasm", "/run/berth", "/run"}},
	{Name: "list the host's run folder of Berth", Do: []string{"list", "/run/berth/ids", "/run/containerd", "/run/berth/../../run/systemd"}},
	{Name: "write cgroup files", Do: []string{"write", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max"}},
	{Name: "write a setting of the kernel", Do: []string{"write", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/modprobe"}},
	{Name: "start a program", Do: []string{"exec", "/bin/sh", "-c", "id"}},
	{Name: "send a signal", Do: []string{"signal"}},
	{Name: "pass pointers that are none to every function of WASI", Do: []string{"pointers"}},
}

var wasmLimits = []Row{
	{Name: "take memory without end", Do: []string{"grow"}},
	{Name: "write output without end", Do: []string{"flood"}},
	{Name: "fill the memory of /tmp", Do: []string{"fill", "/tmp"}},
	{Name: "write a file larger than any disk", Do: []string{"huge-file"}},
	{Name: "open files without end", Do: []string{"fd-hog"}},
	{Name: "make folders without end", Do: []string{"deep"}},
	{Name: "call itself without end", Do: []string{"recurse"}},
	{Name: "use memory that it does not have", Do: []string{"panic"}},
}

// wasmPrograms are what a caller may name as the program, none of which may run: the file's content.
var wasmPrograms = []struct{ name, path, content string }{
	{"a native shell", "/bin/sh", ""},
	{"a native program that was brought in", "/root/elf", "ELF"},
	{"a script", "/root/script", "#!/bin/sh\nid\n"},
	{"a module that is cut short", "/root/cut.wasm", "CUT"},
	{"a module with nothing in it", "/root/empty.wasm", "\x00"},
	{"random bytes", "/root/noise.wasm", "\x00asm\x01\x00\x00\x00\xff\xff\xff\xff\x7f"},
	{"a module that needs functions that are not there", "/root/needs.wasm", "NEEDS"},
	{"a module with 4 GiB of memory", "/root/large.wasm", "LARGE"},
	{"a folder", "/root", ""},
	{"a device", "/dev/null", ""},
	{"the program that runs modules", "/dev/berth-wasm", ""},
	{"a file that is not there", "/root/none.wasm", ""},
}

// wasmScripts are what JavaScript tries; each must end with an error or print nothing.
var wasmScripts = []struct{ name, text string }{
	{"read the environment of a process", `print(readFile('/proc/self/environ'))`},
	{"climb out by dots", `print(readFile('/../../../../../proc/version'))`},
	{"list the kernel's files", `print(listDir('/sys').join())`},
	{"write session.json", `writeFile('/run/berth/session.json', '{}'); print('written')`},
	{"load a module of the host", `print(typeof require('child_process'))`},
	{"fetch", `print(fetch('http://169.254.169.254/').status)`},
	{"reach Go by the tools' functions", `print(readFile.constructor('return this.process.env')().PATH)`},
	{"find what an earlier script left", `print(globalThis.left.toString())`},
	{"take memory without end", `var a=[]; for(;;) a.push('x'.repeat(1<<20)+a.length); print('endless')`},
	{"call itself without end", `(function f(){ f() })(); print('endless')`},
	{"build a string without end", `var s='x'; for(;;) s+=s; print('endless')`},
}
