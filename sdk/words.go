package sdk

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// Tier is an isolation wall.
type Tier string

// The tiers, weakest first.
const (
	Container Tier = "container"
	GVisor    Tier = "gvisor"
	Kata      Tier = "kata"
	MicroVM   Tier = "microvm"
	Wasm      Tier = "wasm"
)

// Verb is one thing that a handle of a session may be good for.
type Verb string

// The verbs: start processes and attach to them; read and change files, and
// have them saved; ports of the session; look at files and at what runs, and
// change nothing.
const (
	VerbExec  Verb = "exec"
	VerbFiles Verb = "files"
	VerbPorts Verb = "ports"
	VerbRead  Verb = "read"
)

// CodeAuthor says who wrote the code that will run.
type CodeAuthor string

// The authors, least risky first: the operator of the platform (the template's
// own programs), the user whose session it is, a model at the user's wish,
// somebody else (a package, a repository, an upload).
const (
	OperatorCode   CodeAuthor = "operator"
	UserCode       CodeAuthor = "user"
	ModelCode      CodeAuthor = "model"
	ThirdPartyCode CodeAuthor = "third_party"
)

// ToolBreadth says what the code is asked to do.
type ToolBreadth string

// One bounded call; programs of the template alone; anything that can be written
// to the disk and run.
const (
	BoundedTools ToolBreadth = "bounded"
	FixedTools   ToolBreadth = "fixed"
	AnyTools     ToolBreadth = "any"
)

// NetworkNeed says how far the code must reach.
type NetworkNeed string

// Nowhere; hosts that a policy names; anywhere.
const (
	NoNetwork    NetworkNeed = "none"
	NamedNetwork NetworkNeed = "named"
	OpenNetwork  NetworkNeed = "open"
)

// words puts the facts that are words into the request.
func (r Risk) words(op string, to *identityv1.RiskFacts) error {
	for _, f := range []struct {
		name, said, prefix string
		values             map[string]int32
		set                func(int32)
	}{
		{"code author", string(r.CodeAuthor), "CODE_AUTHOR_", identityv1.CodeAuthor_value, func(v int32) { to.CodeAuthor = identityv1.CodeAuthor(v) }},
		{"tools", string(r.Tools), "TOOL_BREADTH_", identityv1.ToolBreadth_value, func(v int32) { to.Tools = identityv1.ToolBreadth(v) }},
		{"network", string(r.Network), "NETWORK_NEED_", identityv1.NetworkNeed_value, func(v int32) { to.Network = identityv1.NetworkNeed(v) }},
	} {
		if f.said == "" {
			continue
		}
		v, ok := f.values[f.prefix+upper(f.said)]
		if !ok || v == 0 {
			return invalid(op, "%s %q is not known; it is one of %s", f.name, f.said, spoken(f.values, f.prefix))
		}
		f.set(v)
	}
	return nil
}

// spoken lists the words of an enum in its order, without the one for "not told".
func spoken(values map[string]int32, prefix string) string {
	names := slices.SortedFunc(maps.Keys(values), func(a, b string) int { return cmp.Compare(values[a], values[b]) })
	for i, name := range names {
		names[i] = strings.ToLower(strings.TrimPrefix(name, prefix))
	}
	return strings.Join(names[1:], ", ")
}

// Persistence says what outlives the compute.
type Persistence string

// Durable is the default: the disk is kept while the session sleeps. An
// Ephemeral session is deleted when it is closed or idle.
const (
	Durable   Persistence = "durable"
	Ephemeral Persistence = "ephemeral"
)

// State is where a session stands.
type State string

// The states. Active and Asleep are where a session rests.
const (
	New      State = "new"
	Waking   State = "waking"
	Active   State = "active"
	Sleeping State = "sleeping"
	Asleep   State = "asleep"
	Paused   State = "paused"
	Failed   State = "failed"
	Deleting State = "deleting"
	Deleted  State = "deleted"
)

// Origin says what an open found.
type Origin string

// The origins: a blank disk; the newest disk, whole; an older disk; a session
// that was awake already.
const (
	Created  Origin = "created"
	Resumed  Origin = "resumed"
	Restored Origin = "restored"
	Joined   Origin = "joined"
)

// Limits of a sandbox.
type Limits struct {
	CPUMillis   uint32 // thousandths of a core
	MemoryBytes uint64
	PIDs        uint32
	DiskBytes   uint64 // the quota
}

// Place states what the sandbox is right now. The same text is in the sandbox
// as /run/berth/session.json.
type Place struct {
	Tier        Tier
	Limits      Limits
	Persists    string        // what outlives the compute, in words
	Idle        time.Duration // it falls asleep after so long without activity
	Network     string        // named: what its egress policy names can be reached; none: it has no network
	Template    string
	SessionName string
	ImageDigest string
}

// Step is one timed part of an open.
type Step struct {
	Name  string // dotted, for example "host.disk.attach"
	Start time.Duration
	Took  time.Duration
}

// Timing is the time of every step of an open. The steps may overlap.
type Timing struct {
	Total time.Duration
	Steps []Step
}

// Status is what a user may know of a session of their own.
type Status struct {
	Key         string
	Name        string
	Generation  string
	Epoch       string
	State       State
	Template    string
	Tier        Tier
	Persistence Persistence
	Idle        time.Duration
	Retention   time.Duration
	ChangedAt   time.Time
}

// word turns an enum of the wire into its word: TIER_GVISOR is "gvisor".
func word(name, prefix string) string {
	w := strings.ToLower(strings.TrimPrefix(name, prefix))
	if w == "unspecified" {
		return ""
	}
	return w
}

func tierOf(t corev1.Tier) Tier       { return Tier(word(t.String(), "TIER_")) }
func stateOf(s corev1.State) State    { return State(word(s.String(), "STATE_")) }
func originOf(o corev1.Origin) Origin { return Origin(word(o.String(), "ORIGIN_")) }
func persistenceOf(p corev1.Persistence) Persistence {
	return Persistence(word(p.String(), "PERSISTENCE_"))
}

func limitsOf(l *corev1.Limits) Limits {
	return Limits{l.GetCpuMillis(), l.GetMemoryBytes(), l.GetPids(), l.GetDiskBytes()}
}

func placeOf(p *identityv1.Place) Place {
	return Place{Tier: Tier(p.GetTier()), Limits: limitsOf(p.GetLimits()), Persists: p.GetPersists(),
		Idle: p.GetIdle().AsDuration(), Network: p.GetNetwork(), Template: p.GetTemplate(),
		SessionName: p.GetSessionName(), ImageDigest: p.GetImageDigest()}
}

func timingOf(t *corev1.Timing) Timing {
	out := Timing{Total: t.GetTotal().AsDuration()}
	for _, s := range t.GetSteps() {
		out.Steps = append(out.Steps, Step{s.GetName(), s.GetStart().AsDuration(), s.GetTook().AsDuration()})
	}
	return out
}

func statusOf(s *identityv1.SessionStatus) Status {
	t := s.GetTerms()
	return Status{
		Key: s.GetSession().GetSession(), Name: s.GetSessionName(),
		Generation: stamp(s.GetSession().GetGeneration()), Epoch: stamp(s.GetSession().GetEpoch()),
		State: stateOf(s.GetState()), Template: t.GetTemplate(), Tier: tierOf(t.GetTier()),
		Persistence: persistenceOf(t.GetPersistence()), Idle: t.GetIdle().AsDuration(),
		Retention: t.GetRetention().AsDuration(), ChangedAt: s.GetChangedAt().AsTime(),
	}
}

// OwnCode is the least risk that native code has: the user wrote it, it runs
// programs of the template alone, reaches nowhere, and its data is internal. The
// default policy lets the template's own tier be chosen for it.
func OwnCode() Risk {
	return Risk{CodeAuthor: UserCode, Tools: FixedTools, Network: NoNetwork, DataClass: "internal"}
}
