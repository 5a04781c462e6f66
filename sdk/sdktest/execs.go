package sdktest

import (
	"context"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// ringBytes is how much output of a channel is kept for a later attach.
const ringBytes = 4 << 20

// execs are the processes of a session.
type execs struct {
	mu  sync.Mutex
	all map[string]*exec
}

func newExecs() *execs { return &execs{all: map[string]*exec{}} }

func (e *execs) get(key string) *exec {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.all[key]
}

func (e *execs) list() []*boxv1.ExecInfo {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []*boxv1.ExecInfo
	for _, k := range slices.Sorted(maps.Keys(e.all)) {
		out = append(out, e.all[k].info())
	}
	return out
}

// running reports whether any process runs.
func (e *execs) running() bool {
	for _, x := range e.list() {
		if x.GetRunning() {
			return true
		}
	}
	return false
}

// killAll ends every process and forgets it.
func (e *execs) killAll(why string) {
	e.mu.Lock()
	all := e.all
	e.all = map[string]*exec{}
	e.mu.Unlock()
	for _, x := range all {
		x.cancel(stopped{signal: "SIGKILL", why: why})
	}
}

// stopped is why a process's context ended.
type stopped struct {
	signal, why string
	timedOut    bool
}

func (s stopped) Error() string { return "ended by " + s.signal + " " + s.why }

// exec is one process.
type exec struct {
	key     string
	argv    []string
	started time.Time
	ctx     context.Context
	cancel  context.CancelCauseFunc

	mu     sync.Mutex
	cond   *sync.Cond
	out    [2]ring
	reader *hostStream
	exit   *boxv1.Exit

	stdin  []byte
	got    uint64 // bytes of stdin that came
	closed bool   // stdin has ended
	size   Size
	tty    bool
}

// ring keeps the newest bytes of a channel.
type ring struct {
	data  []byte
	base  uint64 // offset of data[0]
	acked uint64
}

func (r *ring) end() uint64 { return r.base + uint64(len(r.data)) }

func (e *exec) info() *boxv1.ExecInfo {
	e.mu.Lock()
	defer e.mu.Unlock()
	return &boxv1.ExecInfo{Key: e.key, Running: e.exit == nil, Exit: e.exit, Started: timestamppb.New(e.started), Argv: e.argv}
}

// startExec starts a program, or joins the one that has the key.
func (s *Server) startExec(x *session, st *hostStream, r *boxv1.Exec, begin func(uint32, *boxv1.Result)) error {
	if len(r.GetArgv()) == 0 {
		return fault{errkind.Invalid, "an exec needs a program"}
	}
	s.mu.Lock()
	program := s.programs[r.GetArgv()[0]]
	s.mu.Unlock()
	x.execs.mu.Lock()
	e := x.execs.all[r.GetKey()]
	if e != nil {
		x.execs.mu.Unlock()
		return e.attach(st, 0, 0, begin)
	}
	if program == nil {
		x.execs.mu.Unlock()
		return fault{errkind.NotFound, r.GetArgv()[0] + ": there is no such program"}
	}
	if dir := r.GetCwd(); dir != "" && !x.files.isDir(dir) {
		x.execs.mu.Unlock()
		return fault{errkind.NotFound, dir + ": there is no such directory"}
	}
	e = &exec{key: r.GetKey(), argv: r.GetArgv(), started: time.Now(), closed: !r.GetStdin(), tty: r.GetPty() != nil,
		size: Size{r.GetPty().GetRows(), r.GetPty().GetCols()}}
	e.cond = sync.NewCond(&e.mu)
	e.ctx, e.cancel = context.WithCancelCause(s.ctx)
	x.execs.all[e.key] = e
	x.execs.mu.Unlock()
	p := &Proc{Args: r.GetArgv(), Env: maps.Clone(r.GetEnv()), Dir: r.GetCwd(), exec: e, srv: s, files: x.files}
	p.Stdin, p.Stdout, p.Stderr = stdin{e}, output{e, 0}, output{e, 1}
	if e.tty {
		p.Stderr = p.Stdout
	}
	if t := r.GetTimeout().AsDuration(); t > 0 {
		time.AfterFunc(t, func() { e.cancel(stopped{signal: "SIGKILL", timedOut: true}) })
	}
	context.AfterFunc(e.ctx, func() { e.mu.Lock(); defer e.mu.Unlock(); e.cond.Broadcast() })
	go e.run(program, p)
	return e.attach(st, 0, 0, begin)
}

func (e *exec) run(program Program, p *Proc) {
	code := program(e.ctx, p)
	exit := &boxv1.Exit{How: &boxv1.Exit_Code{Code: int32(code)}}
	why := stopped{}
	if context.Cause(e.ctx) != nil {
		why, _ = context.Cause(e.ctx).(stopped)
		exit = &boxv1.Exit{How: &boxv1.Exit_Signal{Signal: why.signal}, TimedOut: why.timedOut}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	exit.StdoutBytes, exit.StderrBytes = e.out[0].end(), e.out[1].end()
	e.exit = exit
	e.cond.Broadcast()
}

// attach makes st the one reader from the given offsets on.
func (e *exec) attach(st *hostStream, out, err uint64, begin func(uint32, *boxv1.Result)) error {
	e.mu.Lock()
	if out > e.out[0].end() || err > e.out[1].end() {
		e.mu.Unlock()
		return fault{errkind.Invalid, "the process did not write so much"}
	}
	old := e.reader
	e.reader = st
	window, got := uint32(maxCredit), e.got
	if e.closed {
		window = 0
	}
	e.cond.Broadcast()
	e.mu.Unlock()
	if old != nil {
		old.fail(fault{errkind.Superseded, "another stream was attached to the process"})
	}
	st.handle = func(f *boxv1.Frame) { e.frame(st, f) }
	begin(window, nil)
	if window > 0 && got > 0 {
		st.send(&boxv1.Frame{Body: &boxv1.Frame_InputAck{InputAck: &boxv1.InputAck{Offset: got}}}, false)
	}
	go func() {
		<-st.done
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.reader == st {
			e.reader = nil
		}
		e.cond.Broadcast()
	}()
	go e.feed(st, [2]uint64{out, err})
	return nil
}

// feed sends output from the offsets on, and the exit.
func (e *exec) feed(st *hostStream, at [2]uint64) {
	for {
		ch, b, gap, exit := e.next(st, &at)
		channel := boxv1.Channel_CHANNEL_STDOUT + boxv1.Channel(ch)
		switch {
		case exit != nil:
			st.send(&boxv1.Frame{Body: &boxv1.Frame_Exit{Exit: exit}}, true)
			return
		case gap > 0:
			st.send(&boxv1.Frame{Body: &boxv1.Frame_Gap{Gap: &boxv1.Gap{Channel: channel, From: at[ch], To: gap}}}, false)
			at[ch] = gap
		case b != nil:
			if !st.data(channel, at[ch], b) {
				return
			}
			at[ch] += uint64(len(b))
		default:
			return
		}
	}
}

// next waits for something to send. Bytes that were sent count as taken.
func (e *exec) next(st *hostStream, at *[2]uint64) (ch int, b []byte, gap uint64, exit *boxv1.Exit) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		if e.reader != st {
			return 0, nil, 0, nil
		}
		for ch := range e.out {
			r := &e.out[ch]
			if at[ch] > maxCredit && at[ch]-maxCredit > r.acked {
				r.acked = at[ch] - maxCredit
				e.cond.Broadcast() // there is room for more
			}
			if at[ch] < r.base {
				return ch, nil, r.base, nil
			}
			if at[ch] < r.end() {
				piece := r.data[at[ch]-r.base:]
				e.cond.Broadcast()
				return ch, slices.Clone(piece[:min(len(piece), maxChunk)]), 0, nil
			}
		}
		if e.exit != nil {
			return 0, nil, 0, e.exit
		}
		e.cond.Wait()
	}
}

// write stores output. It blocks when the ring is full and somebody reads;
// when nobody does, the oldest goes.
func (e *exec) write(ch int, p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for done := 0; done < len(p); {
		if e.ctx.Err() != nil {
			return done, io.ErrClosedPipe
		}
		r := &e.out[ch]
		room := ringBytes - len(r.data)
		if room == 0 && e.reader == nil {
			r.drop(maxChunk)
			continue
		}
		if room == 0 && r.acked > r.base {
			r.drop(int(r.acked - r.base))
			continue
		}
		if room == 0 {
			e.cond.Wait()
			continue
		}
		n := min(room, len(p)-done)
		r.data = append(r.data, p[done:done+n]...)
		done += n
		e.cond.Broadcast()
	}
	return len(p), nil
}

func (r *ring) drop(n int) {
	n = min(n, len(r.data))
	r.data = slices.Clone(r.data[n:])
	r.base += uint64(n)
}

// frame handles what the client sends.
func (e *exec) frame(st *hostStream, f *boxv1.Frame) {
	switch b := f.GetBody().(type) {
	case *boxv1.Frame_Data:
		e.mu.Lock()
		d := b.Data
		if d.GetOffset() <= e.got && d.GetOffset()+uint64(len(d.GetData())) > e.got && !e.closed {
			fresh := d.GetData()[e.got-d.GetOffset():]
			e.stdin = append(e.stdin, fresh...)
			e.got += uint64(len(fresh))
			e.cond.Broadcast()
		}
		got := e.got
		e.mu.Unlock()
		st.send(&boxv1.Frame{Body: &boxv1.Frame_InputAck{InputAck: &boxv1.InputAck{Offset: got}}}, false)
		st.grant(len(d.GetData()))
	case *boxv1.Frame_CloseInput:
		e.mu.Lock()
		defer e.mu.Unlock()
		e.closed = e.closed || b.CloseInput.GetTotal() == e.got
		e.cond.Broadcast()
	case *boxv1.Frame_Signal:
		e.cancel(stopped{signal: b.Signal.GetName()})
	case *boxv1.Frame_Resize:
		e.mu.Lock()
		defer e.mu.Unlock()
		e.size = Size{b.Resize.GetRows(), b.Resize.GetCols()}
	case *boxv1.Frame_Cancel:
		if b.Cancel.GetKill() {
			e.cancel(stopped{signal: "SIGKILL"})
			return
		}
		st.end()
	}
}
