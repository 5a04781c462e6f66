package hostagent

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// client is a frontend with a grant for one session.
type client struct {
	t       testing.TB
	r       *rig
	me      subjects.Caller
	conn    *bus.Conn
	ref     *corev1.SessionRef
	proof   ed25519.PrivateKey
	grant   string
	hostKey seal.Public
	credit  uint32
}

func (r *rig) client(ref *corev1.SessionRef) *client {
	return r.clientAs(subjects.Frontend("acme", "web"), ref)
}

func (r *rig) clientAs(me subjects.Caller, ref *corev1.SessionRef) *client {
	r.t.Helper()
	return r.clientWith(me, ref, r.hostKey())
}

func (r *rig) clientWith(me subjects.Caller, ref *corev1.SessionRef, hostKey seal.Public) *client {
	r.t.Helper()
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		r.t.Fatal(err)
	}
	c := &client{t: r.t, r: r, me: me, ref: ref, proof: priv, credit: 1 << 20, hostKey: hostKey}
	c.conn = bustest.Connect(r.t, r.bus, me)
	c.grant = r.creds.mint(r.t, ref, me, pub, nil)
	return c
}

func (c *client) subject(method string) string {
	return subjects.BoxSubject(ids.SessionKey(c.ref.GetSession()), grant.EpochOf(c.ref.GetEpoch()), method)
}

// opening is a request ready to be sent.
type opening struct {
	raw     []byte
	reply   seal.XKey
	deliver string
}

// prepare makes a request; change may spoil it before it is sealed, after it was signed.
func (c *client) prepare(op *boxv1.Operation, change func(*boxv1.Opening)) opening {
	c.t.Helper()
	raw, err := proto.Marshal(op)
	must(c.t, err)
	reply, err := seal.NewKey(rand.Reader)
	must(c.t, err)
	o := opening{reply: reply, deliver: subjects.BoxFrames(c.me, ids.NewStreamID())}
	nonce := make([]byte, grant.NonceBytes)
	_, err = rand.Read(nonce)
	must(c.t, err)
	claim := grant.Opening{
		Subject: c.subject("open"), Nonce: nonce, Time: time.Now(), Operation: raw,
		Deliver: o.deliver, ReplyKey: reply.Public().String(), Grant: c.grant,
	}
	m := &boxv1.Opening{
		Grant: c.grant, Proof: claim.Sign(c.proof), Nonce: nonce, Time: timestamppb.New(claim.Time), Operation: raw,
		Deliver: o.deliver, ReplyKey: claim.ReplyKey, Credit: c.credit,
	}
	if change != nil {
		change(m)
	}
	plain, err := proto.Marshal(m)
	must(c.t, err)
	sealed, err := seal.SealTo(c.hostKey, plain, rand.Reader)
	must(c.t, err)
	o.raw, err = proto.Marshal(&boxv1.OpenRequest{Sealed: sealed})
	must(c.t, err)
	return o
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// failed is a refusal as the client sees it.
type failed struct{ kind, reason string }

func (f *failed) Error() string { return f.kind + ": " + f.reason }

func kindIn(err error) string {
	if f := (*failed)(nil); errors.As(err, &f) {
		return f.kind
	}
	return fmt.Sprint(err)
}

// send sends a request and opens the answer.
func (c *client) send(o opening) (*boxv1.OpenReply, error) {
	msg, err := c.conn.NATS().Request(c.subject("open"), o.raw, 10*time.Second)
	if err != nil {
		return nil, err
	}
	s := &boxv1.SealedOpenReply{}
	if err := proto.Unmarshal(msg.Data, s); err != nil {
		return nil, err
	}
	if f := s.GetFailure(); f != nil {
		return nil, &failed{f.GetKind(), f.GetReason()}
	}
	plain, err := o.reply.Open(s.GetSealed())
	if err != nil {
		return nil, err
	}
	r := &boxv1.OpenReply{}
	if err := proto.Unmarshal(plain, r); err != nil {
		return nil, err
	}
	if f := r.GetFailure(); f != nil {
		return nil, &failed{f.GetKind(), f.GetReason()}
	}
	return r, nil
}

// cstream is the client's end of a stream.
type cstream struct {
	c       *client
	id      string
	sub     *nats.Subscription
	reply   *boxv1.OpenReply
	in, out uint64
}

func (c *client) open(op *boxv1.Operation) (*cstream, error) {
	o := c.prepare(op, nil)
	sub, err := c.conn.NATS().SubscribeSync(o.deliver)
	must(c.t, err)
	must(c.t, sub.SetPendingLimits(-1, -1))
	r, err := c.send(o)
	if err != nil {
		_ = sub.Unsubscribe()
		return nil, err
	}
	return &cstream{c: c, id: r.GetStream(), sub: sub, reply: r}, nil
}

func (c *client) mustOpen(op *boxv1.Operation) *cstream {
	c.t.Helper()
	s, err := c.open(op)
	if err != nil {
		c.t.Fatalf("open: %v", err)
	}
	return s
}

func (s *cstream) send(f *boxv1.Frame) {
	s.in++
	f.Seq = s.in
	raw, err := proto.Marshal(f)
	must(s.c.t, err)
	must(s.c.t, s.c.conn.NATS().PublishMsg(&nats.Msg{
		Subject: s.c.subject("in"), Data: raw, Header: nats.Header{"Berth-Stream": []string{s.id}},
	}))
}

func (s *cstream) recv(within time.Duration) (*boxv1.Frame, error) {
	for {
		msg, err := s.sub.NextMsg(within)
		if err != nil {
			return nil, err
		}
		f := &boxv1.Frame{}
		if err := proto.Unmarshal(msg.Data, f); err != nil {
			return nil, err
		}
		if s.out++; f.GetSeq() != s.out {
			return nil, fmt.Errorf("frame %d, expected %d", f.GetSeq(), s.out)
		}
		if f.GetPing() == nil {
			return f, nil
		}
	}
}

// outcome is all that an exec gave.
type outcomeOf struct {
	stdout, stderr []byte
	exit           *boxv1.Exit
	gaps           []*boxv1.Gap
	acked          uint64
}

// drain takes frames to the end of the stream and gives credit back.
func (s *cstream) drain() (o outcomeOf, err error) {
	for {
		f, err := s.recv(20 * time.Second)
		if err != nil {
			return o, err
		}
		switch b := f.GetBody().(type) {
		case *boxv1.Frame_Data:
			buf := &o.stdout
			if b.Data.GetChannel() == boxv1.Channel_CHANNEL_STDERR {
				buf = &o.stderr
			}
			*buf = append(*buf, b.Data.GetData()...)
			s.send(&boxv1.Frame{Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: uint32(len(b.Data.GetData()))}}})
		case *boxv1.Frame_Gap:
			o.gaps = append(o.gaps, b.Gap)
		case *boxv1.Frame_InputAck:
			o.acked = b.InputAck.GetOffset()
		case *boxv1.Frame_Exit:
			o.exit = b.Exit
			return o, nil
		case *boxv1.Frame_Failure:
			return o, &failed{b.Failure.GetKind(), b.Failure.GetReason()}
		}
	}
}

func execOp(k string, argv ...string) *boxv1.Operation {
	return &boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: k, Argv: argv}}}
}

func attachOp(k string, stdout uint64) *boxv1.Operation {
	return &boxv1.Operation{Op: &boxv1.Operation_ExecAttach{ExecAttach: &boxv1.ExecAttach{Key: k, StdoutOffset: stdout}}}
}

func (c *client) exec(k string, argv ...string) outcomeOf {
	c.t.Helper()
	o, err := c.mustOpen(execOp(k, argv...)).drain()
	if err != nil {
		c.t.Fatalf("exec %v: %v", argv, err)
	}
	return o
}

// upload writes a file.
func (c *client) upload(path string, data []byte) (*boxv1.Result, error) {
	s, err := c.open(&boxv1.Operation{Op: &boxv1.Operation_WriteFile{WriteFile: &boxv1.WriteFile{Path: path, Parents: true}}})
	if err != nil {
		return nil, err
	}
	room := int(s.reply.GetCredit())
	for at := 0; at < len(data); {
		for room == 0 {
			f, err := s.recv(10 * time.Second)
			if err != nil {
				return nil, err
			}
			room += int(f.GetCredit().GetBytes())
		}
		n := min(len(data)-at, 64<<10, room)
		d := &boxv1.Data{Channel: boxv1.Channel_CHANNEL_FILE, Offset: uint64(at), Data: data[at : at+n]}
		s.send(&boxv1.Frame{Body: &boxv1.Frame_Data{Data: d}})
		at, room = at+n, room-n
	}
	s.send(&boxv1.Frame{Body: &boxv1.Frame_CloseInput{CloseInput: &boxv1.CloseInput{Total: uint64(len(data))}}})
	for {
		f, err := s.recv(10 * time.Second)
		if err != nil {
			return nil, err
		}
		if f.GetResult() != nil {
			return f.GetResult(), nil
		}
		if x := f.GetFailure(); x != nil {
			return nil, &failed{x.GetKind(), x.GetReason()}
		}
	}
}

// download reads a file.
func (c *client) download(path string) ([]byte, error) {
	s, err := c.open(&boxv1.Operation{Op: &boxv1.Operation_ReadFile{ReadFile: &boxv1.ReadFile{Path: path}}})
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for {
		f, err := s.recv(10 * time.Second)
		if err != nil {
			return nil, err
		}
		if d := f.GetData(); d != nil {
			out.Write(d.GetData())
			s.send(&boxv1.Frame{Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: uint32(len(d.GetData()))}}})
		}
		if f.GetResult() != nil {
			return out.Bytes(), nil
		}
		if x := f.GetFailure(); x != nil {
			return nil, &failed{x.GetKind(), x.GetReason()}
		}
	}
}
