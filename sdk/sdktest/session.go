package sdktest

import (
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

const hostID ids.Host = "h1"

// otherHost takes what hostID lost, and the other way round.
const otherHost ids.Host = "h2"

// session is one session in memory. Its fields are guarded by Server.mu, but
// for what files and execs guard themselves.
type session struct {
	key, tenant, subject, name string
	gen                        ids.Generation
	epoch                      ids.Epoch
	state                      corev1.State
	revision                   uint64
	origin                     corev1.Origin
	terms                      *corev1.Terms
	created, changed           time.Time
	manifest, restore          string
	snapshots                  []snapshot // newest first
	restoredAsOf               *timestamppb.Timestamp
	damaged                    map[string]string // snapshots whose objects are bad, and why
	timing                     *corev1.Timing
	host                       ids.Host
	handoff                    ids.Host // the host that it is being handed over from
	newest                     ids.Host // the lost host that has what is not saved
	files                      *files
	execs                      *execs
}

func (x *session) ref() *corev1.SessionRef {
	return &corev1.SessionRef{Tenant: x.tenant, Session: x.key,
		Generation: &corev1.Stamp{Incarnation: x.gen.Incarnation, Index: x.gen.Index},
		Epoch:      &corev1.Stamp{Incarnation: x.epoch.Incarnation, Index: x.epoch.Index}}
}

func (x *session) killAll(why string) { x.execs.killAll(why) }

func (s *Server) sorted() []*session {
	var out []*session
	for _, x := range s.sessions {
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b *session) int { return strings.Compare(a.key, b.key) })
	return out
}

// openLocked creates, wakes or joins.
func (s *Server) openLocked(who subjects.Caller, u user, name string, env *identityv1.Envelope) (*identityv1.Reply, error) {
	req := &identityv1.OpenRequest{}
	if err := decode(env.GetContentType(), env.GetBody(), req); err != nil {
		return nil, fault{errkind.Invalid, "the body is not an open"}
	}
	verbs, err := verbsOf(env)
	if err != nil {
		return nil, err
	}
	if s.failure != "" {
		return nil, fault{errkind.Refused, s.failure}
	}
	if req.GetTemplate() != "" && req.GetTemplate() != "default" {
		return nil, fault{errkind.Invalid, "there is no template " + req.GetTemplate()}
	}
	if req.GetMinTier() > corev1.Tier_TIER_GVISOR {
		return nil, fault{errkind.Unplaceable, "no host offers the tier that is asked for"}
	}
	key := sessionKey(u, name)
	if req.GetSessionKey() != "" && req.GetSessionKey() != key {
		return nil, fault{errkind.Denied, "the session key is not yours"}
	}
	x := s.sessions[key]
	if x == nil || x.state == corev1.State_STATE_DELETED {
		x = s.create(u, name, key, req)
	}
	s.event(x, "admitted", &schedulerv1.Event{Detail: &schedulerv1.Event_Admitted{Admitted: &schedulerv1.Admitted{
		Actor: actor(u, who), Terms: x.terms, RequestId: env.GetRequestId(), SessionName: name}}})
	origin, err := s.wakeLocked(x, env.GetRequestId())
	if err != nil {
		return nil, err
	}
	o := &identityv1.OpenReply{Session: x.ref(), Origin: origin, Timing: x.timing, Place: x.place(),
		Endpoint: s.endpoint(x)}
	if o.Place.Origin = origin; origin == corev1.Origin_ORIGIN_RESTORED {
		o.RestoredAsOf = x.restoredAsOf
	}
	if err := s.mint(o, who, u, holder{env.GetProofKey(), verbs}); err != nil {
		return nil, err
	}
	return &identityv1.Reply{Outcome: &identityv1.Reply_Open{Open: o}}, nil
}

func actor(u user, who subjects.Caller) *corev1.Actor {
	return &corev1.Actor{Tenant: u.tenant, Issuer: Issuer, Subject: u.subject, Frontend: string(who.Frontend)}
}

func (s *Server) create(u user, name, key string, req *identityv1.OpenRequest) *session {
	p := req.GetPersistence()
	if p == corev1.Persistence_PERSISTENCE_UNSPECIFIED {
		p = corev1.Persistence_PERSISTENCE_DURABLE
	}
	x := &session{host: hostID, key: key, tenant: u.tenant, subject: u.subject, name: name, gen: ids.Generation{Incarnation: 1, Index: s.next()},
		state: corev1.State_STATE_NEW, origin: corev1.Origin_ORIGIN_CREATED, created: time.Now(), files: newFiles(), execs: newExecs(),
		terms: &corev1.Terms{Plan: "free", Template: "default", Tier: corev1.Tier_TIER_GVISOR, Persistence: p,
			Limits: &corev1.Limits{CpuMillis: 1000, MemoryBytes: 512 << 20, Pids: 256, DiskBytes: 1 << 30},
			Idle:   durationpb.New(s.opts.Idle), Retention: durationpb.New(30 * 24 * time.Hour), Image: "sdktest", TierReason: "the default"}}
	if old := s.sessions[key]; old != nil {
		x.revision = old.revision
	}
	s.sessions[key] = x
	return x
}

// wakeLocked makes a session active and says what it found.
func (s *Server) wakeLocked(x *session, requestID string) (corev1.Origin, error) {
	if x.state == corev1.State_STATE_ACTIVE {
		s.event(x, "renewed", &schedulerv1.Event{Detail: &schedulerv1.Event_Renewed{Renewed: &schedulerv1.Renewed{RequestId: requestID, Idle: x.terms.Idle}}})
		return corev1.Origin_ORIGIN_JOINED, nil
	}
	if err := s.placeable(x); err != nil {
		return 0, err
	}
	from := x.handoff
	x.handoff = ""
	x.epoch = ids.Epoch{Incarnation: 1, Index: s.next()}
	x.state = corev1.State_STATE_WAKING
	s.event(x, "placed", &schedulerv1.Event{Detail: &schedulerv1.Event_Placed{Placed: &schedulerv1.Placed{Host: string(x.host), Reason: "its disk is here", RequestId: requestID,
		Plan: s.plan(x)}}})
	x.state, x.timing = corev1.State_STATE_ACTIVE, timing(4*time.Millisecond)
	origin := x.origin
	x.origin, x.restoredAsOf = corev1.Origin_ORIGIN_RESUMED, nil
	asOf := s.rewind(x)
	if asOf != nil {
		origin = corev1.Origin_ORIGIN_RESTORED
	}
	s.event(x, "active", &schedulerv1.Event{Detail: &schedulerv1.Event_Active{Active: &schedulerv1.Active{
		Host: string(x.host), Origin: origin, RestoredAsOf: asOf, Timing: x.timing, Idle: x.terms.Idle, Terms: x.terms, RequestId: requestID,
		Cause: cause(origin, from), FromHost: string(from)}}})
	return origin, nil
}

// cause is why a session was woken.
func cause(origin corev1.Origin, from ids.Host) corev1.Cause {
	switch {
	case from != "":
		return corev1.Cause_CAUSE_HANDOFF
	case origin == corev1.Origin_ORIGIN_CREATED:
		return corev1.Cause_CAUSE_NEW
	}
	return corev1.Cause_CAUSE_RESUME
}

func (x *session) place() *identityv1.Place {
	return &identityv1.Place{Tier: "gvisor", Limits: x.terms.Limits, Persists: "the whole disk", Idle: x.terms.Idle,
		Network: "named", Template: x.terms.Template, SessionName: x.name, ImageDigest: "sha256:" + strings.Repeat("0", 64)}
}

func (s *Server) sleepLocked(x *session, why string) {
	if x.state != corev1.State_STATE_ACTIVE {
		return
	}
	if s.faults.overtake {
		defer s.endStreams(x)
	} else {
		s.endStreams(x)
	}
	if x.terms.Persistence == corev1.Persistence_PERSISTENCE_EPHEMERAL {
		s.gone(x, why, "")
		return
	}
	x.state = corev1.State_STATE_ASLEEP
	s.commit(x, "")
	s.event(x, "asleep", &schedulerv1.Event{Detail: &schedulerv1.Event_Asleep{Asleep: &schedulerv1.Asleep{
		Manifest: x.manifest, Host: string(x.host), Reason: why, Retention: x.terms.Retention}}})
	if s.faults.overtake {
		_ = s.nc.Flush()
	}
}

// endStreams ends what runs in a session that goes to sleep, as its host does.
func (s *Server) endStreams(x *session) {
	for id, st := range s.streams {
		if st.key == x.key {
			st.fail(fault{errkind.StaleEpoch, "the session went to sleep"})
			delete(s.streams, id)
		}
	}
	x.killAll("the session went to sleep")
}

func (s *Server) gone(x *session, why, requestID string) {
	x.state = corev1.State_STATE_DELETED
	x.files, x.snapshots, x.restore = newFiles(), nil, ""
	s.event(x, "deleted", &schedulerv1.Event{Detail: &schedulerv1.Event_Deleted{Deleted: &schedulerv1.Deleted{RequestId: requestID, Reason: why}}})
}

func (s *Server) known(key string) (*session, error) {
	x := s.sessions[key]
	if x == nil || x.state == corev1.State_STATE_DELETED {
		return nil, fault{errkind.NotFound, "there is no such session"}
	}
	return x, nil
}

func (s *Server) closeLocked(key string) (*identityv1.Reply, error) {
	x, err := s.known(key)
	if err != nil {
		return nil, err
	}
	s.sleepLocked(x, "close")
	return &identityv1.Reply{Outcome: &identityv1.Reply_Close{Close: &identityv1.CloseReply{Session: x.ref(), State: x.state}}}, nil
}

func (s *Server) deleteLocked(key, requestID string) (*identityv1.Reply, error) {
	x, err := s.known(key)
	if err != nil {
		return nil, err
	}
	s.sleepLocked(x, "delete")
	if x.state != corev1.State_STATE_DELETED {
		s.gone(x, "delete", requestID)
	}
	return &identityv1.Reply{Outcome: &identityv1.Reply_Delete{Delete: &identityv1.DeleteReply{Session: x.ref(), State: x.state}}}, nil
}

// event publishes one fact of the scheduler.
func (s *Server) event(x *session, name string, e *schedulerv1.Event) {
	x.revision++
	x.changed = time.Now()
	e.Session, e.Revision, e.At, e.State = x.ref(), x.revision, timestamppb.New(x.changed), x.state
	raw, err := proto.Marshal(e)
	if err != nil {
		return
	}
	msg := &nats.Msg{Subject: subjects.Session(ids.Tenant(x.tenant), ids.SessionKey(x.key), name), Data: raw, Header: nats.Header{}}
	id := string(ids.NewRequestID())
	for k, v := range map[string]string{"ce-specversion": "1.0", "ce-id": id, "Nats-Msg-Id": id, "ce-type": "berth.session." + name,
		"ce-source": "/berth/scheduler", "ce-time": x.changed.UTC().Format(time.RFC3339Nano), "ce-datacontenttype": "application/protobuf"} {
		msg.Header[k] = []string{v}
	}
	_ = s.nc.PublishMsg(msg)
}

// endpoint is where the data plane of a session listens.
func (s *Server) endpoint(x *session) *identityv1.Endpoint {
	return &identityv1.Endpoint{Host: string(x.host), HostKey: string(s.hostKey.Public()),
		Subject: strings.TrimSuffix(subjects.BoxSubject(ids.SessionKey(x.key), x.epoch, "open"), ".open")}
}
