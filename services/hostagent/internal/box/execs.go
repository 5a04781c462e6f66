package box

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// tracker holds one piece of work for every exec that runs, attached or not.
type tracker struct {
	box *Box
	mu  sync.Mutex
	// running maps a key to the end of its piece of work and to how many streams watch it.
	running map[string]*tracked
	polling bool
	closed  bool
}

type tracked struct {
	done     func()
	watchers int
	// lost is when the last stream broke without the client's farewell; zero otherwise. The guest retains all output
	// until a client attaches again, for AttachAgainWithin at most.
	lost time.Time
	// turn is held while a reader attaches, and while the last one is given up: a late farewell
	// must not take the exec from whoever came after.
	turn sync.Mutex
}

func (t *tracker) init(b *Box) { t.box, t.running = b, map[string]*tracked{} }

// adopt notes an exec that runs since before this host agent started. Its streams ended with the earlier process.
func (t *tracker) adopt(ctx context.Context, key string) error {
	err := t.watch(ctx, key)
	if err == nil {
		t.unwatch(key)
		t.hold(key, time.Now())
	}
	return err
}

// watch notes that key runs, or is about to, and that a stream sees its end.
func (t *tracker) watch(ctx context.Context, key string) error {
	t.mu.Lock()
	if e := t.running[key]; e != nil {
		e.watchers++
		t.mu.Unlock()
		return nil
	}
	t.mu.Unlock()
	done, err := t.box.gate.Admit(ctx)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.running[key]; e != nil {
		e.watchers++
		done()
		return nil
	}
	if t.closed {
		done()
		return errs.E("exec", errkind.Unavailable, key, "the session goes to sleep")
	}
	t.running[key] = &tracked{done: done, watchers: 1}
	return nil
}

// unwatch: the stream ended before the exec did. last is true when no other stream watches it.
func (t *tracker) unwatch(key string) (last bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.running[key]
	if e != nil {
		e.watchers--
	}
	return e == nil || e.watchers <= 0
}

// take waits for key's turn and returns how to end it.
func (t *tracker) take(key string) (end func()) {
	t.mu.Lock()
	e := t.running[key]
	t.mu.Unlock()
	if e == nil {
		return func() {}
	}
	e.turn.Lock()
	return e.turn.Unlock
}

// watched reports whether a stream watches key now.
func (t *tracker) watched(key string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.running[key]
	return e != nil && e.watchers > 0
}

// ended: the exec is over.
func (t *tracker) ended(key string) {
	t.mu.Lock()
	e := t.running[key]
	delete(t.running, key)
	t.mu.Unlock()
	if e != nil {
		e.done()
	}
}

func (t *tracker) close() {
	t.mu.Lock()
	t.closed = true
	all := t.running
	t.running = map[string]*tracked{}
	t.mu.Unlock()
	for _, e := range all {
		e.done()
	}
}

// unseen returns the execs that no stream watches.
func (t *tracker) unseen() map[string]bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[string]bool{}
	for key, e := range t.running {
		if e.watchers <= 0 {
			out[key] = true
		}
	}
	return out
}

// poll asks the guest, beside the path, which of the unwatched execs are over.
func (t *tracker) poll() {
	if len(t.unseen()) == 0 {
		return
	}
	t.mu.Lock()
	busy := t.polling || t.closed
	t.polling = true
	t.mu.Unlock()
	if busy {
		return
	}
	go func() {
		defer func() {
			t.mu.Lock()
			t.polling = false
			t.mu.Unlock()
		}()
		ctx, cancel := context.WithTimeout(t.box.ctx, openTime)
		defer cancel()
		unseen := t.unseen()
		execs, err := t.box.guest.ListExecs(ctx)
		if err != nil {
			return // not known is not ended
		}
		for _, e := range execs {
			if e.Exit == nil {
				delete(unseen, string(e.Key))
			}
		}
		for key := range unseen {
			if t.isLost(key) {
				t.box.detach(key) // a guest that needs memory may drop its output
			}
			t.ended(key)
		}
	}()
}

// RunningExecs lists the keys of the execs that a guest runs.
func RunningExecs(ctx context.Context, g *hostend.Conn) ([]string, error) {
	all, err := g.ListExecs(ctx)
	if err != nil {
		return nil, err
	}
	var keys []string
	for _, e := range all {
		if e.Exit == nil {
			keys = append(keys, string(e.Key))
		}
	}
	return keys, nil
}

func (b *Box) exec(ctx context.Context, c *call, p *boxv1.Exec) error {
	start := hostend.ExecSpec{
		Key: p.GetKey(), Argv: p.GetArgv(), Cwd: p.GetCwd(),
		User: p.GetUser(), Stdin: p.GetStdin(), Timeout: p.GetTimeout().AsDuration(),
	}
	for k, v := range p.GetEnv() {
		start.Env = append(start.Env, k+"="+v)
	}
	slices.Sort(start.Env) // the same start must look the same
	if e, ok := b.gate.(Environer); ok {
		start.Env = append(e.Env(), start.Env...)
	}
	if z := p.GetPty(); z != nil {
		start.PTY = &wire.Size{Rows: uint16(z.GetRows()), Cols: uint16(z.GetCols())}
	}
	if err := b.execs.watch(ctx, p.GetKey()); err != nil {
		return err
	}
	// The start must not end half-way because the stream did: it is idempotent by its key.
	sctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	end := b.execs.take(p.GetKey())
	e, err := b.guest.StartExec(sctx, start)
	end()
	if err != nil {
		b.execs.unwatch(p.GetKey()) // whether it runs is for the next poll to say
		return err
	}
	return b.pump(ctx, c, p.GetKey(), e)
}

func (b *Box) attach(ctx context.Context, c *call, p *boxv1.ExecAttach) error {
	if err := b.execs.watch(ctx, p.GetKey()); err != nil {
		return err
	}
	actx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	end := b.execs.take(p.GetKey())
	e, err := b.guest.AttachExec(actx, p.GetKey(), wire.Offsets{Stdout: p.GetStdoutOffset(), Stderr: p.GetStderrOffset()})
	end()
	if err != nil {
		b.execs.unwatch(p.GetKey())
		return err
	}
	return b.pump(ctx, c, p.GetKey(), e)
}

// pump carries one exec: this goroutine its output, others its input and what the client has of its output.
func (b *Box) pump(ctx context.Context, c *call, key string, e *hostend.ExecStream) error {
	b.execs.attached(key)
	info := e.Info()
	var result *boxv1.Result
	if info.Existing || info.Exit != nil {
		result = &boxv1.Result{Execs: []*boxv1.ExecInfo{execInfo(info)}}
	}
	window := b.window(info.StdinOpen)
	st, err := b.begin(ctx, c, window, result)
	if err != nil {
		b.letGo(e, key, err)
		return err
	}
	if info.StdinOpen && info.Stdin > 0 {
		err = st.send(&boxv1.Frame{Body: &boxv1.Frame_InputAck{InputAck: &boxv1.InputAck{Offset: info.Stdin}}}, false)
	}
	var beside sync.WaitGroup
	beside.Go(func() {
		if err := b.input(st, key); err != nil {
			st.stop(err)
		}
	})
	e.ManualAck = true
	beside.Go(func() { acknowledge(st, e) })
	if err == nil {
		err = b.output(st, e)
	}
	if err == nil {
		b.execs.ended(key)
		all := wire.Offsets{Stdout: math.MaxUint64, Stderr: math.MaxUint64}
		_ = e.Ack(ctx, all) // without it the guest keeps more than it must, for 10 minutes
		e.Close()
	} else {
		b.letGo(e, key, err)
	}
	b.end(st, err)
	beside.Wait()
	return err
}

// acknowledge tells the guest which output the client has, until the stream ends: the guest keeps what is on its way
// to the client, who attaches again where it was.
func acknowledge(st *stream, e *hostend.ExecStream) {
	for {
		select {
		case <-st.out.ackChanged:
		case <-st.ctx.Done():
			return
		}
		if err := e.Ack(st.ctx, st.clientHas()); err != nil {
			return // output meets the same error
		}
	}
}

// letGo ends a stream before its exec, which goes on. If no other stream reads the exec, the guest drops its oldest
// output from now on rather than wait for a reader. After a stream that broke, the guest waits: a client that
// attaches again at once has all of the output.
func (b *Box) letGo(e *hostend.ExecStream, key string, why error) {
	last := b.execs.unwatch(key)
	e.Close()
	switch {
	case !last || b.ctx.Err() != nil:
	case errs.Is(why, errkind.Unavailable), errors.Is(why, hostend.ErrReplaced): // the stream that replaced it broke before
		b.execs.hold(key, time.Now())
	default:
		b.detach(key)
	}
}

// detach has the guest drop the oldest output of an exec that no stream reads.
func (b *Box) detach(key string) {
	defer b.execs.take(key)()
	if b.execs.watched(key) {
		return // a stream attached meanwhile
	}
	ctx, cancel := context.WithTimeout(b.ctx, openTime)
	defer cancel()
	if err := b.guest.DetachExec(ctx, key); err != nil {
		b.log.Debug("could not detach from an exec", "exec", key, "error", err)
		b.execs.hold(key, time.Now()) // tried again
	}
}

// attached notes that a stream reads key.
func (t *tracker) attached(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.running[key]; e != nil {
		e.lost = time.Time{}
	}
}

// isLost reports whether the guest retains the output of key for a client that may attach again.
func (t *tracker) isLost(key string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.running[key]
	return e != nil && !e.lost.IsZero()
}

// hold notes that the last stream of key broke.
func (t *tracker) hold(key string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.running[key]; e != nil && e.watchers <= 0 {
		e.lost = now
	}
}

// overdue returns the execs to which no client attached again within AttachAgainWithin. It returns each exec once.
func (t *tracker) overdue(now time.Time) (keys []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, e := range t.running {
		if e.watchers <= 0 && !e.lost.IsZero() && now.Sub(e.lost) > AttachAgainWithin {
			e.lost = time.Time{}
			keys = append(keys, key)
		}
	}
	return keys
}

// output passes on what the exec gives, up to and with its exit.
func (b *Box) output(st *stream, e *hostend.ExecStream) error {
	for {
		o, err := e.Next(st.ctx)
		if err != nil {
			if cause := context.Cause(st.ctx); cause != nil {
				return cause
			}
			return err
		}
		switch {
		case o.Exit != nil:
			x := exit(o.Exit)
			x.Oom = o.Exit.Signal == int(syscall.SIGKILL) && b.outOfMemory(e.Key())
			return st.finish(&boxv1.Frame{Body: &boxv1.Frame_Exit{Exit: x}})
		case o.Data != nil:
			err = st.data(channel(o.Stream), o.Offset, o.Data)
		case o.Gap > 0:
			gap := &boxv1.Gap{Channel: channel(o.Stream), From: o.Offset, To: o.Gap}
			err = st.send(&boxv1.Frame{Body: &boxv1.Frame_Gap{Gap: gap}}, false)
		}
		if err != nil {
			return err
		}
	}
}

// outOfMemory reports whether the exec of a key was killed for memory, the same to all who attach.
func (b *Box) outOfMemory(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	oom, known := b.killed[key]
	if !known {
		oom = b.gate.OutOfMemory()
		if len(b.killed) >= maxKilled {
			clear(b.killed)
		}
		b.killed[key] = oom
	}
	return oom
}

// input handles what the client sends until the stream ends. Signals and sizes do not wait for
// data that the process does not read.
func (b *Box) input(st *stream, key string) error {
	in := newFeed(st, b.guest, key)
	defer in.close()
	for {
		f, err := st.next()
		if err != nil {
			return nil
		}
		switch body := f.GetBody().(type) {
		case *boxv1.Frame_Data:
			err = in.put(body.Data)
		case *boxv1.Frame_CloseInput:
			err = in.end(body.CloseInput.GetTotal())
		case *boxv1.Frame_Signal:
			err = b.signal(st.ctx, key, body.Signal.GetName())
		case *boxv1.Frame_Resize:
			err = b.resize(st.ctx, key, body.Resize)
		case *boxv1.Frame_Cancel:
			if body.Cancel.GetKill() {
				_ = b.signal(st.ctx, key, "SIGKILL")
				continue // its exit is the last frame
			}
			st.mute(errCancelled)
			return errCancelled
		}
		if err != nil {
			return err
		}
	}
}

func (b *Box) resize(ctx context.Context, key string, r *boxv1.Resize) error {
	if err := checkSize(r); err != nil {
		return err
	}
	size := wire.Size{Rows: uint16(r.GetRows()), Cols: uint16(r.GetCols())}
	return lenient(b.guest.Resize(ctx, key, size))
}

func (b *Box) signal(ctx context.Context, key, name string) error {
	n, err := signalNumber(name)
	if err != nil {
		return err
	}
	return lenient(b.guest.Signal(ctx, key, n))
}

// lenient: a process that ended meanwhile is no failure of the stream; its exit follows.
func lenient(err error) error {
	if errors.Is(err, hostend.ErrExited) || errors.Is(err, hostend.ErrNoSuchExec) {
		return nil
	}
	return err
}

func channel(s wire.Sub) boxv1.Channel {
	if s == wire.Stderr {
		return boxv1.Channel_CHANNEL_STDERR
	}
	return boxv1.Channel_CHANNEL_STDOUT
}

func exit(e *wire.Exit) *boxv1.Exit {
	x := &boxv1.Exit{TimedOut: e.TimedOut, StdoutBytes: e.Output.Stdout, StderrBytes: e.Output.Stderr}
	switch {
	case e.Code != nil:
		x.How = &boxv1.Exit_Code{Code: int32(*e.Code)}
	case e.Signal > 0:
		x.How = &boxv1.Exit_Signal{Signal: signalName(e.Signal)}
	case e.Unknown != "":
		x.How = &boxv1.Exit_Unknown{Unknown: e.Unknown}
	default:
		x.How = &boxv1.Exit_Unknown{Unknown: "the guest did not say how the process ended"}
	}
	return x
}

func execInfo(e wire.ExecInfo) *boxv1.ExecInfo {
	out := &boxv1.ExecInfo{Key: valid(e.Key), Running: e.Exit == nil, Started: timestamppb.New(e.StartedAt)}
	if e.Exit != nil {
		out.Exit = exit(e.Exit)
	}
	return out
}
