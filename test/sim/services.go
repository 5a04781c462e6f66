package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	creds "github.com/berth-dev/berth/services/credentials/simcore"
	life "github.com/berth-dev/berth/services/lifecycle/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// credentials is the real core around a store that keeps keys and revocations.
type credentials struct {
	w       *World
	p       *proc
	keys    map[creds.Generation]bool // durable, as revoked is
	revoked map[creds.Generation]time.Time
	st      creds.State
}

func newCredentials(w *World) *credentials {
	s := &credentials{w: w, keys: map[creds.Generation]bool{}, revoked: map[creds.Generation]time.Time{}}
	s.p = w.proc("credentials", "credentials")
	w.services["credentials"] = []*proc{s.p}
	s.p.begin = func() {
		s.st = creds.NewState(creds.Policy{TTL: 10 * time.Minute, MaxAuth: 12 * time.Hour, Rotate: 24 * time.Hour, Ahead: time.Hour})
		for g, until := range s.revoked {
			s.st.Revoked[g] = until
		}
		s.st, _, _ = creds.Decide(s.st, creds.KeyMade{Key: creds.SigningKey{ID: "k1", From: epoch0.Add(-time.Hour)}}, s.p.wall())
		s.p.serve["revoke"], s.p.serve["datakey"], s.p.serve["mint"] = s.revoke, s.dataKey, s.mint
		w.spawn(s.p, "tick", s.tick)
	}
	return s
}

func generationOf(tenant ids.Tenant, r sched.Ref) creds.Generation {
	return creds.Generation{Tenant: tenant, Session: r.Session, Generation: r.Generation}
}

func (s *credentials) tick(t *task) {
	for {
		t.sleep(nil, 30*time.Second)
		_, _ = s.decide(creds.Tick{})
	}
}

func (s *credentials) decide(ev creds.Event) ([]creds.Command, error) {
	next, cmds, err := creds.Decide(s.st, ev, s.p.wall())
	s.st = next
	for _, c := range cmds {
		if d, ok := c.(creds.DropRevocation); ok {
			delete(s.revoked, d.Generation)
		}
	}
	if r, ok := err.(*creds.Refusal); ok {
		return cmds, fail(r.Kind, r.Reason)
	}
	return cmds, err
}

func (s *credentials) revoke(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	r := req.(revokeReq)
	cmds, err := s.decide(creds.Revoke{Generation: generationOf(r.tenant, r.ref), Reason: "deleted"})
	if err != nil {
		return nil, err
	}
	for _, cmd := range cmds {
		if e, ok := cmd.(creds.EndGeneration); ok {
			s.revoked[e.Generation] = e.Until
			t.wait(c, s.w.between(0, 3*time.Millisecond))
			if c.over() {
				return nil, c.err()
			}
			delete(s.keys, e.Generation)
		}
	}
	s.w.cov.hit("data key destroyed")
	return struct{}{}, nil
}

// record asks scheduler, which alone knows, who owns a session now.
func (s *credentials) record(t *task, c *ctx, tenant ids.Tenant, k ids.SessionKey) (creds.Record, error) {
	reply, err := ask[showReply](t, c, "scheduler", "show", showReq{tenant: tenant, key: k})
	switch {
	case is(err, errkind.NotFound):
		return creds.Record{}, nil
	case err != nil:
		return creds.Record{}, err
	case reply.s == nil:
		tomb := reply.t
		return creds.Record{Found: true, Deleted: true, Session: creds.Session{Generation: creds.Generation{Tenant: tenant, Session: k, Generation: tomb.Generation}, Epoch: tomb.Epoch}}, nil
	}
	x := reply.s
	return creds.Record{Found: true, Host: x.Host, Session: creds.Session{Generation: generationOf(tenant, refOf(x)), Epoch: x.Epoch},
		Awake: x.State == sched.Waking || x.State == sched.Active || x.State == sched.Sleeping, Deleted: x.State == sched.Deleting}, nil
}

func (s *credentials) dataKey(t *task, c *ctx, from ids.Host, req any) (any, error) {
	r := req.(keyReq)
	began := s.w.now
	on := creds.Session{Generation: generationOf(r.tenant, r.ref), Epoch: r.ref.Epoch}
	rec, err := s.record(t, c, r.tenant, r.ref.Session)
	if err != nil {
		return nil, err
	}
	if s.w.opt.Mutation == KeysForAnybody {
		rec.Session, rec.Host, rec.Awake, rec.Deleted, rec.Found = on, from, true, false, true
	}
	if _, err := s.decide(creds.DataKey{Host: from, Session: on, Record: rec}); err != nil {
		s.w.cov.hit("data key refused")
		return nil, err
	}
	if !s.keys[on.Generation] {
		s.keys[on.Generation] = true
		t.wait(c, s.w.between(0, 2*time.Millisecond))
		again, err := s.record(t, c, r.tenant, r.ref.Session)
		if err == nil && again.Ended(on.Generation) {
			err = fail(errkind.Superseded, "the session was deleted")
		}
		if _, dead := s.revoked[on.Generation]; dead && err == nil {
			err = fail(errkind.Superseded, "the session was deleted")
		}
		if err != nil {
			delete(s.keys, on.Generation)
			return nil, err
		}
	}
	s.w.checkKey(from, r.ref, began)
	return struct{}{}, nil
}

func (s *credentials) mint(_ *task, _ *ctx, _ ids.Host, req any) (any, error) {
	r := req.(mintReq)
	cmds, err := s.decide(creds.Mint{Session: creds.Session{Generation: generationOf(r.tenant, r.ref), Epoch: r.ref.Epoch},
		Actor: creds.Actor{Tenant: ids.Tenant(r.actor.GetTenant()), Frontend: ids.Frontend(r.actor.GetFrontend()), Issuer: r.actor.GetIssuer(), Subject: r.actor.GetSubject()},
		Host:  r.host, Confirm: grant.Confirmation{}, Verified: s.p.wall(), ID: "g1"})
	if err != nil {
		return nil, err
	}
	for _, c := range cmds {
		if sign, ok := c.(creds.Sign); ok {
			return sign.Claims, nil
		}
	}
	return nil, fail(errkind.Internal, "nothing was signed")
}

// lifecycle is the real core around timers that the stream keeps.
type lifecycle struct {
	w      *World
	p      *proc
	policy life.Policy
	cursor int // durable: of the consumer of scheduler's events
}

type timerKey struct {
	tenant  string
	session string
	kind    string
}

type timer struct {
	t    *lifecyclev1.Timer
	late int // tries
	at   time.Duration
}

// verifiedReq is what identity hands on.
type verifiedReq struct {
	v   *lifecyclev1.Verified
	ask any
}

func newLifecycle(w *World) *lifecycle {
	s := &lifecycle{w: w}
	s.policy = life.Policy{Tiers: []string{"gvisor"},
		Templates: map[string]life.Template{"base": {Image: "img", Tier: "gvisor", Limits: life.Limits{CPUMillis: 500, MemoryBytes: 1 << 30, Pids: 64, DiskBytes: 1 << 30}}},
		Plans:     map[string]life.Plan{"small": {Template: "base", Idle: time.Duration(8+w.rng.IntN(40)) * time.Second, Retention: time.Duration(40+w.rng.IntN(100)) * time.Second}}}
	s.p = w.proc("lifecycle", "lifecycle")
	w.services["lifecycle"] = []*proc{s.p}
	s.p.begin = func() {
		s.p.serve["open"], s.p.serve["close"], s.p.serve["delete"] = s.open, s.close, s.delete
		w.spawn(s.p, "events", s.consume)
		w.spawn(s.p, "timers", s.due)
		w.spawn(s.p, "rebuild", s.rebuild)
	}
	return s
}

func (s *lifecycle) open(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	r := req.(verifiedReq)
	ev := life.OpenAsked{Verified: r.v}
	ev.Ask, _ = r.ask.(*openAsk)
	cmds, err := life.Decide(s.policy, ev, s.p.wall())
	for _, cmd := range cmds {
		if wake, ok := cmd.(life.Wake); ok {
			return ask[openReply](t, c, "scheduler", "wake", wake.Admission)
		}
	}
	return nil, fail(errkind.Refused, err.Error())
}

func keysOf(keys []string) (out []ids.SessionKey) {
	for _, k := range keys {
		out = append(out, ids.SessionKey(k))
	}
	return out
}

func (s *lifecycle) close(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	v := req.(verifiedReq).v
	return ask[closeReply](t, c, "scheduler", "sleep", &sched.SleepCmd{Tenant: ids.Tenant(v.GetActor().GetTenant()), Keys: keysOf(v.GetKeys()),
		Reason: "close", Request: ids.RequestID(v.GetRequestId()), Hash: v.GetBodyHash()})
}

func (s *lifecycle) delete(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	v := req.(verifiedReq).v
	return ask[closeReply](t, c, "scheduler", "delete", &sched.Delete{Tenant: ids.Tenant(v.GetActor().GetTenant()), Keys: keysOf(v.GetKeys()),
		Request: ids.RequestID(v.GetRequestId()), Hash: v.GetBodyHash(), StoredAt: sched.At(v.GetStoredAt().AsTime())})
}

// consume arms what follows from scheduler's events, each of them at least once.
func (s *lifecycle) consume(t *task) {
	for {
		st := s.w.stream
		if s.cursor >= len(st.events) || !st.p.running() {
			st.more.take()
			t.wait(nil, time.Second, &st.more)
			continue
		}
		e := st.events[s.cursor]
		if e.Session != "" {
			if ev := eventOf(e); ev != nil {
				s.act(t, nil, life.Scheduled{Event: ev}, nil)
			}
		}
		if !s.w.chance(s.w.net.dup) {
			s.cursor++
		}
	}
}

func sessionRef(tenant ids.Tenant, r sched.Ref) *corev1.SessionRef {
	return &corev1.SessionRef{Tenant: string(tenant), Session: string(r.Session), Generation: &corev1.Stamp{Incarnation: r.Generation.Incarnation, Index: r.Generation.Index},
		Epoch: &corev1.Stamp{Incarnation: r.Epoch.Incarnation, Index: r.Epoch.Index}}
}

// eventOf is the message of an event that lifecycle heeds.
func eventOf(e *sched.Event) *schedulerv1.Event {
	out := &schedulerv1.Event{Session: sessionRef(e.Tenant, sched.Ref{Session: e.Session, Generation: e.Generation, Epoch: e.Epoch}),
		Revision: e.Revision, At: timestamppb.New(e.At.Std()), State: e.State}
	switch e.Kind {
	case sched.Activated:
		out.Detail = &schedulerv1.Event_Active{Active: &schedulerv1.Active{Idle: durationpb.New(e.Terms.Idle)}}
	case sched.Renewed:
		out.Detail = &schedulerv1.Event_Renewed{Renewed: &schedulerv1.Renewed{Idle: durationpb.New(e.Terms.Idle)}}
	case sched.FellAsleep:
		out.Detail = &schedulerv1.Event_Asleep{Asleep: &schedulerv1.Asleep{Retention: durationpb.New(e.Terms.Retention)}}
	default:
		return nil
	}
	return out
}

func recordOf(x *sched.Session) *schedulerv1.SessionRecord {
	return &schedulerv1.SessionRecord{Session: sessionRef(x.Tenant, refOf(x)), State: x.State, Host: string(x.Host), Revision: x.Revision,
		ChangedAt: timestamppb.New(x.ChangedAt.Std()),
		Terms:     &corev1.Terms{Idle: durationpb.New(x.Terms.Idle), Retention: durationpb.New(x.Terms.Retention)}}
}

func refFrom(r *corev1.SessionRef) sched.Ref {
	return sched.Ref{Session: ids.SessionKey(r.GetSession()), Generation: grant.GenerationOf(r.GetGeneration()), Epoch: grant.EpochOf(r.GetEpoch())}
}
