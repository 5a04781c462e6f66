package sdk

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
)

// OpenOptions say which session is wanted and under what conditions. The zero
// value, with a User here or in the Config, is the user's default session.
type OpenOptions struct {
	User        TokenSource // nil: that of the Config
	Name        string      // empty: "default"
	Persistence Persistence // empty: the plan's, normally Durable
	Template    string      // empty: the plan's
	MinTier     Tier        // the weakest tier that is acceptable; empty: the tenant's
	Risk        Risk
	Wait        time.Duration // how long to wait for capacity; default 60 s, at most 10 min
	RequestID   string        // makes the open idempotent across processes; empty: random
	// Verbs are what the handle is to be good for; empty: exec, files and ports. A call that they do not
	// cover fails with ErrDenied. They do not change when the grant is renewed.
	Verbs []Verb
	// ViaQueue uses the durable door: the request is stored before it is
	// handled and survives the restart of any service. A few ms slower.
	ViaQueue bool
	// Progress is called, in order and from one goroutine, with the session's
	// events while the open is under way. It must not block for long. It is not
	// called for a user with a login of its own, who hears no one else's.
	Progress func(Event)
	// OnHandoff is called, in a goroutine of its own, when the session that this handle opened is awake
	// again on another host after its own was lost, drained or removed: once for each time, also when
	// nothing was under way. The handle is good again after Reopen. A handoff while the connection to
	// the bus is down is not told; calls then fail with ErrStaleEpoch.
	OnHandoff func(Handoff)
}

// Risk is what the frontend knows about the code that will run; the operator's
// policy chooses the tier from it. What is left out counts as the riskiest value,
// so telling more can only give a place that starts sooner, never a weaker wall
// than the policy, the tenant or MinTier ask for.
type Risk struct {
	CodeAuthor CodeAuthor  // who wrote the code
	Tools      ToolBreadth // what it is asked to do
	Network    NetworkNeed // how far it must reach
	DataClass  string      // a word that the operator's policy knows, for example "internal"
	ToolAccess bool        // it can call tools
	// UntrustedCode: written by a model or a third party, not by the user. The same as
	// ThirdPartyCode where CodeAuthor is left out or says the user or the operator.
	UntrustedCode bool
}

// Session is a handle of one awake session. It renews its grant by itself. A
// session that fell asleep or moved since makes calls fail with ErrStaleEpoch, and
// ends its streams (see [EndedError]); Reopen then wakes or joins it and makes the
// handle good again.
type Session struct {
	c     *Client
	opts  OpenOptions
	proof ed25519.PrivateKey
	// sender seals openings, and answers to them are sealed to replyKey: two
	// keys, so that neither can be sent back as the other.
	sender, replyKey *seal.Box

	ctx  context.Context // ends with Detach, Close and Delete
	stop context.CancelFunc

	renewing sync.Mutex // one renewal at a time

	mu      sync.Mutex
	reply   *identityv1.OpenReply
	grant   string
	expires time.Time
	renewed time.Time
	// attending are streams and calls under way; last is why the newest epoch of the handle that is
	// over, lastEpoch, is over.
	attending map[*attendant]struct{}
	last      *EndedError
	lastEpoch *corev1.Stamp

	// attached: of another user's session, by an administrator or an operator. The handle is good for one
	// short grant and does nothing to the session's life.
	attached bool

	told *corev1.Stamp // newest epoch whose handoff was told; of the subscription alone
}

// access is what a stream needs to be opened.
type access struct {
	subject, hostKey, grant string
	epoch                   *corev1.Stamp
}

// Open wakes the user's session, creating it if there is none, and waits until
// it is active. Calls with the same RequestID are one open.
//
// Errors: ErrInvalid, ErrUnauthenticated, ErrRefused (with a reason for the
// user), ErrUnplaceable, ErrDeadline (it may still become active), ErrUnavailable,
// ErrReplayMismatch, ErrSuperseded (the session that this RequestID opened is
// not active any more, or was deleted since: ask with another one).
func (c *Client) Open(ctx context.Context, o OpenOptions) (*Session, error) {
	_, proof, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, wrap("open session", err)
	}
	sender, err := seal.RandomBox()
	if err != nil {
		return nil, wrap("open session", err)
	}
	reply, err := seal.RandomBox()
	if err != nil {
		return nil, wrap("open session", err)
	}
	s := &Session{c: c, opts: o, proof: proof, sender: sender, replyKey: reply, attending: map[*attendant]struct{}{}}
	s.ctx, s.stop = context.WithCancel(c.ctx)
	if err := s.reopen(ctx, o.RequestID); err != nil {
		s.stop()
		return nil, err
	}
	if err := s.heed(); err != nil {
		s.stop()
		return nil, err
	}
	go s.keep()
	return s, nil
}

// Reopen wakes the session again if it fell asleep, and refreshes the handle.
func (s *Session) Reopen(ctx context.Context) error {
	if err := s.alive(); err != nil {
		return wrap("open session", err)
	}
	if s.attached {
		return notOurs("open session")
	}
	return s.reopen(ctx, "")
}

func (s *Session) reopen(ctx context.Context, requestID string) error {
	const op = "open session"
	a, err := s.c.openAsk(s.opts, requestID, s.proof.Public().(ed25519.PublicKey))
	if err != nil {
		return err
	}
	if s.opts.Progress != nil {
		stop, err := s.c.progress(a.id, s.opts.Progress)
		if err != nil {
			return wrap(op, err)
		}
		defer stop()
	}
	r, err := s.c.do(ctx, a)
	if err != nil {
		return err
	}
	open := r.GetOpen()
	if open.GetEndpoint().GetSubject() == "" || open.GetGrant() == "" {
		return &Error{Op: op, Kind: errkind.Internal, Reason: "the answer names no endpoint or no grant"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reply, s.grant, s.expires, s.renewed = open, open.GetGrant(), open.GetGrantExpires().AsTime(), time.Now()
	return nil
}

// openAsk checks the options and makes the request.
func (c *Client) openAsk(o OpenOptions, requestID string, proof ed25519.PublicKey) (ask, error) {
	const op = "open session"
	body := &identityv1.OpenRequest{SessionName: o.Name, Template: o.Template,
		Risk: &identityv1.RiskFacts{UntrustedCode: o.Risk.UntrustedCode, ToolAccess: o.Risk.ToolAccess, DataClass: o.Risk.DataClass}}
	if err := o.Risk.words(op, body.Risk); err != nil {
		return ask{}, err
	}
	if o.Name != "" {
		if _, err := ids.ParseSessionName(o.Name); err != nil {
			return ask{}, wrap(op, err)
		}
	}
	if o.Persistence != "" {
		v, ok := corev1.Persistence_value["PERSISTENCE_"+upper(string(o.Persistence))]
		if !ok {
			return ask{}, invalid(op, "persistence %q is neither durable nor ephemeral", o.Persistence)
		}
		body.Persistence = corev1.Persistence(v)
	}
	if o.MinTier != "" {
		v, ok := corev1.Tier_value["TIER_"+upper(string(o.MinTier))]
		if !ok || v == 0 { // "unspecified" would ask for nothing
			return ask{}, invalid(op, "there is no tier %q; there are container, gvisor, kata and microvm", o.MinTier)
		}
		body.MinTier = corev1.Tier(v)
	}
	for _, v := range o.Verbs {
		body.Verbs = append(body.Verbs, string(v))
	}
	if _, err := grant.ParseVerbs(body.Verbs); err != nil {
		return ask{}, invalid(op, "%v", err)
	}
	if o.Wait < 0 || o.Wait > 10*time.Minute {
		return ask{}, invalid(op, "the wait of %s must be between 0 and 10 minutes", o.Wait)
	}
	wait := time.Minute
	if o.Wait > 0 {
		wait = o.Wait
		body.Wait = durationpb.New(o.Wait)
	}
	id, err := requestIDOr(requestID)
	if err != nil {
		return ask{}, wrap(op, err)
	}
	return ask{op: op, verb: "open", id: id, user: o.User, proof: proof, durable: o.ViaQueue, limit: wait + 15*time.Second,
		body: func(time.Time) proto.Message { return body }}, nil
}

func requestIDOr(s string) (ids.RequestID, error) {
	if s == "" {
		return ids.NewRequestID(), nil
	}
	return ids.ParseRequestID(s)
}

// Submit puts an open on the durable door and returns its request id as soon
// as the request is stored: publish and forget. Its outcome is in the events.
func (c *Client) Submit(ctx context.Context, o OpenOptions) (requestID string, err error) {
	const op = "submit an open"
	pub, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", wrap(op, err)
	}
	a, err := c.openAsk(o, o.RequestID, pub)
	if err != nil {
		return "", err
	}
	reply, err := newKey()
	if err != nil {
		return "", wrap(op, err)
	}
	body, err := c.sealAsk(ctx, a, reply)
	if err != nil {
		return "", wrap(op, err)
	}
	return string(a.id), wrap(op, c.store(ctx, a.verb, body, ""))
}

func (s *Session) access() access {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.reply.GetEndpoint()
	return access{e.GetSubject(), e.GetHostKey(), s.grant, s.reply.GetSession().GetEpoch()}
}

func (s *Session) alive() error {
	if s.ctx.Err() != nil {
		return &Error{Kind: errkind.Canceled, Reason: "the handle of the session was closed"}
	}
	return nil
}

// stale reports whether the grant has expired or is about to.
func (s *Session) stale() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(s.expires) < 30*time.Second
}

// keep renews the grant at half of its life until the handle is closed.
func (s *Session) keep() {
	failures := 0
	for {
		s.mu.Lock()
		wait := max(time.Until(s.renewed.Add(s.expires.Sub(s.renewed)/2)), 100*time.Millisecond)
		s.mu.Unlock()
		if failures > 0 {
			wait = min(time.Second<<min(failures, 5), 30*time.Second)
		}
		t := time.NewTimer(wait)
		select {
		case <-s.ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		failures++
		if err := s.renew(s.ctx); err == nil {
			failures = 0
			s.present()
		}
	}
}

// present shows the renewed grant to the host if streams are open: they end with the grants that their
// handle has shown. It is tried until half of the grant's life is over, when there is another one. A host
// of a release that knows no such operation ends no stream for it.
func (s *Session) present() {
	s.mu.Lock()
	idle := len(s.attending) == 0
	half := s.renewed.Add(s.expires.Sub(s.renewed) / 2)
	s.mu.Unlock()
	if idle {
		return
	}
	ctx, cancel := context.WithDeadline(s.ctx, half)
	defer cancel()
	for n := 0; ctx.Err() == nil; n++ {
		_, err := s.short(ctx, "present grant", &boxv1.Operation{Op: &boxv1.Operation_Present{Present: &boxv1.Present{}}}, true)
		if err == nil || !KindOf(err).Retry() || pause(ctx, n) != nil {
			return
		}
	}
}

// renew gets a fresh grant. A user's token that is not good any more is left
// out: credentials renews without one for a limited time.
func (s *Session) renew(ctx context.Context) error {
	if s.attached {
		return notOurs("renew grant")
	}
	s.renewing.Lock()
	defer s.renewing.Unlock()
	old := s.access().grant
	r, err := s.askRenewal(ctx, old, s.opts.User)
	if KindOf(err) == errkind.Unauthenticated {
		r, err = s.askRenewal(ctx, old, func(context.Context) (string, error) { return "", nil })
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.grant == old {
		s.grant, s.expires, s.renewed = r.GetGrant(), r.GetGrantExpires().AsTime(), time.Now()
	}
	return nil
}

// askRenewal asks once; the request is signed with the proof key.
func (s *Session) askRenewal(ctx context.Context, old string, user TokenSource) (*identityv1.RenewReply, error) {
	id, name := ids.NewRequestID(), s.opts.Name
	r, err := s.c.do(ctx, ask{op: "renew grant", verb: "renew", id: id, user: user, optional: true, limit: 30 * time.Second,
		proof: s.proof.Public().(ed25519.PublicKey),
		body: func(at time.Time) proto.Message {
			proof := grant.Renewal{RequestID: string(id), Grant: old, Time: at}.Sign(s.proof)
			return &identityv1.RenewRequest{SessionName: name, Grant: old, Proof: proof}
		}})
	return r.GetRenew(), err
}

// gone asks why nobody answers for the session: nil means that it is still
// active in this epoch, as far as is known.
func (s *Session) gone(ctx context.Context) error {
	if s.attached {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	list, err := s.c.Status(ctx, UserSession{User: s.opts.User, Name: s.Name()})
	if err != nil {
		if KindOf(err) == errkind.NotFound {
			return &Error{Kind: errkind.StaleEpoch, Reason: "the session was deleted; open it again for a new one"}
		}
		return nil
	}
	for _, st := range list {
		if st.Key != s.Key() {
			continue
		}
		if st.State != Active && st.State != Waking && st.State != Sleeping {
			return &Error{Kind: errkind.StaleEpoch, Reason: "the session is " + string(st.State) + "; open it again to wake it"}
		}
		if st.Epoch != s.Epoch() {
			return &Error{Kind: errkind.StaleEpoch, Reason: "the session has slept or moved since; open it again"}
		}
		return nil
	}
	return &Error{Kind: errkind.StaleEpoch, Reason: "the session is not there any more; open it again for a new one"}
}
