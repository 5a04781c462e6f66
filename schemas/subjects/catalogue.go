// Package subjects is the catalogue of everything that Berth says on the bus:
// streams, events with their one owner, RPC methods with their callers, the
// data plane, buckets, object stores and durable consumers. It is data, and the
// single source for stream declarations, bus permissions and the documentation. Its builders
// take typed identifiers and write only subjects that its parsers read back.
// Ordering, redelivery and backpressure are those of the stream named.
package subjects

import (
	"slices"
	"time"
)

// Prefix begins every subject of this version of the contract.
const Prefix = "berth.v1."

// Services are the services that have a bus identity of their own. hostagent
// has one identity per host and is not among them; of egress those are the
// policies, while its gates have one identity per host too.
var Services = []string{"identity", "lifecycle", "scheduler", "credentials", "pool", "egress"}

// Retention says when a stream lets go of a message.
type Retention string

// Retention policies.
const (
	Limits    Retention = "limits"
	WorkQueue Retention = "workqueue"
)

// Stream is one declared JetStream stream.
type Stream struct {
	Name            string
	Subjects        []string
	Retention       Retention
	MaxAge          time.Duration // 0: no limit
	MaxBytes        int64
	MaxMsgSize      int32
	DuplicateWindow time.Duration
	DiscardNew      bool // when full, refuse the new message rather than drop the oldest
	Async           bool // written asynchronously (one replica only); else synced before the ack
	Schedules       bool // message schedules allowed
	MaxPerSubject   int64
	Untrusted       bool // fed by frontends: CloudEvents headers are not required
	Doc             string
}

// Streams of the platform.
var Streams = []Stream{
	{Name: "BERTH_REQUESTS", Subjects: []string{"berth.v1.request.*.*.*"}, Retention: WorkQueue,
		MaxBytes: 256 * MiB, MaxMsgSize: 64 * KiB, DuplicateWindow: 100 * time.Millisecond, DiscardNew: true, Untrusted: true,
		Doc: "The durable door: requests of frontends. Each is handled once it was stored and synced, and removed when its outcome is committed."},
	{Name: "BERTH_SESSIONS", Subjects: []string{"berth.v1.session.*.*.*"}, Retention: Limits, MaxAge: 90 * day,
		MaxBytes: 2 * GiB, MaxMsgSize: 256 * KiB, DuplicateWindow: 2 * time.Minute, Async: true,
		Doc: "What happened to sessions: the durable log that operators tail."},
	{Name: "BERTH_FLEET", Subjects: []string{"berth.v1.host.*.*", "berth.v1.pool.*.*"}, Retention: Limits, MaxAge: 30 * day,
		MaxBytes: 256 * MiB, MaxMsgSize: 256 * KiB, DuplicateWindow: 2 * time.Minute, Async: true,
		Doc: "What happened to hosts and pools."},
	{Name: "BERTH_TIMERS", Subjects: []string{"berth.v1.timer.set.*.*.*", "berth.v1.timer.due.*.*.*"}, Retention: Limits, MaxAge: 120 * day,
		MaxBytes: 256 * MiB, MaxMsgSize: 16 * KiB, DuplicateWindow: 100 * time.Millisecond, Async: true, Schedules: true, MaxPerSubject: 1,
		Doc: "Message schedules, one subject per timer; a due timer appears on the due subject. Rebuilt from scheduler if lost."},
	{Name: "BERTH_AUDIT", Subjects: []string{"berth.v1.audit.*.*.*"}, Retention: Limits, MaxAge: 365 * day,
		MaxBytes: 1 * GiB, MaxMsgSize: 64 * KiB, DuplicateWindow: AuditWindow, Async: true,
		Doc: "Who asked for what, what was admitted, rejected, issued and revoked."},
	{Name: "BERTH_USAGE", Subjects: []string{"berth.v1.usage.*.*"}, Retention: Limits, MaxAge: 90 * day,
		MaxBytes: 512 * MiB, MaxMsgSize: 64 * KiB, DuplicateWindow: 2 * time.Minute, Async: true,
		Doc: "Usage samples of running sessions."},
	{Name: "BERTH_DEAD", Subjects: []string{"berth.v1.dead.*"}, Retention: Limits, MaxAge: 90 * day,
		MaxBytes: 256 * MiB, MaxMsgSize: 1 * MiB, DuplicateWindow: 2 * time.Minute,
		Doc: "What could not be handled, with the reason and the original; berth dead retry has it handled again."},
}

// AuditWindow is how long BERTH_AUDIT remembers the ids of its records: longer
// than a request may be under way, so that a request that is handled again
// after its handler died is recorded once.
const AuditWindow = 15 * time.Minute

// Sizes.
const (
	KiB = 1 << 10
	MiB = 1 << 20
	GiB = 1 << 30
	day = 24 * time.Hour
)

// Event is one kind of message on a stream and the one role that publishes it.
type Event struct {
	Stream  string
	Subject string // pattern: {tenant} and the like stand for one token
	Name    string
	Owner   string // service name, "hostagent", "gate" or "frontend"
	Doc     string
}

// Events of the platform.
var Events = slices.Concat(
	events("BERTH_REQUESTS", "berth.v1.request.{tenant}.{frontend}.", "frontend", []item{
		{"open", "Wants a session: create, resume or join it."},
		{"close", "Ends the caller's use of a session; an ephemeral one is deleted."},
		{"delete", "Wants a session and its data gone."},
	}),
	events("BERTH_SESSIONS", "berth.v1.session.{tenant}.{session}.", "lifecycle", []item{
		{"resume", "A wake was asked for, with its cause."},
		{"idle", "The idle time of the plan has passed."},
		{"pause", "Paused by plan or operator."},
		{"expiring", "Retention ends in three days."},
		{"expire", "Retention has ended; deletion was asked for."},
		{"refused", "A request was refused, with the reason for a person."},
	}),
	events("BERTH_SESSIONS", "berth.v1.session.{tenant}.{session}.", "scheduler", []item{
		{"admitted", "The admission as it was handed over."},
		{"placed", "Host and epoch are committed."},
		{"active", "The session is ready: created, resumed, or restored as of a time; with the time of every step."},
		{"renewed", "An open met an active session."},
		{"asleep", "Compute is gone, the disk is committed."},
		{"displaced", "The host was lost; the epoch was raised."},
		{"failed", "It cannot go on without help."},
		{"paused", "It is paused and refuses opens."},
		{"unplaceable", "No host has room; retried until the deadline."},
		{"deleted", "Key destroyed, grants dead."},
		{"erased", "Every host that ever held the generation has confirmed that nothing of it is left."},
		{"rewound", "The next wake brings back an earlier snapshot."},
	}),
	events("BERTH_SESSIONS", "berth.v1.session.{tenant}.{session}.", "identity", []item{
		{"attached", "An administrator or an operator got a grant for the session, with the reason."},
	}),
	events("BERTH_SESSIONS", "berth.v1.session.{tenant}.{session}.", "hostagent", []item{
		{"quota", "A limit of the session was reached."},
		{"oom", "The session ran out of memory."},
		{"exited", "The sandbox ended by itself."},
		{"restoring", "How much of the disk has come back from the store."},
		{"unsaved", "The disk cannot be saved now; the session goes on and its sleep waits."},
		{"saved", "The disk is saved again, after it could not be."},
	}),
	events("BERTH_SESSIONS", "berth.v1.session.{tenant}.{session}.", "gate", []item{
		{"denied", "Something was not let out, with the rule and whom to ask; like ones are told once a minute with their number."},
		{"allowed", "The session reached a host for the first time since it woke."},
	}),
	events("BERTH_FLEET", "berth.v1.host.{host}.", "scheduler", []item{
		{"joined", "The host may take sessions."},
		{"lost", "The host's lease ran out."},
		{"draining", "The host takes no new sessions, or (reason) takes them again."},
		{"drained", "A draining host has nothing left that is not elsewhere."},
		{"removed", "The host was removed for good; it cannot join again."},
	}),
	events("BERTH_FLEET", "berth.v1.host.{host}.", "hostagent", []item{
		{"facts", "Capacity, tiers and versions of the host itself."},
	}),
	events("BERTH_FLEET", "berth.v1.pool.{template}.", "pool", []item{
		{"filled", "The pool has what it wants to have, after it had not."},
		{"claimed", "A warm sandbox became a session's."},
		{"exhausted", "None is left: opens start cold, or wait."},
		{"unhealthy", "Sandboxes cannot be prepared, with the reason; told again when that changes, also to none."},
	}),
	events("BERTH_TIMERS", "berth.v1.timer.set.{tenant}.{session}.", "lifecycle", []item{
		{"{kind}", "Arms, or re-arms, one timer (a message schedule)."},
	}),
	events("BERTH_TIMERS", "berth.v1.timer.due.{tenant}.{session}.", "server", []item{
		{"{kind}", "The timer is due; written by the bus itself."},
	}),
	events("BERTH_AUDIT", "berth.v1.audit.", "identity", []item{
		{"identity.{tenant}.{session}", "A request was admitted or rejected."},
	}),
	events("BERTH_AUDIT", "berth.v1.audit.", "credentials", []item{
		{"credentials.{tenant}.{session}", "A grant or key was issued, rotated or revoked."},
	}),
	events("BERTH_AUDIT", "berth.v1.audit.", "gate", []item{
		{"egress.{tenant}.{session}", "A connection or a request of a sandbox: let out, denied, reset or failed."},
	}),
	events("BERTH_USAGE", "berth.v1.usage.", "hostagent", []item{
		{"{tenant}.{session}", "One usage sample."},
	}),
	events("BERTH_DEAD", "berth.v1.dead.", "every service", []item{
		{"{service}", "A message that the service could not handle."},
	}),
)

type item struct{ name, doc string }

func events(stream, prefix, owner string, items []item) []Event {
	out := make([]Event, 0, len(items))
	for _, it := range items {
		out = append(out, Event{Stream: stream, Subject: prefix + it.name, Name: it.name, Owner: owner, Doc: it.doc})
	}
	return out
}

// Who is a caller, or a set of callers, of an RPC method.
type Who string

// Callers that are not one named service.
const (
	AnyService  Who = "any service"
	AnyHost     Who = "any host"
	AnyGate     Who = "any gate" // the egress of any host
	OwnHost     Who = "the gate's own host"
	OwnGate     Who = "the host's own gate"
	AnyFrontend Who = "any frontend"
	AnOperator  Who = "operator"
)

// Method is one RPC method: a NATS micro endpoint.
type Method struct {
	Service string // "host" for the methods of every hostagent, "gate" for those of its gate
	Name    string
	Callers []Who
	Doc     string
}

// Methods of the platform.
var Methods = []Method{
	{"identity", "open", []Who{AnyFrontend}, "Opens a session; the direct door. Sealed."},
	{"identity", "close", []Who{AnyFrontend}, "Closes a session. Sealed."},
	{"identity", "delete", []Who{AnyFrontend}, "Deletes a session. Sealed."},
	{"identity", "renew", []Who{AnyFrontend}, "Renews a grant. Sealed."},
	{"identity", "status", []Who{AnyFrontend}, "The caller's own sessions. Sealed."},
	{"identity", "frontends", []Who{AnyFrontend}, "Who acted for the user. Sealed."},
	{"identity", "revoke_frontend", []Who{AnyFrontend}, "Takes from a frontend the right to act for the user. Sealed."},
	{"identity", "admin_sessions", []Who{AnyFrontend}, "A tenant's sessions by handle, for its administrators. Sealed."},
	{"identity", "admin_attach", []Who{AnyFrontend}, "A short grant for a user's session, for the tenant's administrators. Sealed."},
	{"identity", "admin_suspend", []Who{AnyFrontend}, "Shuts out one user, for the tenant's administrators. Sealed."},
	{"identity", "keys", []Who{AnyFrontend, AnOperator}, "Identity's public curve key; no body."},
	{"identity", "tenants", []Who{AnOperator}, "Tenants, with their issuers, logins and suspensions."},
	{"identity", "tenant_put", []Who{AnOperator}, "Adds or changes a tenant."},
	{"identity", "issuer_put", []Who{AnOperator}, "Adds, changes or removes an issuer."},
	{"identity", "issuer_test", []Who{AnOperator}, "Fetches an issuer's keys, and verifies a token."},
	{"identity", "login_put", []Who{AnOperator}, "Adds, changes or removes a bus login."},
	{"identity", "suspend", []Who{AnOperator}, "Shuts out a tenant, a user or a frontend, or lets it in again."},
	{"identity", "operator_attach", []Who{AnOperator}, "A short grant for a user's session, for an operator. Sealed."},
	{"lifecycle", "open", []Who{"identity"}, "Applies the terms and wakes the session."},
	{"lifecycle", "close", []Who{"identity"}, "Ends a use."},
	{"lifecycle", "delete", []Who{"identity"}, "Deletes a session."},
	{"lifecycle", "status", []Who{"identity"}, "State and terms of one principal's sessions."},
	{"lifecycle", "tier_policy", []Who{AnOperator}, "The policy in force that chooses isolation tiers."},
	{"scheduler", "wake", []Who{"lifecycle"}, "Makes a session active."},
	{"scheduler", "sleep", []Who{"lifecycle"}, "Puts a session to sleep if it is still idle."},
	{"scheduler", "delete", []Who{"lifecycle"}, "Deletes a session."},
	{"scheduler", "join", []Who{AnyHost}, "A host presents itself."},
	{"scheduler", "lease", []Who{AnyHost}, "Renews the host's lease."},
	{"scheduler", "commit_manifest", []Who{AnyHost}, "Moves a manifest head by compare-and-swap."},
	{"scheduler", "report", []Who{AnyHost}, "What a host holds and what ended by itself."},
	{"scheduler", "show", []Who{"identity", "lifecycle", "credentials", AnOperator}, "One session."},
	{"scheduler", "list", []Who{"identity", "lifecycle", AnOperator}, "Sessions."},
	{"scheduler", "restore", []Who{AnOperator}, "Has the next wake bring back an earlier snapshot."},
	{"scheduler", "hosts", []Who{"lifecycle", "pool", AnOperator}, "Hosts."},
	{"scheduler", "drain", []Who{AnOperator}, "Hands over what a host has, or ends that."},
	{"scheduler", "remove_host", []Who{AnOperator}, "Takes a host out for good."},
	{"scheduler", "explain", []Who{AnOperator}, "Why a session is where it is, or waits."},
	{"scheduler", "peers", []Who{AnOperator}, "The replicas of the scheduler."},
	{"scheduler", "add_peer", []Who{AnOperator}, "Adds a replica."},
	{"scheduler", "remove_peer", []Who{AnOperator}, "Takes a replica out."},
	{"scheduler", "transfer", []Who{AnOperator}, "Hands leadership to another replica."},
	{"credentials", "mint", []Who{"identity"}, "Mints a grant."},
	{"credentials", "renew", []Who{"identity"}, "Renews a grant."},
	{"credentials", "end_grants", []Who{"identity"}, "Ends the grants of a tenant, a user or a frontend."},
	{"credentials", "revoke", []Who{"scheduler"}, "Ends every grant of a generation and destroys its data key."},
	{"credentials", "datakey", []Who{AnyHost}, "The data key of a session generation, sealed to the host."},
	{"credentials", "egress_ca", []Who{AnyGate}, "A certificate authority for the gate of a host, below the cell's root."},
	{"credentials", "secret_put", []Who{AnOperator}, "Stores a static secret of a tenant. Sealed."},
	{"credentials", "secrets", []Who{AnOperator}, "The secrets of a tenant, without their values."},
	{"credentials", "secret_remove", []Who{AnOperator}, "Destroys a secret."},
	{"credentials", "reveal", []Who{AnyGate}, "A secret of a session's tenant, sealed to the gate of the host that owns its epoch."},
	{"egress", "apply", []Who{AnOperator}, "Replaces the egress policy of one scope."},
	{"egress", "policies", []Who{AnOperator}, "Egress policies."},
	{"egress", "remove", []Who{AnOperator}, "Ends the egress policy of one scope."},
	{"gate", "bind", []Who{OwnHost}, "From now on a link is a session's."},
	{"gate", "unbind", []Who{OwnHost}, "Ends that."},
	{"gate", "sync", []Who{OwnHost}, "All bindings of the host, and how long its lease holds."},
	{"host", "notice", []Who{OwnGate}, "New content of /run/berth/egress.json of a sandbox."},
	{"credentials", "jwks", []Who{AnyService, AnyHost, AnyFrontend, AnOperator}, "Public keys that verify grants."},
	{"pool", "reserve", []Who{"scheduler"}, "Keeps a warm sandbox for one attempt of a wake, for a time."},
	{"pool", "settle", []Who{"scheduler"}, "What became of the attempt."},
	{"pool", "apply", []Who{AnOperator}, "Declares pools."},
	{"pool", "show", []Who{AnOperator}, "How pools stand, and what follows."},
	{"pool", "remove", []Who{AnOperator}, "Ends a pool."},
	{"host", "prepare", []Who{"pool"}, "Makes a warm sandbox."},
	{"host", "retire", []Who{"pool"}, "Removes warm sandboxes that nobody has claimed."},
	{"host", "warm", []Who{"pool"}, "Everything that waits on the host."},
	{"host", "wake", []Who{"scheduler"}, "Makes a session's sandbox run here."},
	{"host", "sleep", []Who{"scheduler"}, "Stops a session's compute unless it is busy."},
	{"host", "delete", []Who{"scheduler"}, "Removes everything of a session."},
	{"host", "activity", []Who{"lifecycle"}, "Busy, and idle since when."},
	{"host", "inventory", []Who{AnOperator}, "Everything made on the host."},
	{"host", "snapshots", []Who{AnOperator}, "The snapshots of a session's disk."},
	{"host", "verify", []Who{AnOperator}, "Compares what is stored of a disk with its hashes, a part at a time."},
	{"host", "grow", []Who{AnOperator}, "Makes the disk of an awake session larger."},
	{"identity", "retry", []Who{AnOperator}, "Handles one dead message again."},
	{"lifecycle", "retry", []Who{AnOperator}, "Handles one dead message again."},
	{"scheduler", "retry", []Who{AnOperator}, "Handles one dead message again."},
	{"credentials", "retry", []Who{AnOperator}, "Handles one dead message again."},
	{"bus", "recreate", []Who{AnyService}, "Has the keeper recreate the caller's own stalled consumer."},
}

// BoxMethod is one subject of the data plane.
type BoxMethod struct{ Name, Doc string }

// Box holds the methods of the data plane, berth.v1.box.<session>.<epoch>.<method>:
// published by frontends, answered by the host that holds the epoch.
var Box = []BoxMethod{
	{"open", "Opens a stream; sealed to the host; carries the grant, the proof and the operation."},
	{"in", "Frames from client to host; the header Berth-Stream names the stream. Frames from host to client go to _INBOX.<client>.box.<stream>."},
}

// Word is a plain message without a body that no stream keeps: who misses it asks again by itself.
type Word struct {
	Subject string // pattern
	Owner   string // service name or "hostagent"
	Heard   string // by whom
	Doc     string
}

// Words of the platform.
var Words = []Word{
	{"berth.v1.serving.{service}", "each service", "services, hosts, operators", "A replica of the service has begun to serve: who waits for an answer of one before asks again."},
	{"berth.v1.serving.host.{host}", "hostagent", "who may call a host", "The agent of the host has begun to serve: who waits for an answer of one before asks again."},
}

// Bucket is one key-value bucket and its one owner.
type Bucket struct {
	Name     string
	Owner    string
	History  uint8
	MaxBytes int64
	Doc      string
}

// Buckets of the platform; no service reads another's.
var Buckets = []Bucket{
	{"BERTH_CREDENTIALS", "credentials", 1, 64 * MiB, "Signing keys, encrypted per record, and revocations."},
	{"BERTH_REGISTRY", "identity", 1, 64 * MiB, "Tenants, issuers, bus logins and suspensions."},
	{"BERTH_DELEGATIONS", "identity", 1, 256 * MiB, "Which frontend acted for whom, and from which a user took that right."},
	{"BERTH_POOLS", "pool", 1, 16 * MiB, "Declared pools, the caps of hosts, the leader's term, and demand by the hour of the week."},
	{"BERTH_EGRESS", "egress", 1, 64 * MiB, "Egress policies, one per scope; gates read it."},
	{"BERTH_SECRETS", "credentials", 1, 64 * MiB, "Static secrets of tenants and the root of egress certificates, encrypted per record; deletes are secure."},
	{"BERTH_DATAKEYS", "credentials", 1, 256 * MiB, "One data key per session generation, encrypted per record; deletes are secure."},
}

// ObjectStore is one JetStream object store. Every host reads and writes it,
// and nobody else. When it is full it refuses new objects; it never drops one.
type ObjectStore struct {
	Name     string
	MaxBytes int64
	Doc      string
}

// ObjectStores of the platform.
var ObjectStores = []ObjectStore{
	{"BERTH_DISKS", 64 * GiB, "Snapshots of sessions' disks where no other store is configured: packs of sealed chunks, and manifests."},
}

// Consumer is one declared durable consumer, named <service>-<purpose>.
type Consumer struct {
	Stream     string
	Durable    string
	Owner      string
	Filters    []string
	AckWait    time.Duration
	MaxDeliver int             // the ceiling: after it a message goes to BERTH_DEAD
	Backoff    []time.Duration // waits before redelivery; the last one repeats
	MaxPending int             // most messages in hand over all replicas
	Memory     bool            // state in memory (work queues only: what was not acked is there again)
	Doc        string
}

// Consumers of the platform.
var Consumers = []Consumer{
	{Stream: "BERTH_REQUESTS", Durable: "identity-requests", Owner: "identity", Filters: []string{"berth.v1.request.*.*.*"},
		AckWait: 30 * time.Second, MaxDeliver: 8, Backoff: retrySoon, MaxPending: 512, Memory: true,
		Doc: "The durable door's requests."},
	{Stream: "BERTH_SESSIONS", Durable: "lifecycle-sessions", Owner: "lifecycle",
		Filters: sessionFilters("active", "renewed", "asleep", "displaced", "failed", "paused", "deleted"),
		AckWait: 30 * time.Second, MaxDeliver: 10, Backoff: retrySoon, MaxPending: 256,
		Doc: "Arms and disarms timers as sessions change."},
	{Stream: "BERTH_TIMERS", Durable: "lifecycle-timers", Owner: "lifecycle", Filters: []string{"berth.v1.timer.due.*.*.*"},
		AckWait: 30 * time.Second, MaxDeliver: 10, Backoff: retrySoon, MaxPending: 256,
		Doc: "Due timers."},
}

var retrySoon = []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second, 10 * time.Second, 30 * time.Second}

func sessionFilters(names ...string) []string {
	out := make([]string, 0, len(names))
	for _, n := range names {
		out = append(out, "berth.v1.session.*.*."+n)
	}
	return out
}

// FindStream returns the stream of a name.
func FindStream(name string) (Stream, bool) {
	i := slices.IndexFunc(Streams, func(s Stream) bool { return s.Name == name })
	if i < 0 {
		return Stream{}, false
	}
	return Streams[i], true
}

// FindConsumer returns the consumer of a durable name.
func FindConsumer(durable string) (Consumer, bool) {
	i := slices.IndexFunc(Consumers, func(c Consumer) bool { return c.Durable == durable })
	if i < 0 {
		return Consumer{}, false
	}
	return Consumers[i], true
}

// FindMethod returns an RPC method.
func FindMethod(service, name string) (Method, bool) {
	for i := range Methods {
		if Methods[i].Service == service && Methods[i].Name == name {
			return Methods[i], true
		}
	}
	return Method{}, false
}

// Allows reports whether c may call the method.
func (m Method) Allows(c Caller) bool {
	for _, w := range m.Callers {
		if w.Includes(c) {
			return true
		}
	}
	return false
}

// own reports whether only a caller of the very host may call the method.
func (m Method) own() bool {
	return slices.Contains(m.Callers, OwnHost) || slices.Contains(m.Callers, OwnGate)
}

// CallersHost is the host token in the subject of a method of a host, as c may write it: its own name
// where only that one is served, else a wildcard.
func (m Method) CallersHost(c Caller) string {
	if m.own() {
		return string(c.Host)
	}
	return "*"
}

// Includes reports whether c is one of w.
func (w Who) Includes(c Caller) bool {
	switch w {
	case AnyService:
		return c.Role == RoleService
	case AnyHost:
		return c.Role == RoleHost
	case AnyGate, OwnGate:
		return c.Role == RoleGate
	case OwnHost:
		return c.Role == RoleHost
	case AnyFrontend:
		return c.Role == RoleFrontend
	case AnOperator:
		return c.Role == RoleOperator
	}
	return c.Role == RoleService && c.Service == string(w)
}
