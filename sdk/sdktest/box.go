package sdktest

import (
	"crypto/rand"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

const (
	maxCredit = 1 << 20
	maxChunk  = 64 << 10
)

var replay = grant.NewReplay(1<<16, 1<<16)

// hostStream is the host's side of a stream.
type hostStream struct {
	srv     *Server
	key     string // session
	id      string
	deliver string
	claims  grant.Claims // of the grant that opened it
	done    chan struct{}
	once    sync.Once

	mu     sync.Mutex
	cond   *sync.Cond
	seqOut uint64
	seqIn  uint64
	credit int64
	ended  bool
	handle func(*boxv1.Frame) // frames of the client, in order
}

// box takes every message of the data plane, in order.
func (s *Server) box(m *nats.Msg) {
	call, err := subjects.ParseBox(m.Subject)
	if err != nil {
		return
	}
	if call.Method == "in" {
		s.mu.Lock()
		st := s.streams[m.Header.Get("Berth-Stream")]
		s.mu.Unlock()
		f := &boxv1.Frame{}
		if st != nil && proto.Unmarshal(m.Data, f) == nil {
			st.take(f)
		}
		return
	}
	s.mu.Lock()
	x := s.sessions[string(call.Session)]
	here := x != nil && x.state == corev1.State_STATE_ACTIVE && x.epoch == call.Epoch
	mute := s.faults.mute
	s.mu.Unlock()
	if mute {
		return
	}
	if !here {
		// A real host has no subscription for an epoch that is not awake here.
		_ = m.RespondMsg(&nats.Msg{Header: nats.Header{"Status": []string{"503"}}})
		return
	}
	go s.opening(m, x, call)
}

// opening verifies as a host does and runs the operation.
func (s *Server) opening(m *nats.Msg, x *session, call subjects.BoxCall) {
	req, o, op := &boxv1.OpenRequest{}, &boxv1.Opening{}, &boxv1.Operation{}
	plain := []byte(nil)
	err := proto.Unmarshal(m.Data, req)
	if err == nil {
		plain, err = s.hostKey.Open(req.GetSealed())
	}
	if err == nil {
		err = proto.Unmarshal(plain, o)
	}
	if err != nil {
		s.reply(m, &boxv1.SealedOpenReply{Failure: wire(fault{errkind.Unauthenticated, "the opening is not sealed to this host"})})
		return
	}
	answer := func(r *boxv1.OpenReply) {
		raw, err := proto.Marshal(r)
		if err != nil {
			return
		}
		if sealed, err := seal.SealTo(seal.Public(o.GetReplyKey()), raw, rand.Reader); err == nil {
			s.reply(m, &boxv1.SealedOpenReply{Sealed: sealed, Sender: string(sealed[1:57])})
		}
	}
	if err := proto.Unmarshal(o.GetOperation(), op); err != nil {
		answer(&boxv1.OpenReply{Failure: wire(fault{errkind.Invalid, "the operation cannot be read"})})
		return
	}
	claims, err := s.believe(m.Subject, x, o)
	if err == nil {
		err = claims.Covers(op)
	}
	if err != nil {
		answer(&boxv1.OpenReply{Failure: wire(err)})
		return
	}
	s.show(claims)
	st := &hostStream{srv: s, key: x.key, id: string(ids.NewStreamID()), deliver: o.GetDeliver(), credit: int64(o.GetCredit()), claims: claims, done: make(chan struct{})}
	st.cond = sync.NewCond(&st.mu)
	s.run(x, st, op, answer)
}

func (s *Server) believe(subject string, x *session, o *boxv1.Opening) (grant.Claims, error) {
	v, err := s.verifier()
	if err != nil {
		return grant.Claims{}, err
	}
	s.mu.Lock()
	want := grant.BindingOf(x.ref(), x.host)
	s.mu.Unlock()
	claim := grant.Opening{Subject: subject, Nonce: o.GetNonce(), Time: o.GetTime().AsTime(), Operation: o.GetOperation(),
		Deliver: o.GetDeliver(), ReplyKey: o.GetReplyKey(), Grant: o.GetGrant()}
	c, err := v.Open(claim, o.GetProof(), want, replay, time.Now())
	if err != nil {
		return c, err
	}
	if !subjects.Frontend(c.Tenant, c.Frontend).InInbox(o.GetDeliver()) {
		return c, fault{errkind.Denied, "the deliver subject is not in the inbox of the grant's frontend"}
	}
	return c, nil
}

// shownBy is who may use grants for a proof key.
type shownBy struct {
	key string
	who grant.Principal
	by  ids.Frontend
}

// show notes until when the holder of a grant may keep streams.
func (s *Server) show(c grant.Claims) {
	s.mu.Lock()
	defer s.mu.Unlock()
	by := shownBy{c.Confirm.JWK.X, c.Principal, c.Frontend}
	s.shown[by] = max(s.shown[by], c.Expires)
}

// lapse ends a stream when its grant has expired and its holder has shown no renewed one.
func (st *hostStream) lapse() {
	c := st.claims
	for {
		st.srv.mu.Lock()
		until := max(c.Expires, st.srv.shown[shownBy{c.Confirm.JWK.X, c.Principal, c.Frontend}])
		st.srv.mu.Unlock()
		left := time.Until(time.Unix(until, 0))
		if left <= 0 {
			st.srv.lapsed.Add(1)
			st.fail(fault{errkind.Unavailable, "the grant of this stream has expired and no renewed one was shown; attach again"})
			return
		}
		select {
		case <-st.done:
			return
		case <-st.srv.ctx.Done():
			return
		case <-time.After(left):
		}
	}
}

// Lapsed counts the streams that ended because their grant expired and their client had shown no renewed one.
func (s *Server) Lapsed() int { return int(s.lapsed.Load()) }

// run does the operation; streams go on in goroutines.
func (s *Server) run(x *session, st *hostStream, op *boxv1.Operation, answer func(*boxv1.OpenReply)) {
	begin := func(credit uint32, res *boxv1.Result) {
		s.mu.Lock()
		s.streams[st.id] = st
		s.mu.Unlock()
		go st.lapse()
		answer(&boxv1.OpenReply{Stream: st.id, Credit: credit, Result: res})
	}
	var err error
	switch o := op.GetOp().(type) {
	case *boxv1.Operation_Exec:
		err = s.startExec(x, st, o.Exec, begin)
	case *boxv1.Operation_ExecAttach:
		e := x.execs.get(o.ExecAttach.GetKey())
		if e == nil {
			err = fault{errkind.NotFound, "there is no process with that key"}
			break
		}
		err = e.attach(st, o.ExecAttach.GetStdoutOffset(), o.ExecAttach.GetStderrOffset(), begin)
	case *boxv1.Operation_ReadFile:
		err = x.files.read(st, o.ReadFile, begin)
	case *boxv1.Operation_WriteFile:
		err = x.files.write(st, o.WriteFile, begin)
	case *boxv1.Operation_Watch:
		err = x.files.watch(st, o.Watch, begin)
	case *boxv1.Operation_Export:
		err = x.files.export(st, begin)
	case *boxv1.Operation_Import:
		err = x.files.take(st, o.Import, begin)
	case *boxv1.Operation_Checkpoint:
		err = s.checkpoint(x, st, o.Checkpoint.GetKey(), begin, answer)
	default:
		var res *boxv1.Result
		if res, err = s.short(x, op); err == nil {
			answer(&boxv1.OpenReply{Result: res})
		}
	}
	if err != nil {
		answer(&boxv1.OpenReply{Failure: wire(err)})
	}
}

func (s *Server) short(x *session, op *boxv1.Operation) (*boxv1.Result, error) {
	switch o := op.GetOp().(type) {
	case *boxv1.Operation_Present:
		return &boxv1.Result{}, nil
	case *boxv1.Operation_Info:
		return &boxv1.Result{PlaceJson: `{"tier":"gvisor","network":"named","session_name":"` + x.name + `"}`}, nil
	case *boxv1.Operation_ListExecs:
		return &boxv1.Result{Execs: x.execs.list()}, nil
	case *boxv1.Operation_Stat:
		return x.files.stat(o.Stat)
	case *boxv1.Operation_ListDir:
		return x.files.list(o.ListDir)
	case *boxv1.Operation_Move:
		return x.files.move(o.Move)
	case *boxv1.Operation_Remove:
		return x.files.remove(o.Remove)
	case *boxv1.Operation_MakeDir:
		return x.files.mkdir(o.MakeDir)
	}
	return nil, fault{errkind.Unimplemented, "this host does not know that operation"}
}

// take accepts a frame of the client.
func (st *hostStream) take(f *boxv1.Frame) {
	st.mu.Lock()
	if f.GetSeq() != st.seqIn+1 {
		st.mu.Unlock()
		st.fail(fault{errkind.Unavailable, "a message was lost"})
		return
	}
	st.seqIn++
	if c := f.GetCredit(); c != nil {
		st.credit += int64(c.GetBytes())
		over := st.credit > maxCredit
		st.cond.Broadcast()
		st.mu.Unlock()
		if over {
			st.fail(fault{errkind.Invalid, "a credit above 1 MiB"})
		}
		return
	}
	handle := st.handle
	st.mu.Unlock()
	if f.GetPing() == nil && handle != nil {
		handle(f)
	} else if f.GetCancel() != nil {
		st.end()
	}
}

// send publishes a frame; the last one ends the stream.
func (st *hostStream) send(f *boxv1.Frame, last bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.ended {
		return
	}
	st.seqOut++
	f.Seq = st.seqOut
	raw, err := proto.Marshal(f)
	if err != nil {
		return
	}
	if last {
		defer st.endLocked()
	}
	if strings.HasPrefix(st.deliver, "_INBOX.") && !st.srv.lose() {
		_ = st.srv.nc.Publish(st.deliver, raw)
	}
}

// lose reports whether the next frame is to be lost.
func (s *Server) lose() bool { return s.drop.Load() > 0 && s.drop.Add(-1) >= 0 }

// spend waits for credit; false when the stream has ended.
func (st *hostStream) spend(want int) (int, bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for st.credit <= 0 && !st.ended {
		st.cond.Wait()
	}
	n := int(min(int64(want), st.credit, maxChunk))
	if st.ended {
		return 0, false
	}
	st.credit -= int64(n)
	return n, true
}

// data sends bytes of a channel as the credit allows.
func (st *hostStream) data(ch boxv1.Channel, offset uint64, b []byte) bool {
	for len(b) > 0 {
		n, ok := st.spend(len(b))
		if !ok {
			return false
		}
		st.send(&boxv1.Frame{Body: &boxv1.Frame_Data{Data: &boxv1.Data{Channel: ch, Offset: offset, Data: b[:n]}}}, false)
		b, offset = b[n:], offset+uint64(n)
	}
	return true
}

func (st *hostStream) grant(n int) {
	st.send(&boxv1.Frame{Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: uint32(n)}}}, false)
}

func (st *hostStream) fail(err error) {
	st.send(&boxv1.Frame{Body: &boxv1.Frame_Failure{Failure: wire(err)}}, true)
}

func (st *hostStream) result(r *boxv1.Result) {
	st.send(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: r}}, true)
}

// end forgets the stream without a word.
func (st *hostStream) end() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.endLocked()
}

func (st *hostStream) endLocked() {
	st.ended = true
	st.cond.Broadcast()
	st.once.Do(func() { close(st.done) })
}
