package core

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/script"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

var epoch0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func testPolicy() Policy {
	small := Limits{CPUMillis: 1000, MemoryBytes: 1 << 30, Pids: 512, DiskBytes: 10 << 30}
	return Policy{
		Tiers: []string{"container", "gvisor", "microvm", "wasm"}, Rules: testRules{},
		Templates: map[string]Template{
			"python": {Image: "python", Tier: "gvisor", Limits: small},
			"quick":  {Image: "python", Tier: "container", Limits: small},
			"vm":     {Image: "python", Tier: "microvm", Limits: small},
			"none":   {Image: "none", Tier: "null", Limits: small},
			"tool":   {Image: "tools", Tier: "wasm", Limits: small},
		},
		Plans: map[string]Plan{
			"free":   {Template: "python", Templates: []string{"quick", "vm", "tool"}, Idle: 15 * time.Minute, Retention: 30 * 24 * time.Hour, Limits: Limits{MemoryBytes: 256 << 20}},
			"slow":   {Template: "python", Idle: time.Minute, Retention: 24 * time.Hour, Snapshots: &Snapshots{Every: 10 * time.Minute, KeepAll: 2 * time.Hour}},
			"near":   {Template: "python", Idle: time.Minute, Retention: 24 * time.Hour, Priority: 20, Zones: []string{"eu-1", "eu-2"}, MaxAwake: 3},
			"paused": {Template: "python", Idle: time.Minute, Retention: 24 * time.Hour, Paused: "the invoice of May is open"},
		},
	}
}

// TestDecisions runs testdata/*.txt: an event, a line of dashes, and what is
// decided. Run with -rewrite to accept what the code says now.
func TestDecisions(t *testing.T) {
	script.Run(t, func(t *testing.T) func(string) string {
		return func(line string) string { return decideLine(t, line) }
	})
}

// decideLine reads "verb key=value ..." and prints the commands and the refusal.
func decideLine(t *testing.T, line string) string {
	words := strings.Fields(line)
	args := map[string]string{}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		args[k] = v
	}
	now := epoch0.Add(dur(t, args["now"]))
	cmds, err := Decide(testPolicy(), readEvent(t, words[0], args, now), now)
	var out strings.Builder
	for _, c := range cmds {
		out.WriteString(render(c) + "\n")
	}
	if err != nil {
		fmt.Fprintf(&out, "refused: %v\n", err)
	}
	if out.Len() == 0 {
		out.WriteString("nothing\n")
	}
	return out.String()
}

func readEvent(t *testing.T, verb string, a map[string]string, now time.Time) Event {
	ref := &corev1.SessionRef{Tenant: "acme", Session: "s1", Generation: stamp(t, a["gen"]), Epoch: stamp(t, a["epoch"])}
	rev, _ := strconv.ParseUint(a["rev"], 10, 64)
	timer := &lifecyclev1.Timer{Session: ref, Kind: a["kind"], Revision: rev,
		Idle: durationpb.New(dur(t, a["idle"])), Retention: durationpb.New(dur(t, a["retention"]))}
	record := &schedulerv1.SessionRecord{Session: ref, Revision: rev, Host: "h1",
		State:     corev1.State(corev1.State_value["STATE_"+strings.ToUpper(a["state"])]),
		ChangedAt: timestamppb.New(epoch0.Add(dur(t, a["changed"]))),
		Terms:     &corev1.Terms{Idle: timer.Idle, Retention: timer.Retention}}
	since := epoch0.Add(dur(t, a["since"]))
	switch verb {
	case "open":
		return openEvent(t, a)
	case "active", "renewed", "asleep", "deleted":
		return Scheduled{schedulerEvent(verb, ref, rev, timer, now)}
	case "due":
		if a["now-gen"] != "" {
			record.Session = &corev1.SessionRef{Tenant: "acme", Session: "s1", Generation: stamp(t, a["now-gen"]), Epoch: ref.Epoch}
		}
		if a["now-epoch"] != "" {
			record.Session = &corev1.SessionRef{Tenant: "acme", Session: "s1", Generation: ref.Generation, Epoch: stamp(t, a["now-epoch"])}
		}
		if a["now-rev"] != "" {
			record.Revision, _ = strconv.ParseUint(a["now-rev"], 10, 64)
		}
		if a["state"] == "" {
			record = nil
		}
		return TimerDue{timer, record}
	case "activity":
		return ActivityTold{Timer: timer, Record: record, Busy: a["busy"] == "yes", Since: since}
	case "busy":
		return SleepRefused{timer, since}
	case "told":
		verdict := map[string]Verdict{"granted": Granted, "early": Early, "moot": Moot}[a["verdict"]]
		return ExpireTold{Timer: timer, Record: record, Warn: a["kind"] == TimerWarn, Verdict: verdict}
	case "found":
		return Found{record, map[string]bool{a["timer"]: true}}
	}
	t.Fatalf("event %q is not known to the script", verb)
	return nil
}

func openEvent(t *testing.T, a map[string]string) Event {
	v := &lifecyclev1.Verified{Actor: &corev1.Actor{Tenant: "acme", Subject: "ann"}, RequestId: "r1", Plan: a["plan"],
		Keys: []string{"s1"}, SessionName: "default", StoredAt: timestamppb.New(epoch0),
		TenantFloor: corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(a["floor"])])}
	ask := &identityv1.OpenRequest{Template: a["template"], Risk: &identityv1.RiskFacts{UntrustedCode: a["untrusted"] == "yes",
		CodeAuthor: identityv1.CodeAuthor_CODE_AUTHOR_USER, Tools: identityv1.ToolBreadth_TOOL_BREADTH_FIXED,
		Network: identityv1.NetworkNeed_NETWORK_NEED_NONE, DataClass: "internal"},
		MinTier: corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(a["min"])])}
	if a["wait"] != "" {
		ask.Wait = durationpb.New(dur(t, a["wait"]))
	}
	switch a["risk"] {
	case "none":
		ask.Risk = nil
	case "empty":
		ask.Risk = &identityv1.RiskFacts{}
	}
	return OpenAsked{Verified: v, Ask: ask, Fleet: readFleet(a)}
}

// readFleet makes a listing of hosts of "gvisor,microvm/tcg" (ready) and of those that are away.
func readFleet(a map[string]string) Fleet {
	var hosts []*schedulerv1.HostRecord
	for _, key := range []string{"offers", "away"} {
		for words := range strings.SplitSeq(a[key], ";") {
			if words == "" {
				continue
			}
			h := &schedulerv1.HostRecord{Alive: key == "offers"}
			for w := range strings.SplitSeq(words, ",") {
				name, accel, _ := strings.Cut(w, "/")
				t := corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(name)])
				fact := &corev1.TierFact{Tier: t, Accel: accel}
				if accel == "absent" {
					fact.Absent = "its runtime is\nnot installed"
				} else {
					h.Tiers = append(h.Tiers, t)
				}
				h.TierFacts = append(h.TierFacts, fact)
			}
			hosts = append(hosts, h)
		}
	}
	return FleetOf(hosts)
}

// testRules is a policy of two rules, without an engine.
type testRules struct{}

func (testRules) Classes() []string        { return []string{"public", "internal", "secret"} }
func (testRules) EmulatedCounts() bool     { return false }
func (testRules) Tenant(string) TenantRule { return TenantRule{} }

func (testRules) Ask(f Facts, _ bool, _ []Offer) (Answer, error) {
	switch {
	case f.TemplateTier == "wasm" && f.CodeAuthor == "user":
		return Answer{Rule: "call", Tiers: []corev1.Tier{corev1.Tier_TIER_WASM}, Reason: "one bounded call"}, nil
	case f.CodeAuthor == "user" && f.DataClass != "secret":
		return Answer{Rule: "own", Tiers: []corev1.Tier{corev1.Tier_TIER_CONTAINER}, Reason: "the user's own code"}, nil
	}
	return Answer{Rule: "foreign", Tiers: Riskiest().Tiers, Reason: "the user did not write the code"}, nil
}

func schedulerEvent(verb string, ref *corev1.SessionRef, rev uint64, timer *lifecyclev1.Timer, at time.Time) *schedulerv1.Event {
	ev := &schedulerv1.Event{Session: ref, Revision: rev, At: timestamppb.New(at)}
	switch verb {
	case "active":
		ev.Detail = &schedulerv1.Event_Active{Active: &schedulerv1.Active{Idle: timer.Idle}}
	case "renewed":
		ev.Detail = &schedulerv1.Event_Renewed{Renewed: &schedulerv1.Renewed{Idle: timer.Idle}}
	case "asleep":
		ev.Detail = &schedulerv1.Event_Asleep{Asleep: &schedulerv1.Asleep{Retention: timer.Retention}}
	case "deleted":
		ev.Detail = &schedulerv1.Event_Deleted{Deleted: &schedulerv1.Deleted{}}
	}
	return ev
}

// renderPlacement says what the plan asks of placement, where it asks anything.
func renderPlacement(t *corev1.Terms) string {
	if t.GetPriority() == 0 && len(t.GetZones()) == 0 && t.GetMaxAwake() == 0 {
		return ""
	}
	return fmt.Sprintf(" priority=%d zones=%s awake=%d", t.GetPriority(), strings.Join(t.GetZones(), ","), t.GetMaxAwake())
}

func render(c Command) string {
	switch c := c.(type) {
	case Wake:
		terms := c.Admission.GetTerms()
		l := terms.GetLimits()
		return renderDecision(c.Admission.GetTierDecision()) + fmt.Sprintf("wake template=%s tier=%s (%s) cpu=%d memory=%d pids=%d disk=%d idle=%s snapshots=%s deadline=+%s%s",
			terms.GetTemplate(), TierName(terms.GetTier()), terms.GetTierReason(), l.GetCpuMillis(), l.GetMemoryBytes(), l.GetPids(), l.GetDiskBytes(),
			terms.GetIdle().AsDuration(), renderSnapshots(terms.GetSnapshots()), c.Admission.GetDeadline().AsTime().Sub(epoch0), renderPlacement(terms))
	case Publish:
		return fmt.Sprintf("publish %s %s/%s", c.Name, c.Tenant, c.Session)
	case Arm:
		return fmt.Sprintf("arm %s due=+%s rev=%d", c.Timer.GetKind(), c.Timer.GetDue().AsTime().Sub(epoch0), c.Timer.GetRevision())
	case AskActivity:
		return fmt.Sprintf("ask activity of %s", c.Host)
	case Sleep:
		return fmt.Sprintf("sleep if idle since +%s", c.Since.Sub(epoch0))
	case Expire:
		return fmt.Sprintf("expire rev=%d warn=%t", c.Revision, c.Warn)
	}
	return fmt.Sprintf("%T", c)
}

// renderDecision says which rule decided, and what was left out and passed over.
func renderDecision(d *corev1.TierDecision) string {
	out := fmt.Sprintf("rule %s, wanted %s, floor %s (%s)\n", d.GetRule(), tierWord(d.GetWanted()), tierWord(d.GetFloor()), d.GetFloorFrom())
	if len(d.GetUnknown()) > 0 {
		out += "unknown " + strings.Join(d.GetUnknown(), ", ") + "\n"
	}
	for _, p := range d.GetPassedOver() {
		out += "passed over " + p + "\n"
	}
	return out
}

func renderSnapshots(s *corev1.Snapshots) string {
	return fmt.Sprintf("%s/%s/%s/%s", s.GetEvery().AsDuration(), s.GetKeepAll().AsDuration(), s.GetKeepHourly().AsDuration(), s.GetKeepDaily().AsDuration())
}

func dur(t *testing.T, s string) time.Duration {
	if s == "" {
		return 0
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func stamp(t *testing.T, s string) *corev1.Stamp {
	n, err := strconv.ParseUint(s, 10, 64)
	if s == "" || err != nil {
		n = 1
	}
	return &corev1.Stamp{Incarnation: 1, Index: n}
}
