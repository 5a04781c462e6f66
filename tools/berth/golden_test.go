package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/lifecycle/tierpolicy"
)

var update = flag.Bool("update", false, "rewrite the goldens")

var at = time.Date(2026, 3, 4, 5, 6, 7, 891_000_000, time.UTC)

const sampleKey = "sabcdefghijklmnopqrstuvwxyz234567abcdefghijklmnopqrst"

func sampleRecord() *schedulerv1.SessionRecord {
	d := func(v time.Duration) *durationpb.Duration { return durationpb.New(v) }
	return &schedulerv1.SessionRecord{
		Restore: "mearlier", Unsaved: true, RestoredAsOf: timestamppb.New(at.Add(-48 * time.Hour)),
		Session: &corev1.SessionRef{Tenant: "acme", Session: sampleKey, Generation: &corev1.Stamp{Incarnation: 1, Index: 12}, Epoch: &corev1.Stamp{Incarnation: 1, Index: 40}},
		State:   corev1.State_STATE_ACTIVE, Revision: 9, Host: "local", Manifest: "m1234", SessionName: "default",
		Terms: &corev1.Terms{Plan: "default", Template: "default", Tier: corev1.Tier_TIER_GVISOR, TierReason: "the default for code that the user wrote",
			Persistence: corev1.Persistence_PERSISTENCE_DURABLE, Idle: d(15 * time.Minute), Retention: d(30 * 24 * time.Hour),
			Snapshots: &corev1.Snapshots{Every: d(time.Minute), KeepAll: d(time.Hour), KeepHourly: d(24 * time.Hour), KeepDaily: d(30 * 24 * time.Hour)},
			Limits:    &corev1.Limits{CpuMillis: 1500, MemoryBytes: 512 << 20, Pids: 256, DiskBytes: 3 << 29}},
		Actor:     &corev1.Actor{Tenant: "acme", Issuer: "http://127.0.0.1:7000/acme", Subject: "ann", Frontend: "cli"},
		CreatedAt: timestamppb.New(at.Add(-time.Hour)), ChangedAt: timestamppb.New(at), Origin: corev1.Origin_ORIGIN_RESUMED,
		LastWake: &corev1.Timing{Total: d(312400 * time.Microsecond), Steps: []*corev1.Step{
			{Name: "scheduler.place", Start: d(200 * time.Microsecond), Took: d(1100 * time.Microsecond)},
			{Name: "host.guest.ready", Start: d(64 * time.Millisecond), Took: d(247 * time.Millisecond)},
			{Name: "host.disk.attach", Start: d(1900 * time.Microsecond), Took: d(18200 * time.Microsecond)}}},
	}
}

func sampleOpen() openOut {
	r := showOutOf(sampleRecord())
	asOf := at.Add(-24 * time.Hour)
	return openOut{Session: r.Session, Name: r.Name, Generation: r.Generation, Epoch: r.Epoch, Host: r.Host, Origin: "restored", RestoredAsOf: &asOf,
		Place:  placeOut{Tier: "gvisor", Template: "default", Limits: r.Limits, Persists: "the whole disk", IdleMS: r.IdleMS, Network: "named", ImageDigest: "sha256:ab"},
		Timing: r.LastWake}
}

func sampleHosts() hostsOut {
	tiers := []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR}
	capacity := &corev1.Limits{CpuMillis: 2000, MemoryBytes: 8 << 30, Pids: 4096, DiskBytes: 100 << 30}
	used := &corev1.Limits{CpuMillis: 3000, MemoryBytes: 3 << 29, Pids: 768, DiskBytes: 9 << 29}
	lease := durationpb.New(7400 * time.Millisecond)
	facts := []*corev1.TierFact{{Tier: corev1.Tier_TIER_CONTAINER, NotHeld: []string{"disk_io"}}, {Tier: corev1.Tier_TIER_GVISOR, NotHeld: []string{"disk_io"}},
		{Tier: corev1.Tier_TIER_KATA, Absent: "it is not among the tiers that this host is to offer"},
		{Tier: corev1.Tier_TIER_MICROVM, Accel: "tcg"}, {Tier: corev1.Tier_TIER_WASM, Absent: "its proof by a real sandbox is not done yet"}}
	vms := append(slices.Clone(tiers), corev1.Tier_TIER_MICROVM)
	return hostsOutOf([]*schedulerv1.HostRecord{
		{Host: "local", Boot: "b1", Zone: "z1", Alive: true, Tiers: vms, TierFacts: facts, Sessions: 12, Active: 3, Capacity: capacity, Used: used, LeaseLeft: lease, Labels: map[string]string{"rack": "a"}},
		{Host: "leaving", Boot: "b2", Zone: "z1", Alive: true, Draining: true, DrainDeadline: timestamppb.New(at.Add(10 * time.Minute)), Tiers: tiers, TierFacts: facts[:2], Sessions: 7, Active: 2, Unsaved: 1, Capacity: capacity, Used: used, LeaseLeft: lease},
		{Host: "left", Boot: "b3", Alive: true, Draining: true, Drained: true, DrainDeadline: timestamppb.New(at), Tiers: tiers, Capacity: capacity, LeaseLeft: lease},
		{Host: "sick", Boot: "b4", Alive: true, Unhealthy: "its pool of disks has 2% free", Tiers: tiers, Capacity: capacity, LeaseLeft: lease},
		{Host: "old", Boot: "b5", Lost: true, Unsaved: 2, Sessions: 2, Capacity: &corev1.Limits{}}})
}

func sampleHost() hostOut { return sampleHosts().Hosts[1] }

func sampleRemoved() removedOut {
	return removedOutOf("old", &schedulerv1.RemoveHostReply{Rewound: []*corev1.SessionRef{{Session: sampleKey}}, Lost: []*corev1.SessionRef{{Session: sampleKey}}})
}

func samplePeers() peersOut {
	return peersOutOf(&schedulerv1.PeersReply{Applied: 1234, Format: 4, NewestFormat: 5, Peers: []*schedulerv1.Peer{
		{Id: "scheduler-1", Addr: "10.77.3.11:7801", Voter: true}, {Id: "scheduler-2", Addr: "10.77.3.12:7801", Voter: true, Leader: true}, {Id: "scheduler-3", Addr: "10.77.3.13:7801", Voter: true}, {Id: "scheduler-4", Addr: "10.77.3.14:7801"}}})
}

// samplePlan is a plan with a host that is taken, one that might be, and two that may not.
func samplePlan() *schedulerv1.Placement {
	return &schedulerv1.Placement{Host: "host-2", Reason: "its image is here", More: 1, Rows: []*schedulerv1.PlacementRow{
		{Host: "host-2", Ranks: []string{"image", "warm", "load"}}, {Host: "host-3", Ranks: []string{"load"}},
		{Host: "host-1", Refused: "its lease ran out"}, {Host: "host-4", Refused: "its zone z9 is none of eu-1, eu-2"}}}
}

// sampleExplain is a session that waits to be handed over.
func sampleExplain() explainOut {
	r := sampleRecord()
	r.State, r.Host, r.NewestHost, r.Restore = corev1.State_STATE_ASLEEP, "host-1", "host-1", ""
	r.HandoffFrom, r.HandoffUntil, r.Waiting = "host-1", timestamppb.New(at.Add(10*time.Minute)), "12 sessions of a higher priority are handed over first"
	r.Terms.Priority, r.Terms.Zones, r.Terms.MaxAwake = 20, []string{"eu-1", "eu-2"}, 5
	before := samplePlan()
	before.Host, before.Reason, before.Rows = "host-1", "its disk is here", []*schedulerv1.PlacementRow{{Host: "host-1", Ranks: []string{"disk", "image"}}, {Host: "host-2", Ranks: []string{"image", "load"}}}
	e := event("placed", &schedulerv1.Event{Session: r.Session, At: timestamppb.New(at.Add(-time.Hour)), State: corev1.State_STATE_WAKING,
		Detail: &schedulerv1.Event_Placed{Placed: &schedulerv1.Placed{Host: "host-1", Reason: "its disk is here", RequestId: "r1", Plan: before}}})
	e.Time = at.Add(-time.Hour)
	asked := event("admitted", &schedulerv1.Event{Session: r.Session, Detail: &schedulerv1.Event_Admitted{Admitted: &schedulerv1.Admitted{RequestId: "r1", TierDecision: sampleDecision()}}})
	asked.Time = e.Time.Add(-1500 * time.Millisecond)
	return explainOutOf(&schedulerv1.ExplainReply{Record: r, Now: samplePlan()}, asked, e, []*schedulerv1.HostRecord{{Host: "host-1", Lost: true}, {Host: "host-2", Alive: true}})
}

func sampleDecision() *corev1.TierDecision {
	return &corev1.TierDecision{Chosen: corev1.Tier_TIER_GVISOR, Floor: corev1.Tier_TIER_CONTAINER, FloorFrom: "the template's tier", Rule: "foreign-code",
		Wanted: corev1.Tier_TIER_GVISOR, Unknown: []string{"request.data_class"},
		PassedOver: []string{"microvm: it is emulated here (tcg), which counts as no stronger than gvisor", "kata: no host offers it (no handler is installed)"},
		Facts:      map[string]string{"request.code_author": "model", "request.data_class": "restricted", "request.tools": "any", "fleet.tiers": "container, gvisor, microvm (tcg)"}}
}

// samplePolicy is a policy with a section of a tenant, and cases of which one fails.
func samplePolicy(t *testing.T) (*tierpolicy.Policy, []tierpolicy.Case) {
	p, err := tierpolicy.Load(filepath.Join("testdata", "policy", "tier.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	cases, err := tierpolicy.LoadCases(filepath.Join("testdata", "policy", "cases.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return p, cases
}

func sampleDead() deadListOut {
	return deadListOut{Messages: []deadOut{{Sequence: 3, Service: "lifecycle", Consumer: "lifecycle-sessions", Reason: "cannot decode\x1b[31m", Subject: "berth.v1.session.acme.x.active",
		Deliveries: 10, Stored: at, Died: at.Add(time.Minute)}}}
}

func sampleList() []*hostv1.Snapshot {
	snap := func(id string, ago time.Duration, allocated, added uint64) *hostv1.Snapshot {
		return &hostv1.Snapshot{Id: id, TakenAt: timestamppb.New(at.Add(-ago)), Epoch: sampleRecord().GetSession().GetEpoch(),
			SizeBytes: 3 << 29, AllocatedBytes: allocated, AddedBytes: added, ImageDigest: "sha256:ab"}
	}
	list := []*hostv1.Snapshot{snap("m1234", 0, 700<<20, 3<<20), snap("mearlier", time.Hour, 690<<20, 1<<20), snap("moldest", 49*time.Hour, 512<<20, 200<<20)}
	list[0].RestoredFrom, list[2].CrashConsistent = "moldest", true
	return list
}

func sampleSnapshots() snapshotsOut { return snapshotsOutOf(sampleRecord(), sampleList()) }

func sampleRestore() restoreOut {
	list := sampleList()
	return restoreOutOf(sampleRecord(), list[0], list[1])
}

func sampleVerify() verifyOut {
	out := verifyOutOf(sampleRecord())
	out.add(&hostv1.VerifyReply{Objects: 30, Bytes: 400 << 20, Snapshots: 3, TotalObjects: 41, Next: "packs/1-40-b",
		Damaged: []*hostv1.Damage{{Object: "packs/1-40-a", Reason: "it is missing", Snapshots: []string{"m1234", "mearlier", "moldest", "mother"}}}})
	out.add(&hostv1.VerifyReply{Objects: 11, Bytes: 100 << 20, Snapshots: 3, TotalObjects: 41})
	return out
}

func sampleArchive() archiveOut {
	return archiveOut{Session: sampleKey, Name: "default", Bytes: 5 << 20, Entries: 120, Skipped: 1, SkippedNames: []string{"var/run/socket: it is neither a file, a directory nor a link"}, Attributes: 2}
}

func sampleEvents() []sdk.Event {
	ref := sampleRecord().GetSession()
	sched := func(name string, state corev1.State, rev uint64, fill func(*schedulerv1.Event)) sdk.Event {
		e := &schedulerv1.Event{Session: ref, Revision: rev, At: timestamppb.New(at), State: state}
		fill(e)
		return event(name, e)
	}
	return []sdk.Event{
		event("resume", &lifecyclev1.Resume{Session: ref, Cause: corev1.Cause_CAUSE_RESUME, RequestId: "r1"}),
		sched("admitted", corev1.State_STATE_WAKING, 1, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Admitted{Admitted: &schedulerv1.Admitted{Actor: sampleRecord().Actor, Terms: sampleRecord().Terms, RequestId: "r1", SessionName: "default"}}
		}),
		sched("placed", corev1.State_STATE_WAKING, 2, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Placed{Placed: &schedulerv1.Placed{Host: "local", Reason: "its disk is here"}}
		}),
		sched("active", corev1.State_STATE_ACTIVE, 3, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Active{Active: &schedulerv1.Active{Host: "local", Origin: corev1.Origin_ORIGIN_RESUMED, Timing: sampleRecord().LastWake, RequestId: "r1"}}
		}),
		event("oom", &hostv1.Event{Session: ref, Host: "local", At: timestamppb.New(at), What: "oom", Reason: "the session ran out of memory (512 MiB)"}),
		event("idle", &lifecyclev1.Idle{Session: ref, Idle: durationpb.New(15 * time.Minute)}),
		sched("asleep", corev1.State_STATE_ASLEEP, 4, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Asleep{Asleep: &schedulerv1.Asleep{Manifest: "m1234", Host: "local", Reason: "idle"}}
		}),
		sched("failed", corev1.State_STATE_FAILED, 5, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Failed{Failed: &schedulerv1.Failed{Failure: &corev1.Failure{Kind: "internal", Reason: "the guest did not answer"}}}
		}),
		event("quota", &hostv1.Event{Session: ref, Host: "local", At: timestamppb.New(at), What: "quota", Reason: "The disk of this session is 93% full: 256 MiB of 4 GiB are left.", DoneBytes: 15 << 28, TotalBytes: 1 << 32}),
		event("restoring", &hostv1.Event{Session: ref, Host: "local", At: timestamppb.New(at), What: "restoring", DoneBytes: 300 << 20, TotalBytes: 1 << 30}),
		event("unsaved", &hostv1.Event{Session: ref, Host: "local", At: timestamppb.New(at), What: "unsaved", Reason: "The files cannot be saved outside their host at the moment."}),
		event("saved", &hostv1.Event{Session: ref, Host: "local", At: timestamppb.New(at), What: "saved", Reason: "The files are saved again."}),
		sched("rewound", corev1.State_STATE_ASLEEP, 6, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Rewound{Rewound: &schedulerv1.Rewound{Snapshot: "mearlier", AsOf: timestamppb.New(at.Add(-time.Hour)), Head: "m1234"}}
		}),
		sched("rewound", corev1.State_STATE_ASLEEP, 7, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Rewound{Rewound: &schedulerv1.Rewound{Head: "m1234"}}
		}),
		sched("erased", corev1.State_STATE_DELETED, 8, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Erased{Erased: &schedulerv1.Erased{Hosts: []string{"local", "other"}}}
		}),
		sched("displaced", corev1.State_STATE_ASLEEP, 9, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Displaced{Displaced: &schedulerv1.Displaced{Host: "host-1", Reason: "its lease ran out", Handoff: true}}
		}),
		sched("placed", corev1.State_STATE_WAKING, 10, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Placed{Placed: &schedulerv1.Placed{Host: "host-2", Reason: "its image is here", Plan: samplePlan()}}
		}),
		sched("active", corev1.State_STATE_ACTIVE, 11, func(e *schedulerv1.Event) {
			e.Detail = &schedulerv1.Event_Active{Active: &schedulerv1.Active{Host: "host-2", FromHost: "host-1", Cause: corev1.Cause_CAUSE_HANDOFF,
				Origin: corev1.Origin_ORIGIN_RESTORED, RestoredAsOf: timestamppb.New(at.Add(-time.Minute)), Timing: sampleRecord().LastWake}}
		}),
		hostEvent("joined", &schedulerv1.HostEvent{Host: "host-1", What: "joined", Capacity: sampleRecord().Terms.Limits}),
		hostEvent("lost", &schedulerv1.HostEvent{Host: "host-1", What: "lost", Reason: "its lease ran out"}),
		hostEvent("draining", &schedulerv1.HostEvent{Host: "host-1", What: "draining"}),
		hostEvent("drained", &schedulerv1.HostEvent{Host: "host-1", What: "drained"}),
		hostEvent("removed", &schedulerv1.HostEvent{Host: "host-1", What: "removed"}),
		poolEvent("filled", "as many wait as are wanted: the minimum"), poolEvent("exhausted", "none is left that this session could have: it starts cold"),
		event("refused", &lifecyclev1.Refused{Tenant: "acme", Session: sampleKey, RequestId: "r2", Failure: &corev1.Failure{Kind: "refused", Reason: "the tenant is paused"}}),
	}
}

func event(name string, body proto.Message) sdk.Event {
	e := sdk.Event{Tenant: "acme", Session: sampleKey, Name: name, Time: at, Body: body}
	if s, ok := body.(*schedulerv1.Event); ok {
		e.Revision, e.State = s.GetRevision(), sdk.State(stateWord(s.GetState()))
	}
	return e
}

func hostEvent(name string, body proto.Message) sdk.Event {
	return sdk.Event{Host: "host-1", Name: name, Time: at, Body: body}
}

// samples are every output, for a person and as JSON.
func samples(t *testing.T) map[string]func(*app) error {
	show := func(v any, human func(*app)) func(*app) error {
		return func(a *app) error { return a.print(v, func() { human(a) }) }
	}
	list := listOut{Sessions: []sessionOut{recordOut(sampleRecord())}}
	copied := copyOut{Files: 2, Dirs: 1, Bytes: 1536, Skipped: []string{"a/socket"}}
	dead := sampleDead()
	snapshots, kept := sampleSnapshots(), sampleArchive()
	restore, verified := sampleRestore(), sampleVerify()
	grown := growOut{sampleKey, "default", 8 << 30, 4 << 30, true}
	one := dead.Messages[0]
	policy, cases := samplePolicy(t)
	tested, shown := policyTestOutOf(policy, cases), policyOutOf(policy)
	linted := policyLintOut{File: policy.Source, Rules: len(policy.Rules()), Tenants: len(policy.Tenants())}
	one.Header, one.Body = map[string][]string{"Ce-Id": {"x"}}, []byte("body\x00")
	said := func(text string) func(*app) { return func(a *app) { _, _ = a.stdout.Write([]byte(text)) } }
	return map[string]func(*app) error{
		"session-open":         show(sampleOpen(), func(a *app) { a.renderOpen(sampleOpen()) }),
		"session-list":         show(list, func(a *app) { a.renderList(list) }),
		"session-show":         show(showOutOf(sampleRecord()), func(a *app) { a.renderShow(showOutOf(sampleRecord())) }),
		"host-list":            show(sampleHosts(), func(a *app) { a.renderHosts(sampleHosts()) }),
		"host-show":            show(sampleHost(), func(a *app) { a.renderHost(sampleHost()) }),
		"host-drain":           show(sampleHost(), said(drainWord(sampleHost())+"\n")),
		"host-remove":          show(sampleRemoved(), func(a *app) { a.renderRemoved(sampleRemoved()) }),
		"pool-show":            show(samplePools(), func(a *app) { a.renderPools(samplePools()) }),
		"pool-show-one":        show(samplePool(), func(a *app) { a.renderPool(samplePool().Pools[0]) }),
		"pool-apply":           show(samplePool(), func(a *app) { a.renderApplied(samplePool(), true) }),
		"pool-remove":          show(poolRemovedOut{"default", true}, func(a *app) { a.renderPoolRemoved(poolRemovedOut{"default", true}) }),
		"scheduler-peers":      show(samplePeers(), func(a *app) { a.renderPeers(samplePeers()) }),
		"key-list":             show(sampleKeys(), func(a *app) { a.renderKeys(sampleKeys()) }),
		"session-explain":      show(sampleExplain(), func(a *app) { a.renderExplain(sampleExplain()) }),
		"policy-tier-test":     show(tested, func(a *app) { a.renderPolicyTest(tested) }),
		"policy-tier-show":     show(shown, func(a *app) { a.renderPolicy(shown) }),
		"policy-tier-lint":     show(linted, func(a *app) { a.renderPolicyLint(linted) }),
		"dead-list":            show(dead, func(a *app) { a.renderDead(dead) }),
		"dead-show":            show(one, func(a *app) { a.renderDeadOne(one) }),
		"dead-retry":           show(retriedOut{3, true}, said("message 3 was handled\n")),
		"session-open-no-wait": show(submittedOut{"rabc"}, said("stored as request rabc\n")),
		"session-close":        show(doneOut{"default", "closed"}, said("session default closed\n")),
		"cp":                   show(copied, said(copied.String()+"\n")),
		"disk-snapshots":       show(snapshots, func(a *app) { a.renderSnapshots(snapshots) }),
		"disk-restore":         show(restore, func(a *app) { a.renderRestore(restore) }),
		"disk-verify":          show(verified, func(a *app) { a.renderVerify(verified) }),
		"disk-grow":            show(grown, func(a *app) { a.renderGrow(grown) }),
		"disk-export":          show(kept, said(kept.String()+"\n")),
		"dev-token":            show(tokenOut{"eyJ...", "acme", "ann", at.Truncate(time.Second)}, said("eyJ...\n")),
		"request-seal": show(sealOut{Subject: "berth.v1.rpc.identity.open.acme.cli", Queue: "berth.v1.request.acme.cli.open",
			Body: json.RawMessage(`{"sealed":"...","sender":"X..."}`), RequestID: "rabc"}, said(`{"sealed":"...","sender":"X..."}`+"\n")),
		"version": show(versionOut{"v0.1.0", "abc", "go1.26", "linux", "amd64"}, said("berth v0.1.0 abc linux/amd64 go1.26\n")),
		"tail": func(a *app) error {
			for _, e := range sampleEvents() {
				if a.json {
					if err := a.eventJSON(e); err != nil {
						return err
					}
					continue
				}
				said(a.eventLine(e) + "\n")(a)
			}
			return nil
		},
	}
}

func TestOutput(t *testing.T) {
	for name, print := range samples(t) {
		for ext, json := range map[string]bool{"txt": false, "json": true} {
			var out bytes.Buffer
			if err := print(&app{stdout: &out, json: json, now: func() time.Time { return at.Add(90 * time.Minute) }}); err != nil {
				t.Fatal(err)
			}
			got := out.Bytes()
			if name == "tail" && json {
				got = compact(t, got)
			}
			golden(t, name+"."+ext, got)
		}
	}
}

// compact undoes the random spaces that protojson puts into its output.
func compact(t *testing.T, lines []byte) []byte {
	var out bytes.Buffer
	for _, l := range bytes.Split(bytes.TrimSpace(lines), []byte("\n")) {
		if err := json.Compact(&out, l); err != nil {
			t.Fatal(err)
		}
		out.WriteByte('\n')
	}
	return out.Bytes()
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, want)
	}
}

// TestDocument holds docs/howto/cli-json.md to what is printed.
func TestDocument(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "howto", "cli-json.md"))
	if err != nil {
		t.Fatal(err)
	}
	for name := range samples(t) {
		want, err := os.ReadFile(filepath.Join("testdata", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		if name == "tail" { // the document shows one line of it
			want = bytes.SplitAfter(want, []byte("\n"))[3]
		}
		if !strings.Contains(string(doc), "```json\n"+string(want)+"```") {
			t.Errorf("docs/howto/cli-json.md does not show the output of %s:\n%s", name, want)
		}
	}
}

func TestColour(t *testing.T) {
	e := sampleEvents()[3]
	if got := (&app{colour: true}).eventLine(e); !strings.Contains(got, "\x1b[32mactive     \x1b[0m") {
		t.Errorf("in colour: %q", got)
	}
	if got := (&app{}).eventLine(e); strings.Contains(got, "\x1b") {
		t.Errorf("without colour: %q", got)
	}
}
