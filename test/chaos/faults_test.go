package chaos

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/test/testenv"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
)

// Times of a fault. Below the lease a host goes on where it stopped; beyond it its sessions are handed
// over.
const (
	belowLease  = 2 * time.Second
	beyondLease = 12 * time.Second
)

// fault is something that was done to the cluster, and how it is undone.
type fault struct {
	what string
	held time.Duration // until it is undone
	undo func()
}

// breaker breaks the cluster; what it does follows from the seed, but for who leads.
type breaker struct {
	run  *run
	e    *testenv.Env
	rng  *rand.Rand
	busy []string // members that something is done to already
}

// services in the machine's own namespace.
var beside = []string{"identity", "lifecycle", "credentials"}

// target names a member that nothing is done to yet, and says what it is.
func (b *breaker) target() (name, what string) {
	for {
		of := []string{"host-1", "host-2", "host-3"}
		switch b.rng.IntN(10) {
		case 0, 1:
			of, what = []string{b.e.Leader()}, " (leader)"
		case 2:
			leader := b.e.Leader()
			of, what = slices.DeleteFunc([]string{"scheduler-1", "scheduler-2", "scheduler-3"}, func(s string) bool { return s == leader }), " (follower)"
		case 3, 4:
			of, what = []string{"nats-1", "nats-2", "nats-3"}, ""
		case 5:
			of, what = slices.Clone(beside), ""
		default:
			what = ""
		}
		if name = b.one(of...); name != "" {
			return name, name + what
		}
	}
}

// one is one of those that nothing is done to yet; empty: there is none.
func (b *breaker) one(of ...string) string {
	of = slices.DeleteFunc(of, func(name string) bool { return slices.Contains(b.busy, name) })
	if len(of) == 0 {
		return ""
	}
	name := of[b.rng.IntN(len(of))]
	b.busy = append(b.busy, name)
	return name
}

// host is never empty: no fault has more than two members, and there are three hosts.
func (b *breaker) host() string { return b.one("host-1", "host-2", "host-3") }

// wired is a target that has links of its own.
func (b *breaker) wired() (name, what string) {
	for {
		if name, what = b.target(); !slices.Contains(beside, name) {
			return name, what
		}
	}
}

// between is a duration below or beyond the lease, with the same chance.
func (b *breaker) between() time.Duration {
	from, more := belowLease, 5*time.Second
	if b.rng.IntN(2) == 0 {
		from, more = beyondLease, 4*time.Second
	}
	return from + time.Duration(b.rng.Int64N(int64(more))).Round(100*time.Millisecond)
}

// next does one fault, or now and then two at once.
func (b *breaker) next() fault {
	b.busy = nil
	f := b.single()
	if b.rng.IntN(5) > 0 {
		return f
	}
	g := b.single()
	return fault{f.what + ", and " + g.what, max(f.held, g.held), func() { f.undo(); g.undo() }}
}

func (b *breaker) single() fault {
	switch b.rng.IntN(12) {
	case 0, 1:
		return b.kill()
	case 2:
		return b.restart()
	case 3, 4:
		return b.pause()
	case 5, 6:
		return b.cut()
	case 7:
		return b.slow()
	case 8:
		return b.containerd()
	case 9, 10:
		return b.crash()
	}
	return b.drain()
}

func nothing() {}

func (b *breaker) kill() fault {
	name, what := b.target()
	b.e.Member(name).Kill()
	return fault{"kill -9 of " + what, 0, nothing}
}

func (b *breaker) restart() fault {
	name, what := b.target()
	b.e.Member(name).Restart()
	return fault{"orderly restart of " + what, 0, nothing}
}

func (b *breaker) pause() fault {
	name, what := b.target()
	m := b.e.Member(name)
	d := b.between()
	m.Pause()
	return fault{"pause of " + what, d, func() {
		if m.Show().State == "paused" { // else another fault ended it
			m.Resume()
		}
	}}
}

func (b *breaker) cut() fault {
	name, what := b.wired()
	other, whom := "*", "all"
	if b.rng.IntN(2) == 0 {
		for other == "*" || other == name {
			other, whom = b.wired()
		}
	}
	d := b.between()
	switch b.rng.IntN(4) {
	case 0:
		b.e.SetOneWay(name, other, wire.Rule{Cut: true})
		what = "cut of packets from " + what + " to " + whom
	case 1:
		b.e.SetOneWay(other, name, wire.Rule{Cut: true})
		what = "cut of packets from " + whom + " to " + what
	default:
		b.e.Cut(name, other)
		what = "cut between " + what + " and " + whom
	}
	return fault{what, d, func() { b.e.Heal(name, other) }}
}

func (b *breaker) slow() fault {
	name, what := b.wired()
	r := wire.Rule{Delay: time.Duration(20+b.rng.IntN(280)) * time.Millisecond, Jitter: 20 * time.Millisecond, Loss: float64(b.rng.IntN(6))}
	b.e.Set(name, "*", r)
	d := 5*time.Second + time.Duration(b.rng.IntN(80))*100*time.Millisecond
	return fault{fmt.Sprintf("links of %s slower by %s, loss %.0f %%", what, r.Delay, r.Loss), d, func() { b.e.Heal(name, "*") }}
}

func (b *breaker) crash() fault {
	name := b.host()
	m := b.e.Member(name)
	d := b.between()
	m.Crash()
	return fault{"end of the whole host " + name, d, m.Restart}
}

// containerd kills the daemon of a host; hostagent starts another one.
func (b *breaker) containerd() fault {
	name := b.host()
	m := b.e.Member(name).Show()
	n := 0
	for _, pid := range containerds(m.Dir) {
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			n++
		}
	}
	return fault{fmt.Sprintf("kill -9 of containerd of %s (%d processes)", name, n), 0, nothing}
}

// containerds are the daemons whose files are below a folder.
func containerds(dir string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		raw, _ := os.ReadFile(f)
		args := strings.Split(string(raw), "\x00")
		below := func(a string) bool { return strings.HasPrefix(a, dir+"/") }
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil && filepath.Base(args[0]) == "containerd" && slices.ContainsFunc(args, below) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// drain waits until nothing is left on the host, or for as long as it is held.
func (b *breaker) drain() fault {
	name := b.host()
	within := 5*time.Second + time.Duration(b.rng.IntN(10))*time.Second
	b.run.call("drain", &schedulerv1.DrainRequest{Host: name, On: true, Within: durationpb.New(within)}, &schedulerv1.DrainReply{})
	return fault{fmt.Sprintf("drain of %s within %s", name, within), within + 8*time.Second, func() {
		b.run.call("drain", &schedulerv1.DrainRequest{Host: name}, &schedulerv1.DrainReply{})
	}}
}
