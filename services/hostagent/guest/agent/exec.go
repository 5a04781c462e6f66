package agent

import (
	"context"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// execution is one exec, from its start to the end of its record.
type execution struct {
	agent   *Agent
	key     string
	digest  [32]byte      // of the request, to refuse a key used for another
	started chan struct{} // closed when the process runs, or could not be started
	failed  error         // why it could not; set before started is closed

	pid       int
	startedAt time.Time
	pty       *os.File // master of the terminal, or nil
	stdin     *stdin
	outs      []*output
	timer     *time.Timer

	mu       sync.Mutex
	cond     *sync.Cond
	ring     ring
	held     bool // nothing unacknowledged may be dropped
	reader   *reader
	acked    [2]uint64
	open     int // outputs that have not ended
	timedOut bool
	exit     *wire.Exit // set once all output before it is in the ring
}

func newExecution(a *Agent, key string, digest [32]byte) *execution {
	x := &execution{agent: a, key: key, digest: digest, started: make(chan struct{})}
	x.cond = sync.NewCond(&x.mu)
	x.ring.limit = a.opts.RingSize
	return x
}

// store puts output into the ring. While the exec is held and the ring is full
// of unacknowledged bytes it waits; the process then blocks on its next write.
func (x *execution) store(sub wire.Sub, p []byte) {
	x.mu.Lock()
	defer x.mu.Unlock()
	before := x.ring.size
	if x.agent.ringUsed.Load() > RingBudget {
		x.ring.dropOldest(x.acked, x.ring.size)
	}
	for len(p) > 0 {
		want := min(len(p), x.ring.limit)
		if missing := want - x.ring.room(); missing > 0 {
			missing -= x.ring.dropOldest(x.acked, missing)
			if missing > 0 && !x.held {
				x.ring.dropOldest([2]uint64{^uint64(0), ^uint64(0)}, missing)
			}
		}
		n := min(want, x.ring.room())
		if n == 0 {
			x.account(&before)
			x.cond.Wait()
			before = x.ring.size // others account for what they drop
			continue
		}
		x.ring.append(sub, p[:n])
		p = p[n:]
		x.cond.Broadcast()
	}
	x.account(&before)
}

// account adds the growth of the ring since before to the use of the agent.
func (x *execution) account(before *int) {
	x.agent.ringUsed.Add(int64(x.ring.size - *before))
	*before = x.ring.size
}

// ack moves what the reader has taken. It never goes beyond what was sent.
func (x *execution) ack(r *reader, sub wire.Sub, offset uint64) {
	if sub != wire.Stdout && sub != wire.Stderr {
		return
	}
	i := sub - wire.Stdout
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.reader == r && offset > x.acked[i] {
		x.acked[i] = min(offset, r.pos[i])
		x.cond.Broadcast()
	}
}

// detach gives up the reader; from now on a full ring drops its oldest bytes. Like setReader it is not for a host that is gone.
func (x *execution) detach(ctx context.Context) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	x.held = false
	x.reader = nil
	x.cond.Broadcast()
	return nil
}

// exited receives the status of the process on the goroutine of the reaper, which it must not block.
func (x *execution) exited(status syscall.WaitStatus, err error) {
	at := time.Now()
	for _, o := range x.outs {
		o.drain()
	}
	go x.finish(status, err, at)
}

// finish waits until all output that the process wrote is in the ring, and then
// makes the exit known.
func (x *execution) finish(status syscall.WaitStatus, err error, at time.Time) {
	if x.timer != nil {
		x.timer.Stop()
	}
	x.stdin.close()
	for _, o := range x.outs {
		<-o.drained
	}
	exit := &wire.Exit{EndedAt: at}
	switch {
	case err != nil:
		exit.Unknown = err.Error()
	case status.Exited():
		code := status.ExitStatus()
		exit.Code = &code
	case status.Signaled():
		exit.Signal = int(status.Signal())
	default:
		exit.Unknown = "wait status is neither exit nor signal"
	}
	x.mu.Lock()
	exit.TimedOut = x.timedOut && exit.Code == nil
	exit.Output = wire.Offsets{Stdout: x.ring.lanes[0].end, Stderr: x.ring.lanes[1].end}
	x.exit = exit
	x.cond.Broadcast()
	x.mu.Unlock()
	x.agent.finished(x)
}

// timeout kills the process group. The status decides whether it came in time.
func (x *execution) timeout() {
	x.mu.Lock()
	x.timedOut = true
	x.mu.Unlock()
	_ = x.agent.reaper.signalGroup(x.pid, syscall.SIGKILL)
}

// info describes the exec; existing is for a start that found it.
func (x *execution) info(existing bool) wire.ExecInfo {
	x.mu.Lock()
	defer x.mu.Unlock()
	in := wire.ExecInfo{
		Key: wire.Text(x.key), Pid: x.pid, Existing: existing, PTY: x.pty != nil,
		Held: x.held, StartedAt: x.startedAt, Exit: x.exit,
		First: wire.Offsets{Stdout: x.ring.lanes[0].base, Stderr: x.ring.lanes[1].base},
		End:   wire.Offsets{Stdout: x.ring.lanes[0].end, Stderr: x.ring.lanes[1].end},
		Acked: wire.Offsets{Stdout: x.acked[0], Stderr: x.acked[1]},
	}
	in.Stdin, in.StdinOpen = x.stdin.state()
	return in
}

// forget frees what the ring holds; late output is dropped from now on.
func (x *execution) forget() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.held = false
	x.reader = nil
	x.agent.ringUsed.Add(-int64(x.ring.size))
	x.ring.dropOldest([2]uint64{^uint64(0), ^uint64(0)}, x.ring.size)
	x.ring.limit = blockSize
	x.cond.Broadcast()
}
