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

// makeBox makes the cgroup of everything that is not the supervisor.
func makeBox() error {
	if err := os.Mkdir(boxCgroup, 0o755); err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	if err := os.WriteFile(cgroupDir+"/cgroup.subtree_control", []byte("+pids +memory"), 0); err != nil {
		return fmt.Errorf("cgroup controllers: %w", err)
	}
	return nil
}

// limit sets what the box may use, and returns the limits that hold.
func limit(l vmwire.Limits) ([]string, error) {
	var held []string
	if l.PIDs > 0 {
		if err := setBox("pids.max", uint64(l.PIDs)); err != nil {
			return nil, err
		}
		held = append(held, vmwire.EnforcedPIDs)
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return nil, fmt.Errorf("size of memory: %w", err)
	}
	all := info.Totalram * uint64(info.Unit)
	most := max(all-min(all, kernelShare), all/2)
	if l.Memory > 0 {
		most = min(most, l.Memory)
		held = append(held, vmwire.EnforcedMemory)
	}
	if err := setBox("memory.max", most); err != nil {
		return nil, err
	}
	return append(held, vmwire.EnforcedOpenFiles), nil // by the stage
}

func setBox(file string, value uint64) error {
	if err := os.WriteFile(boxCgroup+"/"+file, strconv.AppendUint(nil, value, 10), 0); err != nil {
		return fmt.Errorf("limit %s: %w", file, err)
	}
	return nil
}

// count reads one figure of a file of the box, like "oom_kill 3".
func count(file, name string) uint64 {
	b, _ := os.ReadFile(boxCgroup + "/" + file)
	for line := range strings.Lines(string(b)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && key == name {
			n, _ := strconv.ParseUint(value, 10, 64)
			return n
		}
	}
	return 0
}

// watchBox tells of memory and processes that a limit refused. The kernel wakes it; it ends with the
// machine.
func watchBox(tell func(vmwire.Event)) error {
	watched := []struct {
		file, name string
		kind       vmwire.EventKind
	}{{"memory.events", "oom_kill", vmwire.EventOOM}, {"pids.events", "max", vmwire.EventPIDs}}
	fds := make([]unix.PollFd, len(watched))
	seen := make([]uint64, len(watched))
	for i, w := range watched {
		fd, err := unix.Open(boxCgroup+"/"+w.file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("watch %s: %w", w.file, err)
		}
		fds[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLPRI}
	}
	go func() {
		for {
			for i, w := range watched {
				var b [256]byte
				_, _ = unix.Pread(int(fds[i].Fd), b[:], 0) // so that the next change wakes again
				if n := count(w.file, w.name); n > seen[i] {
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
