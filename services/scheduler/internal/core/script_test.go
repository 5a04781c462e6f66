package core

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden output of testdata/*.txt")

// TestScripts runs testdata/*.txt: a command, ----, and its output up to the
// next empty line.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) { runScript(t, f) })
	}
}

func runScript(t *testing.T, path string) {
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := newStage()
	var out strings.Builder
	for _, block := range strings.Split(strings.TrimSpace(string(raw)), "\n\n") {
		in, want, _ := strings.Cut(block, "\n----")
		var got strings.Builder
		for _, l := range strings.Split(in, "\n") {
			if l = strings.TrimSpace(l); l == "" || strings.HasPrefix(l, "#") {
				continue
			}
			got.WriteString(m.do(t, l))
		}
		if got.Len() == 0 {
			fmt.Fprintf(&out, "%s\n\n", in)
			continue
		}
		fmt.Fprintf(&out, "%s\n----\n%s\n", in, got.String())
		if !*rewrite && strings.TrimSpace(want) != strings.TrimSpace(got.String()) {
			t.Errorf("%s\n--- got\n%s--- want\n%s", in, got.String(), want)
		}
	}
	if v := m.s.Violations(); len(v) > 0 {
		t.Errorf("undeclared: %v", v)
	}
	if *rewrite {
		if err := os.WriteFile(path, []byte(strings.TrimSpace(out.String())+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// stage is a state machine under a script.
type stage struct {
	s     *State
	index uint64
	now   time.Duration
	log   [][]byte // every entry, as it is stored
}

func newStage() *stage { return &stage{s: NewState(), now: 1000 * time.Second} }

type args map[string]string

func (a args) dur(k string) time.Duration {
	d, _ := time.ParseDuration(a[k])
	return d
}

func (a args) list(k string) []string {
	if !a.has(k) {
		return nil
	}
	return strings.Split(a[k], ",")
}

func (a args) num(k string) int {
	n, _ := strconv.Atoi(a[k])
	return n
}

func (a args) has(k string) bool { _, ok := a[k]; return ok }

func (a args) hosts(k string) (out []ids.Host) {
	for _, h := range strings.Split(a[k], ",") {
		if h != "" {
			out = append(out, ids.Host(h))
		}
	}
	return out
}

// candidates are those of alive, with reasons against some: alive=h1,h2:sick,
// and with what a pool said: reserved=h2/p1, or cold
func (a args) candidates() (out []Candidate) {
	for _, h := range a.hosts("alive") {
		name, no, _ := strings.Cut(string(h), ":")
		out = append(out, Candidate{Host: ids.Host(name), Refused: words(no)})
	}
	if h, name, ok := strings.Cut(a["reserved"], "/"); ok {
		out = Reserved(out, ids.Host(h), name)
	}
	if a.has("cold") {
		out = Cold(out)
	}
	return out
}

func (a args) keys() (out []ids.SessionKey) {
	for _, k := range strings.Split(a["u"], ",") {
		out = append(out, ids.SessionKey(k))
	}
	return out
}

// at reads a moment as an offset from the script's start.
func (m *stage) at(a args, k string) Time {
	if !a.has(k) {
		return 0
	}
	return Time(1000*time.Second + a.dur(k))
}

func (m *stage) do(t *testing.T, line string) string {
	f := strings.Fields(line)
	a := args{}
	for _, w := range f[1:] {
		k, v, _ := strings.Cut(w, "=")
		a[k] = v
	}
	switch f[0] {
	case "at":
		m.now = 1000*time.Second + a.dur("t")
		return ""
	case "restart":
		return m.restart(t)
	case "show":
		return m.show(a.keys()[0])
	case "record":
		return m.record(a)
	case "rank", "explain":
		return m.plan(f[0], a)
	case "lefts":
		return m.lefts()
	}
	e := m.entry(t, f[0], a)
	e.Now, e.V = Time(m.now), *recordFormat
	if a.has("v") { // as an older version wrote it
		e.V, _ = strconv.Atoi(a["v"])
	}
	raw, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if e, err = DecodeEntry(raw); err != nil {
		t.Fatal(err)
	}
	m.log = append(m.log, raw)
	before := m.s.OutSeq
	m.index++
	out := m.s.Apply(m.index, e)
	return m.trace(out, before, a)
}

// ref is the session as it is, unless the script names a generation or epoch.
func (m *stage) ref(a args) Ref {
	r := Ref{Session: a.keys()[0]}
	if s := m.s.Session(r.Session); s != nil {
		r.Session, r.Generation, r.Epoch = s.Key, s.Generation, s.Epoch
	}
	if a.has("gen") {
		r.Generation, _ = ids.ParseGeneration(a["gen"])
	}
	if a.has("epoch") {
		r.Epoch, _ = ids.ParseEpoch(a["epoch"])
	}
	return r
}

func (m *stage) entry(t *testing.T, verb string, a args) Entry {
	switch verb {
	case "join":
		mem, _ := strconv.Atoi(a["mem"])
		h := &Host{ID: ids.Host(a["host"]), Boot: a["boot"], Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR}, Zone: a["zone"],
			Capacity: Limits{MemoryBytes: uint64(mem) << 20, CPUMillis: 2000, PIDs: uint32(a.num("pids")), DiskBytes: uint64(a.num("disk")) << 20}, CPUPercent: 400,
			PIDsPercent: uint32(a.num("pids_percent")), DiskPercent: uint32(a.num("disk_percent"))}
		if a.has("tier") {
			h.Tiers = nil
			for _, name := range a.list("tier") {
				h.Tiers = append(h.Tiers, tierOf(name))
			}
		}
		return Entry{Join: h}
	case "open":
		return Entry{Open: m.open(a)}
	case "place":
		return Entry{Place: &Place{Session: m.ref(a).Session, Generation: m.ref(a).Generation, Candidates: a.candidates(), Alive: a.hosts("alive"), Why: words(a["why"])}}
	case "woke":
		o := corev1.Origin(corev1.Origin_value["ORIGIN_"+strings.ToUpper(a["origin"])])
		return Entry{Woke: &Woke{Ref: m.ref(a), Origin: o, ImageDigest: a["image"], RestoredAsOf: m.at(a, "asof")}}
	case "wake_failed":
		return Entry{WakeFailed: &WakeFailed{Ref: m.ref(a), Failure: failure(a), Retry: a.has("retry"), VMWritten: a.has("vm"), Candidates: a.candidates(), Alive: a.hosts("alive")}}
	case "sleep":
		c := &SleepCmd{Tenant: tenant(a), Keys: a.keys(), Reason: a["reason"], Request: ids.RequestID(a["req"]), Hash: []byte(a["hash"]), IdleSince: m.at(a, "idle_since"), Force: a.has("force")}
		if a.has("epoch") {
			c.Epoch = m.ref(a).Epoch
		}
		return Entry{Sleep: c}
	case "slept":
		return Entry{Slept: &Slept{Ref: m.ref(a), Manifest: ManifestInfo{ID: a["id"], Parent: a["parent"], TakenAt: m.at(a, "taken")}, Gone: a.has("gone"), Until: m.at(a, "until"), Candidates: a.candidates(), Alive: a.hosts("alive")}}
	case "busy":
		return Entry{SleepRefused: &SleepRefused{Ref: m.ref(a), BusySince: m.at(a, "since")}}
	case "delete":
		return Entry{Delete: &Delete{Tenant: tenant(a), Keys: a.keys(), Request: ids.RequestID(a["req"]), Hash: []byte(a["hash"]), StoredAt: m.at(a, "stored")}}
	case "expire":
		s := m.s.Session(a.keys()...)
		limit := 100
		if a.has("max") {
			limit, _ = strconv.Atoi(a["max"])
		}
		return Entry{Delete: &Delete{Tenant: "acme", Keys: a.keys(), Expire: &Expire{Generation: s.Generation, Revision: s.Revision,
			WarnOnly: a.has("warn"), Notice: 72 * time.Hour, MaxPerHour: limit}}}
	case "removed":
		return Entry{Removed: &Removed{Ref: m.ref(a), Erased: !a.has("away"), Hosts: a.hosts("hosts")}}
	case "erased":
		tomb := m.s.Tombstone(a.keys()...)
		r := Ref{Session: tomb.Key, Generation: tomb.Generation, Epoch: tomb.Epoch}
		if len(tomb.Erase) > 0 { // an earlier format leaves none
			r = tomb.Erase[0].Ref(tomb)
		}
		if a.has("gen") {
			r.Generation, _ = ids.ParseGeneration(a["gen"])
		}
		return Entry{Removed: &Removed{Ref: r, Erased: true, Hosts: a.hosts("hosts")}}
	case "stopped":
		r := m.ref(a)
		return Entry{Stopped: &r}
	case "exited":
		return Entry{Exited: &Exited{Ref: m.ref(a), Host: ids.Host(a["host"]), Reason: cmp.Or(words(a["why"]), "killed from outside"), Candidates: a.candidates(), Alive: a.hosts("alive")}}
	case "manifest":
		return Entry{Manifest: &ManifestCmd{Ref: m.ref(a), Host: ids.Host(a["host"]), Sealed: a["snapshot"] == "", Manifest: ManifestInfo{ID: a["id"], Parent: a["parent"], RestoredFrom: a["from"], ImageDigest: a["image"], TakenAt: m.at(a, "taken"), VMWritten: a.has("vm")}}}
	case "restore":
		r := &Restore{Tenant: tenant(a), Session: a.keys()[0], Generation: m.ref(a).Generation, Head: a["head"], Snapshot: a["snapshot"], AsOf: m.at(a, "asof")}
		if s := m.s.Session(a.keys()[0]); s != nil && !a.has("head") {
			r.Head = s.Manifest
		}
		return Entry{Restore: r}
	case "lost":
		return Entry{HostLost: &HostLost{Host: ids.Host(a["host"]), Boot: a["boot"], Reason: "its lease ran out", Until: m.at(a, "until")}}
	case "drain":
		return Entry{Drain: &Drain{Host: ids.Host(a["host"]), On: !a.has("off"), Deadline: m.at(a, "deadline")}}
	case "move":
		return Entry{Move: &Move{Session: m.ref(a).Session, Generation: m.ref(a).Generation, Host: ids.Host(a["host"])}}
	case "save":
		return Entry{Save: &Save{Ref: m.ref(a), Host: ids.Host(a["host"])}}
	case "dropped":
		return Entry{Dropped: &Dropped{Session: m.ref(a).Session, Generation: m.ref(a).Generation, Host: ids.Host(a["host"])}}
	case "cleared":
		return Entry{Cleared: &Cleared{Ref: m.ref(a), Host: ids.Host(a["host"])}}
	case "remove":
		return Entry{RemoveHost: &RemoveHost{Host: ids.Host(a["host"]), LoseUnsaved: a.has("lose")}}
	case "trim":
		return Entry{Trim: &Trim{Upto: m.s.OutSeq}}
	case "tick":
		return Entry{Tick: &Tick{Elapsed: a.dur("d")}}
	case "incarnate":
		return Entry{Incarnate: &Incarnate{}}
	}
	t.Fatalf("unknown command %q", verb)
	return Entry{}
}

func tierOf(name string) corev1.Tier {
	return corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(name)])
}

// words are written with underscores in a script.
func words(s string) string { return strings.ReplaceAll(s, "_", " ") }

func failure(a args) Failure {
	if a.has("full") {
		return Failure{errkind.NoCapacity, "the pool of disks is full"}
	}
	return Failure{errkind.Unavailable, "the host said no"}
}

func tenant(a args) ids.Tenant {
	if a.has("tenant") {
		return ids.Tenant(a["tenant"])
	}
	return "acme"
}

func (m *stage) open(a args) *Open {
	mem := 256
	if a.has("mem") {
		mem, _ = strconv.Atoi(a["mem"])
	}
	o := &Open{Actor: Actor{Tenant: tenant(a), Issuer: "https://i", Subject: a["u"], Frontend: "web"},
		Terms: Terms{Tier: corev1.Tier_TIER_GVISOR, Limits: Limits{MemoryBytes: uint64(mem) << 20, CPUMillis: 500, PIDs: uint32(a.num("pids")), DiskBytes: uint64(a.num("disk")) << 20},
			Idle: 15 * time.Minute, Retention: 720 * time.Hour, Ephemeral: a.has("ephemeral"), Plan: a["plan"], MaxAwake: uint32(a.num("max_awake")), Zones: a.list("zones")},
		Request: ids.RequestID(a["req"]), Hash: []byte(a["hash"]), StoredAt: Time(m.now), Deadline: Time(m.now + time.Minute),
		Keys: a.keys(), Candidates: a.candidates(), Alive: a.hosts("alive"), Name: "default"}
	if a.has("tier") {
		o.Terms.Tier, o.Terms.TierReason = tierOf(a["tier"]), words(a["because"])
	}
	if a.has("stored") {
		o.StoredAt = m.at(a, "stored")
	}
	if a.has("deadline") {
		o.Deadline = m.at(a, "deadline")
	}
	return o
}

func (m *stage) trace(out Outcome, before uint64, a args) string {
	var b strings.Builder
	switch {
	case out.Refused != nil:
		fmt.Fprintf(&b, "refused %s: %s\n", out.Refused.Kind, out.Refused.Reason)
	case out.Wait:
		b.WriteString("wait\n")
	case out.Deleted:
		b.WriteString("deleted\n")
	case out.BusySince != 0:
		b.WriteString("busy\n")
	}
	if out.Record != nil {
		b.WriteString(recordLine(out.Record))
	}
	for _, e := range m.s.EventsAfter(before, 100) {
		who := string(e.Session)
		if who == "" {
			who = string(e.Host)
		}
		fmt.Fprintf(&b, "  event %s %s.%s", e.ID, who, e.Kind)
		if e.Session != "" {
			fmt.Fprintf(&b, " rev %d %s", e.Revision, StateName(e.State))
		}
		if e.Reason != "" {
			fmt.Fprintf(&b, " (%s)", e.Reason)
		}
		if e.Kind == Admitted && e.Terms.TierReason != "" {
			fmt.Fprintf(&b, " in %s (%s)", tierName(e.Terms), e.Terms.TierReason)
		}
		if e.Handoff {
			b.WriteString(" handoff")
		}
		if e.From != "" {
			fmt.Fprintf(&b, " from %s", e.From)
		}
		if e.Kind == Activated {
			fmt.Fprintf(&b, " %s", strings.ToLower(strings.TrimPrefix(e.Origin.String(), "ORIGIN_")))
		}
		if e.Failure != nil {
			fmt.Fprintf(&b, " [%s: %s]", e.Failure.Kind, e.Failure.Reason)
		}
		if e.Snapshot != "" {
			fmt.Fprintf(&b, " to %s", e.Snapshot)
		}
		if e.RestoredAsOf != 0 {
			fmt.Fprintf(&b, " as of %s", time.Duration(e.RestoredAsOf)-1000*time.Second)
		}
		if e.Kind == WasRewound {
			fmt.Fprintf(&b, ", head %s", e.Manifest)
		}
		if e.Kind == WasErased {
			fmt.Fprintf(&b, " gen %s on %v", e.Generation, e.Hosts)
		}
		b.WriteString("\n")
	}
	for _, r := range out.Rewound {
		fmt.Fprintf(&b, "  goes back: %s\n%s", r.Session, m.show(r.Session))
	}
	for _, r := range out.Lost {
		fmt.Fprintf(&b, "  lost: %s\n%s", r.Session, m.show(r.Session))
	}
	if out.Session != nil && !out.Deleted {
		b.WriteString(m.show(out.Session.Key))
	}
	if b.Len() == 0 {
		b.WriteString("ok\n")
	}
	return b.String()
}

func recordLine(r *Record) string {
	st := "pending"
	if r.Done {
		st = StateName(r.State)
	}
	if r.Failure != nil {
		st = fmt.Sprintf("%s: %s", r.Failure.Kind, r.Failure.Reason)
	}
	return fmt.Sprintf("  request %s %s: %s\n", r.Verb, r.ID, st)
}

func (m *stage) record(a args) string {
	r := m.s.Record(a.keys()[0], Verb(a["verb"]), ids.RequestID(a["req"]))
	if r == nil {
		return "  forgotten\n"
	}
	return recordLine(r)
}

func (m *stage) show(k ids.SessionKey) string {
	s := m.s.Session(k)
	if s == nil {
		return fmt.Sprintf("  %s: none\n", k)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "  %s: %s gen %s epoch %s rev %d", s.Key, StateName(s.State), s.Generation, s.Epoch, s.Revision)
	if s.Host != "" {
		fmt.Fprintf(&b, " on %s", s.Host)
	}
	if s.Manifest != "" {
		fmt.Fprintf(&b, " head %s", s.Manifest)
	}
	if s.Dirty {
		b.WriteString(" dirty")
	}
	if s.Newest != s.Host && s.Newest != "" {
		fmt.Fprintf(&b, " newest on %s", s.Newest)
	}
	if s.Behind {
		b.WriteString(" behind")
	}
	if s.VM != 0 {
		fmt.Fprintf(&b, " written in %s, is in %s", tierName(&Terms{Tier: s.VM}), tierName(s.Terms))
	}
	for _, l := range s.Left {
		fmt.Fprintf(&b, " left %s on %s", l.Epoch, l.Host)
	}
	if s.From != "" {
		fmt.Fprintf(&b, " handed over from %s until %s", s.From, time.Duration(s.Wake.Deadline)-1000*time.Second)
	}
	if s.Restore != nil {
		fmt.Fprintf(&b, " restores %s", s.Restore.Snapshot)
	}
	if len(s.Holders) > 1 {
		fmt.Fprintf(&b, " held by %v", s.Holders)
	}
	if s.Wake != nil {
		fmt.Fprintf(&b, " wake-wanted (try %d)", s.Wake.Attempt)
		if s.Wake.Reservation != "" || s.Wake.Cold {
			fmt.Fprintf(&b, " reservation %q cold %v", s.Wake.Reservation, s.Wake.Cold)
		}
	}
	for _, c := range Next(s) {
		fmt.Fprintf(&b, " -> %s", c.Kind)
	}
	b.WriteString("\n")
	return b.String()
}

// restart writes a snapshot, reads it, and compares.
func (m *stage) restart(t *testing.T) string {
	first := dump(t, m.s)
	s, err := ReadState(bytes.NewReader(first))
	if err != nil {
		t.Fatal(err)
	}
	if second := dump(t, s); !bytes.Equal(first, second) {
		t.Fatalf("a restored state differs:\n%s\n%s", first, second)
	}
	m.s = s
	n := slices.Collect(func(yield func(string) bool) {
		for _, h := range s.Hosts() {
			u := s.Usage(h.ID)
			if !yield(fmt.Sprintf("%s holds %s", h.ID, size(u.MemoryBytes))) {
				return
			}
		}
	})
	return fmt.Sprintf("  restored; %s\n", strings.Join(n, ", "))
}

func dump(t interface{ Fatal(...any) }, s *State) []byte {
	var b bytes.Buffer
	if _, err := s.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
