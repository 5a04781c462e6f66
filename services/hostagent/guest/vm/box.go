package vm

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// kernelShare is what of the machine's memory a session is never given: a supervisor that finds none
// could not say why the session was ended.
const kernelShare = 32 << 20

// spare stays free of what is to be had when the session begins: a machine that runs out as a whole
// reads its programs again and again instead of ending the process that took too much.
const spare = 16 << 20

// agentWeight is the agent's share of the processor, a hundred times that of all processes of the
// session together (cgroup v2, cpu.weight): hundreds of them must not keep it from answering.
const agentWeight = "10000"

// makeBox makes the cgroup of everything that is not the supervisor. In it, the agent has one of its
// own: a session that has reached a limit must not take a thread or a page from it.
func makeBox() error {
	for _, dir := range []string{boxCgroup, agentCgroup, usersCgroup} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
	}
	return controllers(cgroupDir)
}

// divideBox moves the stage out of the box's own cgroup, which is the root of what it sees, so that
// the parts of the box can have limits.
func divideBox(stage int) error {
	if err := enter(agentCgroup, stage); err != nil {
		return err
	}
	if err := controllers(boxCgroup); err != nil {
		return err
	}
	if err := os.WriteFile(agentCgroup+"/cpu.weight", []byte(agentWeight), 0); err != nil {
		return fmt.Errorf("share of the processor: %w", err)
	}
	return nil
}

func enter(dir string, pid int) error {
	if err := os.WriteFile(dir+"/cgroup.procs", strconv.AppendInt(nil, int64(pid), 10), 0); err != nil {
		return fmt.Errorf("move into cgroup: %w", err)
	}
	return nil
}

func controllers(dir string) error {
	if err := os.WriteFile(dir+"/cgroup.subtree_control", []byte("+cpu +pids +memory"), 0); err != nil {
		return fmt.Errorf("cgroup controllers: %w", err)
	}
	return nil
}

// limit sets what the session may use, and returns its memory in bytes and the limits that hold. The memory
// is less than l.Memory where the kernel of the VM needs a part of that.
func limit(l vmwire.Limits) (memory uint64, held []string, err error) {
	if l.PIDs > 0 {
		if err := setBox("pids.max", uint64(l.PIDs)); err != nil {
			return 0, nil, err
		}
		held = append(held, vmwire.EnforcedPIDs)
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, nil, fmt.Errorf("size of memory: %w", err)
	}
	all := info.Totalram * uint64(info.Unit)
	most := max(all-min(all, kernelShare), all/2)
	if free := available(); free > 0 {
		most = min(most, max(free-min(free, spare), all/4))
	}
	if l.Memory > 0 {
		most = min(most, l.Memory)
		held = append(held, vmwire.EnforcedMemory)
	}
	if err := setBox("memory.max", most); err != nil {
		return 0, nil, err
	}
	return most, append(held, vmwire.EnforcedOpenFiles), nil // by the stage
}

// available is what the kernel could give away now, in bytes; 0 if it does not say.
func available() uint64 {
	b, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "MemAvailable:" {
			n, _ := strconv.ParseUint(f[1], 10, 64)
			return n << 10
		}
	}
	return 0
}

func setBox(file string, value uint64) error {
	if err := os.WriteFile(usersCgroup+"/"+file, strconv.AppendUint(nil, value, 10), 0); err != nil {
		return fmt.Errorf("limit %s: %w", file, err)
	}
	return nil
}

// count finds one figure in lines like "oom_kill 3", or the only one where name is empty.
func count(text, name string) uint64 {
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			key, value = "", key
		}
		if key == name {
			n, _ := strconv.ParseUint(value, 10, 64)
			return n
		}
	}
	return 0
}

// watch tells of memory and processes that a limit refused, and of errors of the disk's file system.
// The kernel wakes it; it ends with the machine.
func watch(tell func(vmwire.Event), disk *disk) error {
	type source struct {
		file, name string
		kind       vmwire.EventKind
	}
	watched := []source{
		{usersCgroup + "/memory.events", "oom_kill", vmwire.EventOOM}, {usersCgroup + "/pids.events", "max", vmwire.EventPIDs},
	}
	if disk != nil {
		watched = append(watched, source{"/sys/fs/ext4/" + disk.device + "/errors_count", "", vmwire.EventDisk})
	}
	fds := make([]unix.PollFd, len(watched))
	seen := make([]uint64, len(watched))
	for i, w := range watched {
		fd, err := unix.Open(w.file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("watch %s: %w", w.file, err)
		}
		fds[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLPRI}
	}
	go func() {
		for {
			for i, w := range watched {
				var b [512]byte
				got, _ := unix.Pread(int(fds[i].Fd), b[:], 0) // so that the next change wakes again
				if n := count(string(b[:max(got, 0)]), w.name); n > seen[i] {
					seen[i] = n
					tell(vmwire.Event{Kind: w.kind, Count: n})
				}
			}
			if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
				return
			}
		}
	}()
	return nil
}
