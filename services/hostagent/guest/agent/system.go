package agent

import (
	"bytes"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

const maxTop = 50

func (c *call) ping() (any, error) { return wire.Pong{Time: time.Now()}, nil }

// stats counts what runs. A zombie counts as a process until it is reaped.
func (c *call) stats() (any, error) {
	a := c.agent
	procs := processes()
	main := map[int]bool{}
	st := wire.Stats{RingBytes: a.ringUsed.Load()}
	a.mu.Lock()
	st.Quiesced = a.quiesced
	st.Records = len(a.execs)
	running := make([]*execution, 0, len(a.execs))
	for _, x := range a.execs {
		running = append(running, x)
	}
	a.mu.Unlock()
	for _, x := range running {
		<-x.started
		x.mu.Lock()
		if x.failed == nil && x.exit == nil {
			st.LiveExecs++
			main[x.pid] = true
			if x.pty != nil {
				st.PTYs++
			}
		}
		x.mu.Unlock()
	}
	self := os.Getpid()
	for _, p := range procs {
		if p.Pid == self {
			st.AgentRSS = p.RSS
			continue
		}
		st.Processes++
		if p.State == "Z" {
			st.Zombies++
		}
		if !main[p.Pid] {
			st.Background++
		}
		st.Top = append(st.Top, p)
	}
	sort.Slice(st.Top, func(i, j int) bool { return st.Top[i].RSS > st.Top[j].RSS })
	st.Top = st.Top[:min(len(st.Top), maxTop)]
	st.MemTotal, st.MemFree = memory()
	return st, nil
}

// processes reads /proc. A process that ends meanwhile is left out.
func processes() []wire.Process {
	d, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	var out []wire.Process
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue
		}
		if p, ok := parseStat(pid, b); ok {
			out = append(out, p)
		}
	}
	return out
}

// parseStat reads a line like "12 (a name) S 1 ...", where the name may hold
// anything, also parentheses.
func parseStat(pid int, b []byte) (wire.Process, bool) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return wire.Process{}, false
	}
	fields := strings.Fields(string(b[end+1:]))
	if len(fields) < 22 {
		return wire.Process{}, false
	}
	ppid, _ := strconv.Atoi(fields[1])
	pages, _ := strconv.ParseInt(fields[21], 10, 64)
	return wire.Process{
		Pid: pid, PPid: ppid, State: fields[0], Name: wire.Text(b[open+1 : end]),
		RSS: pages * int64(os.Getpagesize()),
	}, true
}

// memory returns total and available bytes as /proc/meminfo has them.
func memory() (total, available int64) {
	b, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kib, _ := strconv.ParseInt(fields[1], 10, 64)
		switch fields[0] {
		case "MemTotal:":
			total = kib << 10
		case "MemAvailable:":
			available = kib << 10
		}
	}
	return total, available
}
