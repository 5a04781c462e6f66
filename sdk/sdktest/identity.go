package sdktest

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// outcome is what an idempotent request came to.
type outcome struct {
	hash  [32]byte
	reply *identityv1.Reply
}

// fault is a failure on its way to the wire.
type fault struct {
	kind   errkind.Kind
	reason string
}

func (f fault) Error() string { return f.reason }

func wire(err error) *corev1.Failure {
	f := fault{errkind.Internal, err.Error()}
	if g := (*grant.Error)(nil); errors.As(err, &g) {
		f.kind = g.Kind
	}
	_ = errors.As(err, &f)
	return &corev1.Failure{Kind: f.kind.String(), Reason: f.reason}
}

// serve declares the streams and answers on every subject.
func (s *Server) serve() error {
	for _, st := range subjects.Streams {
		cfg := jetstream.StreamConfig{Name: st.Name, Subjects: st.Subjects, MaxBytes: 64 << 20}
		if st.Retention == subjects.WorkQueue {
			cfg.Retention = jetstream.WorkQueuePolicy
		}
		if st.Schedules {
			continue // no timers here
		}
		if _, err := s.js.CreateStream(s.ctx, cfg); err != nil {
			return err
		}
	}
	cons, err := s.js.CreateConsumer(s.ctx, "BERTH_REQUESTS", jetstream.ConsumerConfig{Durable: "identity-requests", AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		return err
	}
	if _, err := cons.Consume(s.queued); err != nil {
		return err
	}
	for subject, handler := range map[string]nats.MsgHandler{
		"berth.v1.rpc.*.*.operator":    func(m *nats.Msg) { go s.operator(m) },
		"berth.v1.box.*.*.*":           s.box,
		"berth.v1.rpc.host.*.*.*":      func(m *nats.Msg) { go s.operator(m) },
		"berth.v1.rpc.credentials.*.*": func(m *nats.Msg) {},
	} {
		if _, err := s.nc.Subscribe(subject, handler); err != nil {
			return err
		}
	}
	return s.listenDirect()
}

// direct is the door for interactive frontends.
func (s *Server) direct(m *nats.Msg) {
	call, err := subjects.ParseRPC(m.Subject)
	if err != nil {
		return
	}
	if call.Method == "keys" {
		s.reply(m, &identityv1.KeysReply{CurveKey: string(s.identity.Public())})
		return
	}
	out := s.request(call.Caller, call.Method, m.Header, m.Data)
	if !s.answerIsLost() {
		s.reply(m, out)
	}
}

// queued is the durable door.
func (s *Server) queued(m jetstream.Msg) {
	go func() {
		r, err := subjects.ParseRequest(m.Subject())
		if err != nil {
			_ = m.Term()
			return
		}
		out := s.request(r.Caller(), r.Verb, m.Headers(), m.Data())
		if to := m.Headers().Get("Berth-Reply"); r.Caller().InInbox(to) {
			s.publish(to, m.Headers(), out)
		}
		_ = m.Ack()
	}()
}

// reply answers in the encoding of the request.
func (s *Server) reply(m *nats.Msg, out proto.Message) { s.publish(m.Reply, m.Header, out) }

func (s *Server) publish(to string, asked nats.Header, out proto.Message) {
	msg := &nats.Msg{Subject: to, Header: nats.Header{}}
	ct := asked.Get("Content-Type")
	var err error
	if strings.HasPrefix(ct, "application/json") {
		msg.Data, err = protojson.Marshal(out)
	} else {
		ct = "application/protobuf"
		msg.Data, err = proto.Marshal(out)
	}
	msg.Header.Set("Content-Type", ct)
	if err == nil {
		_ = s.nc.PublishMsg(msg)
	}
}

func decode(contentType string, raw []byte, out proto.Message) error {
	if strings.HasPrefix(contentType, "application/json") {
		return protojson.Unmarshal(raw, out)
	}
	return proto.Unmarshal(raw, out)
}

// request opens the envelope, judges it and seals the answer.
func (s *Server) request(who subjects.Caller, verb string, h nats.Header, raw []byte) *identityv1.SealedReply {
	req, env := &identityv1.SealedRequest{}, &identityv1.Envelope{}
	if err := decode(h.Get("Content-Type"), raw, req); err != nil {
		return &identityv1.SealedReply{Failure: wire(fault{errkind.Invalid, "the request is not a SealedRequest"})}
	}
	plain, err := s.identity.Open(req.GetSealed())
	if err != nil || proto.Unmarshal(plain, env) != nil {
		return &identityv1.SealedReply{Failure: wire(fault{errkind.Unauthenticated, "the envelope cannot be opened"})}
	}
	reply, err := s.judge(who, verb, env)
	if err != nil {
		reply = &identityv1.Reply{Outcome: &identityv1.Reply_Failure{Failure: wire(err)}}
	}
	reply.RequestId = env.GetRequestId()
	out, err := proto.Marshal(reply)
	if err != nil {
		return &identityv1.SealedReply{Failure: wire(err)}
	}
	sealed, err := seal.SealTo(seal.Public(env.GetReplyKey()), out, rand.Reader)
	if err != nil {
		return &identityv1.SealedReply{Failure: wire(fault{errkind.Invalid, "the reply key is no curve key"})}
	}
	return &identityv1.SealedReply{Sealed: sealed, Sender: string(sealed[1:57])}
}

func (s *Server) judge(who subjects.Caller, verb string, env *identityv1.Envelope) (*identityv1.Reply, error) {
	s.mu.Lock()
	u, known := s.tokens[env.GetToken()]
	s.mu.Unlock()
	hash := sha256.Sum256(env.GetBody())
	switch {
	case !known:
		return nil, fault{errkind.Unauthenticated, "the token is not good: expired, foreign or malformed"}
	case u.tenant != string(who.Tenant):
		return nil, fault{errkind.Denied, "the token belongs to another tenant"}
	case env.GetVerb() != verb:
		return nil, fault{errkind.Invalid, "the envelope is for another verb"}
	case !bytes.Equal(hash[:], env.GetBodyHash()):
		return nil, fault{errkind.Invalid, "the body does not have the hash that the envelope names"}
	case time.Since(env.GetTime().AsTime()).Abs() > 2*time.Minute:
		return nil, fault{errkind.Expired, "the request is older than two minutes"}
	}
	if _, err := ids.ParseRequestID(env.GetRequestId()); err != nil {
		return nil, fault{errkind.Invalid, err.Error()}
	}
	if err := s.acted(who, u); err != nil {
		return nil, err
	}
	if r, err := s.about(who, u, env); r != nil || err != nil {
		return r, err
	}
	switch verb {
	case "status":
		return s.status(u, env)
	case "renew":
		return s.renew(who, u, env)
	}
	return s.once(who, u, env, hash)
}

// once runs open, close and delete at most once per request id.
func (s *Server) once(who subjects.Caller, u user, env *identityv1.Envelope, hash [32]byte) (*identityv1.Reply, error) {
	name, err := sessionName(env)
	if err != nil {
		return nil, err
	}
	key := sessionKey(u, name)
	id := strings.Join([]string{key, env.GetVerb(), env.GetRequestId()}, " ")
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.outcomes[id]; ok {
		if old.hash != hash {
			return nil, fault{errkind.ReplayMismatch, "the request id was used before with another body"}
		}
		reply := proto.Clone(old.reply).(*identityv1.Reply)
		if o := reply.GetOpen(); o != nil {
			x := s.sessions[key]
			if x == nil || x.state != corev1.State_STATE_ACTIVE || !proto.Equal(x.ref(), o.GetSession()) {
				return nil, fault{errkind.Superseded, "this request opened the session before, and it is not active any more; open it again with a new request id"}
			}
			verbs, err := verbsOf(env)
			if err != nil {
				return nil, err
			}
			return reply, s.mint(o, who, u, holder{env.GetProofKey(), verbs})
		}
		return reply, nil
	}
	var reply *identityv1.Reply
	switch env.GetVerb() {
	case "open":
		reply, err = s.openLocked(who, u, name, env)
	case "close":
		reply, err = s.closeLocked(key)
	case "delete":
		reply, err = s.deleteLocked(key, env.GetRequestId())
	default:
		err = fault{errkind.Unimplemented, "there is no such verb"}
	}
	if err != nil {
		return nil, err
	}
	s.outcomes[id] = outcome{hash, reply}
	return reply, nil
}

func sessionName(env *identityv1.Envelope) (string, error) {
	var body interface {
		proto.Message
		GetSessionName() string
	}
	switch env.GetVerb() {
	case "open":
		body = &identityv1.OpenRequest{}
	case "close":
		body = &identityv1.CloseRequest{}
	case "delete":
		body = &identityv1.DeleteRequest{}
	case "status":
		body = &identityv1.StatusRequest{}
	default:
		body = &identityv1.RenewRequest{}
	}
	if err := decode(env.GetContentType(), env.GetBody(), body); err != nil {
		return "", fault{errkind.Invalid, "the body is not a request of that verb"}
	}
	if body.GetSessionName() == "" {
		return string(ids.DefaultSession), nil
	}
	n, err := ids.ParseSessionName(body.GetSessionName())
	if err != nil {
		return "", fault{errkind.Invalid, err.Error()}
	}
	return string(n), nil
}

func sessionKey(u user, name string) string {
	return string(ids.DeriveSessionKey([]byte("sdktest"), Issuer, ids.Tenant(u.tenant), u.subject, ids.SessionName(name)))
}

// holder is whose key a grant names, and what it is good for.
type holder struct {
	proof []byte
	verbs []grant.Verb
}

// verbsOf reads what the grant of an open is to be good for.
func verbsOf(env *identityv1.Envelope) ([]grant.Verb, error) {
	req := &identityv1.OpenRequest{}
	if err := decode(env.GetContentType(), env.GetBody(), req); err != nil {
		return nil, fault{errkind.Invalid, "the body is not an open"}
	}
	return grant.ParseVerbs(req.GetVerbs())
}

// mint puts a fresh grant into an answer.
func (s *Server) mint(o *identityv1.OpenReply, who subjects.Caller, u user, by holder) error {
	proof := by.proof
	if len(proof) != ed25519.PublicKeySize {
		return fault{errkind.Invalid, "the proof key must have 32 bytes"}
	}
	now := time.Now()
	exp := now.Add(s.opts.GrantLife)
	token, err := grant.Sign(grant.Claims{
		Issuer: grant.Issuer, ID: string(ids.NewRequestID()), Tenant: who.Tenant, Frontend: who.Frontend,
		Session: ids.SessionKey(o.GetSession().GetSession()), Generation: grant.GenerationOf(o.GetSession().GetGeneration()),
		Epoch: grant.EpochOf(o.GetSession().GetEpoch()), Host: s.hostOf(o.GetSession().GetSession()),
		Principal: grant.Principal{Issuer: Issuer, Subject: u.subject}, Confirm: grant.Confirm(proof), Verbs: by.verbs,
		IssuedAt: now.Unix(), Expires: max(exp.Unix(), now.Unix()+1), AuthTime: now.Unix(),
	}, "k1", s.signer)
	o.Grant, o.GrantExpires = token, timestamppb.New(exp)
	return err
}

func (s *Server) verifier() (*grant.Verifier, error) {
	jwk := grant.Confirm(s.signer.Public().(ed25519.PublicKey)).JWK
	raw := `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"k1","x":"` + jwk.X + `"}]}`
	return grant.NewVerifier([]byte(raw), nil, nil)
}

func (s *Server) renew(who subjects.Caller, u user, env *identityv1.Envelope) (*identityv1.Reply, error) {
	req := &identityv1.RenewRequest{}
	if err := decode(env.GetContentType(), env.GetBody(), req); err != nil {
		return nil, fault{errkind.Invalid, "the body is not a renewal"}
	}
	v, err := s.verifier()
	if err != nil {
		return nil, err
	}
	// The fake renews a grant that has just expired too: tests shorten lives.
	c, err := v.Authenticate(req.GetGrant(), time.Now().Add(-20*time.Second))
	if err != nil {
		return nil, err
	}
	proof := grant.Renewal{RequestID: env.GetRequestId(), Grant: req.GetGrant(), Time: env.GetTime().AsTime()}
	key, err := c.ProofKey()
	if err != nil {
		return nil, err
	}
	if err := proof.Verify(key, req.GetProof(), time.Now()); err != nil {
		return nil, err
	}
	x := s.find(string(c.Session))
	if x == nil || x.tenant != u.tenant || c.Principal.Subject != u.subject {
		return nil, fault{errkind.Denied, "the grant is not yours"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if x.state != corev1.State_STATE_ACTIVE || x.epoch != c.Epoch {
		return nil, fault{errkind.StaleEpoch, "the session slept or moved since; open it again"}
	}
	o := &identityv1.OpenReply{Session: x.ref()}
	if err := s.mint(o, who, u, holder{key, c.Verbs}); err != nil {
		return nil, err
	}
	return &identityv1.Reply{Outcome: &identityv1.Reply_Renew{Renew: &identityv1.RenewReply{Grant: o.Grant, GrantExpires: o.GrantExpires}}}, nil
}

func (s *Server) status(u user, env *identityv1.Envelope) (*identityv1.Reply, error) {
	req := &identityv1.StatusRequest{}
	if err := decode(env.GetContentType(), env.GetBody(), req); err != nil {
		return nil, fault{errkind.Invalid, "the body is not a status request"}
	}
	out := &identityv1.StatusReply{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.sorted() {
		if x.tenant == u.tenant && x.subject == u.subject && (req.GetSessionName() == "" || req.GetSessionName() == x.name) && x.state != corev1.State_STATE_DELETED {
			out.Sessions = append(out.Sessions, &identityv1.SessionStatus{Session: x.ref(), SessionName: x.name, State: x.state,
				Terms: x.terms, ChangedAt: timestamppb.New(x.changed)})
		}
	}
	return &identityv1.Reply{Outcome: &identityv1.Reply_Status{Status: out}}, nil
}

// timing looks like that of a real open.
func timing(total time.Duration) *corev1.Timing {
	step := func(name string, start, took time.Duration) *corev1.Step {
		return &corev1.Step{Name: name, Start: durationpb.New(start), Took: durationpb.New(took)}
	}
	return &corev1.Timing{Total: durationpb.New(total), Steps: []*corev1.Step{
		step("scheduler.place", 0, total/4), step("host.disk.attach", total/4, total/4), step("host.guest.ready", total/2, total/2)}}
}
