package sim

import (
	"crypto/ed25519"
	"crypto/sha256"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	ident "github.com/berth-dev/berth/services/identity/simcore"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

type openAsk = identityv1.OpenRequest

// identReq is a request of a frontend, as identity sees it once the envelope is open.
type identReq struct {
	verb    string
	id      ids.RequestID
	subject string
	name    string
	durable bool // ephemeral if not
	wait    time.Duration
	body    []byte
	dated   time.Time
	stored  time.Time // by the server; zero: now
}

// granted is the answer to an open that came with a grant.
type granted struct {
	open openReply
}

// identity is the real core; envelopes are not sealed here.
type identity struct {
	w      *World
	p      *proc
	policy ident.Policy
}

// durable is a request that was stored before anybody handled it.
type durable struct {
	req    identReq
	door   string
	done   bool
	taken  bool
	tries  int
	reply  any
	err    error
	answer signal
}

const issuer, audience, tenant = "https://issuer.example", "berth", ids.Tenant("acme")

func newIdentity(w *World) *identity {
	s := &identity{w: w, policy: ident.Policy{SessionKeys: [][]byte{[]byte("0123456789abcdef0123456789abcdef")},
		Entries: []ident.Entry{{Issuer: issuer, Audience: audience, Tenant: tenant, Plan: "small"}}}}
	s.p = w.proc("identity", "identity")
	w.services["identity"] = []*proc{s.p}
	s.p.begin = func() {
		s.p.serve["request"] = func(t *task, c *ctx, _ ids.Host, req any) (any, error) {
			r := req.(identReq)
			r.stored = epoch0.Add(w.now)
			return s.handle(t, c, r, ident.Direct)
		}
		for _, d := range w.stream.asked { // what was under way is delivered again
			d.taken = false
		}
		w.spawn(s.p, "durable", s.consume)
	}
	return s
}

func (s *identity) keyOf(subject, name string) ids.SessionKey {
	return ids.DeriveSessionKey(s.policy.SessionKeys[0], issuer, tenant, subject, ids.SessionName(name))
}

// consume handles requests of the durable door until their outcome is committed.
func (s *identity) consume(t *task) {
	for {
		for _, d := range s.w.stream.asked {
			if !d.done && !d.taken {
				d.taken = true
				s.w.spawn(s.p, "request", func(t *task) { s.deliver(t, d) })
			}
		}
		s.w.stream.queued.take()
		t.wait(nil, time.Second, &s.w.stream.queued)
	}
}

func (s *identity) deliver(t *task, d *durable) {
	if !s.w.stream.p.running() {
		t.sleep(nil, time.Second)
	}
	reply, err := s.handle(t, s.w.within(nil, 70*time.Second), d.req, ident.Durable)
	if err != nil && kindOf(err).Disposition() == errkind.Nak && !finalFault(err) &&
		(d.req.verb != ident.Open || t.p.wall().Before(d.req.stored.Add(d.req.wait))) {
		d.tries++
		t.sleep(nil, min(time.Second<<min(d.tries, 4), 10*time.Second))
		s.w.cov.hit("durable request delivered again")
		d.taken = false
		s.w.stream.queued.fire(s.w)
		return
	}
	d.done, d.reply, d.err = true, reply, err
	s.w.stream.asked = remove(s.w.stream.asked, d)
	s.w.carry(s.p, s.w.users.p, "durable answer", func() { d.answer.fire(s.w) })
}

func finalFault(err error) bool {
	f, ok := err.(*fault)
	return ok && f.final
}

// handle is what both doors lead to.
func (s *identity) handle(t *task, c *ctx, r identReq, door string) (any, error) {
	sum := sha256.Sum256(r.body)
	asked := ident.Asked{Door: door, Tenant: tenant, Frontend: "web", Verb: r.verb, StoredAt: r.stored,
		Envelope: &identityv1.Envelope{Verb: r.verb, RequestId: string(r.id), Token: "token", Body: r.body, BodyHash: sum[:],
			ProofKey: proofKey, Time: timestamppb.New(r.dated)}}
	ask := &identityv1.OpenRequest{SessionName: r.name, Wait: durationpb.New(r.wait), Persistence: corev1.Persistence_PERSISTENCE_DURABLE}
	if !r.durable {
		ask.Persistence = corev1.Persistence_PERSISTENCE_EPHEMERAL
	}
	switch r.verb {
	case ident.Open:
		asked.Body.Open = ask
	case ident.Close:
		asked.Body.Close = &identityv1.CloseRequest{SessionName: r.name}
	default:
		asked.Body.Delete = &identityv1.DeleteRequest{SessionName: r.name}
	}
	st := ident.State{Policy: s.policy}
	st, cmds, err := ident.Decide(st, asked, t.p.wall())
	var reply any
	for err == nil && len(cmds) > 0 {
		cmd := cmds[0]
		cmds = cmds[1:]
		var more []ident.Command
		switch x := cmd.(type) {
		case ident.VerifyToken:
			st, more, err = ident.Decide(st, ident.TokenGood{Token: ident.Token{Issuer: issuer, Subject: r.subject, Audience: []string{audience},
				Expires: r.stored.Add(time.Hour), IssuedAt: r.stored.Add(-time.Minute)}}, t.p.wall())
		case ident.CallLifecycle:
			reply, err = t.call(c, "lifecycle", r.verb, verifiedReq{st.Verified, ask})
			if open, ok := reply.(openReply); ok && err == nil {
				st, more, err = ident.Decide(st, ident.Awake{Session: sessionRef(tenant, open.ref), State: open.state}, t.p.wall())
			}
		case ident.Mint:
			open := reply.(openReply)
			_, err = t.call(c, "credentials", "mint", mintReq{tenant: tenant, ref: refFrom(x.Session), host: open.host, actor: st.Verified.GetActor()})
			reply = granted{open}
		}
		cmds = append(cmds, more...)
	}
	if rf, ok := err.(*ident.Refusal); ok {
		err = &fault{kind: rf.Kind, why: rf.Reason, final: true}
	}
	if err != nil {
		return nil, err
	}
	if _, ok := reply.(openReply); ok && reply != nil && r.verb == ident.Open {
		return nil, fail(errkind.Internal, "an open without a grant")
	}
	return reply, nil
}

var proofKey = make([]byte, ed25519.PublicKeySize)
