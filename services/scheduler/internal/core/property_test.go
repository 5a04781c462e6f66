package core

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

// model watches a random run and holds it to the named invariants.
type model struct {
	s       *State
	index   uint64
	now     Time
	log     []Entry
	indexes []uint64
	refs    []Ref // everything that was ever current
	epochs  map[ids.SessionKey]ids.Epoch
	gens    map[ids.SessionKey]ids.Generation
	revs    map[ids.SessionKey]uint64
	ids     map[string]bool
	out     uint64
	disks   map[disk]*diskModel
	owners  map[ids.SessionKey]map[ids.Epoch]ids.Host
	drains  map[ids.Host]bool // under way, and not told to be over
}

// TestInvariants applies random entries, stale ones among them.
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{s: NewState(), now: 1, epochs: map[ids.SessionKey]ids.Epoch{}, gens: map[ids.SessionKey]ids.Generation{},
			revs: map[ids.SessionKey]uint64{}, ids: map[string]bool{}, disks: map[disk]*diskModel{},
			owners: map[ids.SessionKey]map[ids.Epoch]ids.Host{}, drains: map[ids.Host]bool{}}
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			m.step(t)
		}
		m.snapshotEqualsState(t)
		m.replayIsDeterministic(t)
	})
}

func (m *model) step(t *rapid.T) {
	m.now += Time(rapid.Int64Range(0, int64(20*time.Second)).Draw(t, "pass"))
	e := m.draw(t)
	e.Now = m.now
	raw, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if e, err = DecodeEntry(raw); err != nil {
		t.Fatal(err)
	}
	before := m.s.Clone()
	m.index += uint64(rapid.IntRange(1, 3).Draw(t, "gap"))
	m.log, m.indexes = append(m.log, e), append(m.indexes, m.index)
	out := m.s.Apply(m.index, e)
	m.twinAgrees(t, before, e)
	m.transitionsAreDeclared(t, before, e)
	m.staleRefsAreRefused(t, before, e, out)
	m.epochsGrow(t)
	m.headsMoveWithReason(t, before, e)
	m.unsavedFilesStay(t, before, e)
	m.restoresAreSound(t)
	m.machinesKeepTheirDisks(t, before)
	m.unsavedIsNotForgotten(t, before, e)
	m.oneOwnerPerEpoch(t)
	m.leftIsSound(t)
	m.removedIsGone(t)
	m.noteHolders(before, e, out)
	m.drainedIsToldOnce(t)
	m.eventsAreInOrder(t)
	m.nothingIsOvercommitted(t)
	m.noWaiterIsStuck(t)
	m.nothingRestsUndone(t)
	if out.Refused != nil && (e.Delete == nil || e.Delete.Expire == nil) {
		before.Index, before.Format = m.s.Index, m.s.Format
		if !bytes.Equal(dump(t, before), dump(t, m.s)) {
			t.Fatalf("a refusal changed the state: %+v", out.Refused)
		}
	}
	for _, s := range m.s.Sessions() {
		if r := (Ref{s.Key, s.Generation, s.Epoch}); !slices.Contains(m.refs, r) {
			m.refs = append(m.refs, r)
		}
	}
}

var allTiers = []corev1.Tier{corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_MICROVM, corev1.Tier_TIER_KATA}

// machinesKeepTheirDisks: a session whose disk a virtual machine wrote has or
// waits for compute with a kernel of its own only, and that is never forgotten.
func (m *model) machinesKeepTheirDisks(t *rapid.T, before *State) {
	for _, s := range m.s.Sessions() {
		old := before.Session(s.Key)
		if old != nil && old.Generation == s.Generation && OwnKernel(old.VM) && s.VM != old.VM {
			t.Fatalf("it is forgotten that a virtual machine wrote the disk: %+v", s)
		}
		if (s.State == Active || s.State == Sleeping) && OwnKernel(s.Terms.Tier) != OwnKernel(s.VM) {
			t.Fatalf("written in %s, awake in %s", s.VM, s.Terms.Tier)
		}
		if OwnKernel(s.VM) && (s.holds() && s.State == Waking && !OwnKernel(s.Terms.Tier) || s.Wake != nil && !OwnKernel(s.Wake.Terms.Tier)) {
			t.Fatalf("written in %s, wakes in %s: %+v", s.VM, s.Terms.Tier, s.Wake)
		}
	}
}

func (m *model) draw(t *rapid.T) Entry {
	if steps := m.likely(); len(steps) > 0 && rapid.IntRange(0, 2).Draw(t, "likely") == 0 {
		return rapid.SampledFrom(steps).Draw(t, "step")
	}
	key := ids.SessionKey(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key"))
	keys := []ids.SessionKey{key}
	if rapid.Bool().Draw(t, "alias") {
		keys = append(keys, key+"2")
	}
	alive := rapid.SampledFrom([][]ids.Host{nil, {"h1"}, {"h1", "h2"}, {"h2"}, {"h3", "h1"}}).Draw(t, "alive")
	host := ids.Host(rapid.SampledFrom([]string{"h1", "h2", "h3"}).Draw(t, "host"))
	req := ids.RequestID(rapid.SampledFrom([]string{"", "r1", "r2", "r3", "r4", "r5", "r6"}).Draw(t, "request"))
	ref := m.ref(t, key)
	man := ManifestInfo{ID: rapid.SampledFrom([]string{"", "m1", "m2", "m3"}).Draw(t, "manifest"), Parent: rapid.SampledFrom([]string{"", "m1", "m2"}).Draw(t, "parent")}
	if s := m.s.Session(key); s != nil && rapid.Bool().Draw(t, "right parent") {
		man.Parent = s.Manifest
	}
	if s := m.s.Session(key); s != nil && OwnKernel(s.Terms.Tier) {
		man.VMWritten = rapid.Bool().Draw(t, "vm")
	}
	hosts := rapid.SampledFrom([][]ids.Host{nil, {"h1"}, {"h2"}, {"h1", "h2"}, {"h1", "h2", "h3"}}).Draw(t, "hosts")
	switch rapid.IntRange(0, 23).Draw(t, "verb") {
	case 0, 1, 2, 3:
		return Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: rapid.SampledFrom(allTiers).Draw(t, "tier"), Idle: time.Second, Retention: time.Hour,
			Limits: Limits{MemoryBytes: 400}, Ephemeral: key == "c", Plan: "p", MaxAwake: rapid.SampledFrom([]uint32{0, 1, 2}).Draw(t, "max awake")}, Request: req, Keys: keys, Candidates: named(alive...), Alive: alive,
			StoredAt: m.now - Time(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "stored")), Deadline: m.now.Add(30 * time.Second)}}
	case 4:
		return Entry{Place: &Place{Session: key, Generation: ref.Generation, Candidates: named(alive...), Alive: alive}}
	case 5, 6, 7:
		return Entry{Woke: &Woke{Ref: ref, Origin: rapid.SampledFrom([]corev1.Origin{1, 2}).Draw(t, "origin")}}
	case 8:
		return Entry{WakeFailed: &WakeFailed{Ref: ref, Failure: Failure{rapid.SampledFrom([]errkind.Kind{errkind.Internal, errkind.NoCapacity}).Draw(t, "kind"), "x"}, Retry: rapid.Bool().Draw(t, "retry"), VMWritten: rapid.Bool().Draw(t, "vm"), Candidates: named(alive...), Alive: alive}}
	case 9, 10:
		return Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: keys, Request: req, Reason: rapid.SampledFrom([]string{"idle", "close", ReasonPause, ReasonDrain}).Draw(t, "reason"), Force: rapid.Bool().Draw(t, "force")}}
	case 11, 12:
		return Entry{Slept: &Slept{Ref: ref, Manifest: man, Candidates: named(alive...), Alive: alive}}
	case 13:
		return Entry{SleepRefused: &SleepRefused{Ref: ref, BusySince: m.now}}
	case 14:
		return rapid.SampledFrom([]Entry{
			{Delete: &Delete{Tenant: "acme", Keys: keys, Request: req, StoredAt: m.now}},
			{Exited: &Exited{Ref: ref, Host: host, Candidates: named(alive...), Alive: alive}},
			{Stopped: &ref},
		}).Draw(t, "rare")
	case 15:
		return Entry{Removed: &Removed{Ref: ref, Erased: rapid.Bool().Draw(t, "erased"), Hosts: hosts}}
	case 16:
		return Entry{Join: &Host{ID: host, Boot: rapid.SampledFrom([]string{"b1", "b2"}).Draw(t, "boot"), Tiers: rapid.SampledFrom([][]corev1.Tier{allTiers, allTiers[:1], allTiers[1:]}).Draw(t, "tiers"), Capacity: Limits{MemoryBytes: 1000}}}
	case 17, 18:
		return m.drawCommit(t, key, ref, man)
	case 19:
		return m.drawRestore(t, key, ref)
	case 20, 21:
		return m.drawFleet(t, key, ref, host)
	}
	return rapid.SampledFrom([]Entry{
		{HostLost: &HostLost{Host: host, Boot: "b1", Until: m.now.Add(time.Minute)}}, {Tick: &Tick{Elapsed: 5 * time.Minute}},
		{Trim: &Trim{Upto: m.s.OutSeq}}, {Incarnate: &Incarnate{}}, {Drain: &Drain{Host: host, On: rapid.Bool().Draw(t, "on")}},
		{Delete: &Delete{Tenant: "acme", Keys: keys, Expire: &Expire{Generation: ref.Generation, Notice: time.Minute, MaxPerHour: 2}}},
	}).Draw(t, "control")
}

// ref is mostly the current one, sometimes one of the past.
func (m *model) ref(t *rapid.T, key ids.SessionKey) Ref {
	if len(m.refs) > 0 && rapid.IntRange(0, 4).Draw(t, "stale") == 0 {
		return rapid.SampledFrom(m.refs).Draw(t, "old ref")
	}
	if s := m.s.Session(key); s != nil {
		return Ref{s.Key, s.Generation, s.Epoch}
	}
	return Ref{Session: key}
}

func stateOf(s *State, k ids.SessionKey) (corev1.State, ids.Generation) {
	if v := s.Session(k); v != nil {
		return v.State, v.Generation
	}
	return Unknown, ids.Generation{}
}

// transitionsAreDeclared: a state changes only along declared transitions of
// the entry's event (an open creates and places in one entry).
func (m *model) transitionsAreDeclared(t *rapid.T, before *State, e Entry) {
	if v := m.s.Violations(); len(v) > 0 {
		t.Fatalf("undeclared: %v", v)
	}
	name := e.Name()
	for _, k := range []ids.SessionKey{"a", "b", "c", "a2", "b2", "c2"} {
		from, _ := stateOf(before, k)
		to, _ := stateOf(m.s, k)
		if from == to || from == Unknown && before.Session(k) == nil && m.s.Session(k) != nil && m.s.Session(k).Key != k {
			continue
		}
		if to == Unknown {
			to = Deleted
		}
		if !reachable(from, to, name, 3) {
			t.Fatalf("%s: %s to %s by %s is not declared", k, StateName(from), StateName(to), name)
		}
	}
}

func reachable(from, to corev1.State, event string, depth int) bool {
	if from == to {
		return true
	}
	if depth == 0 {
		return false
	}
	for _, tr := range Transitions() {
		if slices.Contains(strings.Split(tr.Event, ", "), event) && slices.Contains(tr.From, from) && reachable(tr.Next(from), to, event, depth-1) {
			return true
		}
	}
	return false
}

// staleRefsAreRefused is "one owner": only the current generation and epoch
// can change a session.
func (m *model) staleRefsAreRefused(t *rapid.T, before *State, e Entry, out Outcome) {
	var r *Ref
	switch {
	case e.Woke != nil:
		r = &e.Woke.Ref
	case e.Slept != nil:
		r = &e.Slept.Ref
	case e.Manifest != nil:
		r = &e.Manifest.Ref
	case e.Exited != nil:
		r = &e.Exited.Ref
	case e.SleepRefused != nil:
		r = &e.SleepRefused.Ref
	case e.Save != nil:
		r = &e.Save.Ref
	default:
		return
	}
	s := before.Session(r.Session)
	if out.Refused == nil && (s == nil || s.Generation != r.Generation || s.Epoch != r.Epoch) {
		t.Fatalf("an owner of the past was heard: %+v, session %+v", r, s)
	}
}

func (m *model) epochsGrow(t *rapid.T) {
	for _, s := range m.s.Sessions() {
		if s.Generation.Compare(m.gens[s.Key]) < 0 || s.Epoch.Compare(m.epochs[s.Key]) < 0 && !s.Epoch.IsZero() {
			t.Fatalf("%s went back: generation %s epoch %s", s.Key, s.Generation, s.Epoch)
		}
		m.gens[s.Key] = s.Generation
		if !s.Epoch.IsZero() {
			m.epochs[s.Key] = s.Epoch
		}
		if s.State == Waking && (s.Host == "" || s.Epoch.IsZero() || s.Wake == nil) {
			t.Fatalf("waking without an owner: %+v", s)
		}
		if !s.Fresh() && s.Host == "" && s.Manifest == "" && s.State != Failed && s.State != Deleting {
			t.Fatalf("a disk without a host: %+v", s)
		}
	}
}

func (m *model) eventsAreInOrder(t *rapid.T) {
	for _, e := range m.s.EventsAfter(m.out, 1000) {
		if e.Seq != m.out+1 {
			t.Fatalf("event %d after %d", e.Seq, m.out)
		}
		m.out = e.Seq
		if m.ids[e.ID] {
			t.Fatalf("event id %s twice", e.ID)
		}
		m.ids[e.ID] = true
		if e.Session == "" {
			continue
		}
		if e.Kind == WasErased {
			m.erasedIsTrue(t, e)
			continue
		}
		last := m.revs[e.Session]
		if e.Revision != last+1 && !(e.Revision == 1 && last > 0 && m.s.LeaderTime > TombstoneTTL) {
			t.Fatalf("%s: revision %d after %d", e.Session, e.Revision, last)
		}
		m.revs[e.Session] = e.Revision
		if e.Kind == WasDeleted { // the next one is kept free
			m.revs[e.Session]++
			m.disk(e.Session, e.Generation).free = e.Revision + 1
		}
	}
	m.out = m.s.OutSeq
}

func (m *model) nothingIsOvercommitted(t *rapid.T) {
	want, awake := map[ids.Host]*Usage{}, 0
	at := func(h ids.Host) *Usage {
		if want[h] == nil {
			want[h] = &Usage{}
		}
		return want[h]
	}
	for _, s := range m.s.Sessions() {
		if s.Host != "" {
			at(s.Host).Sessions++
		}
		if s.Newest != "" {
			at(s.Newest).Unsaved++
		}
		if s.holds() {
			at(s.Host).Held++
			at(s.Host).MemoryBytes += s.Terms.Limits.MemoryBytes
			if !m.s.lost(s.Host) {
				awake++
			}
		}
		for _, l := range s.Left {
			at(l.Host).Held++
			at(l.Host).MemoryBytes += l.Limits.MemoryBytes
		}
	}
	for _, h := range m.s.Hosts() {
		u := m.s.Usage(h.ID)
		if u != *at(h.ID) || u.MemoryBytes > h.Capacity.MemoryBytes {
			t.Fatalf("host %s: %+v accounted, %+v held, %d there", h.ID, u, *at(h.ID), h.Capacity.MemoryBytes)
		}
		delete(want, h.ID)
	}
	if len(want) > 0 || m.s.Awake("acme", "p") != awake {
		t.Fatalf("%d awake, %d accounted; on unknown hosts %v", awake, m.s.Awake("acme", "p"), want)
	}
}

// noWaiterIsStuck: a request that waits has a step that will settle it.
func (m *model) noWaiterIsStuck(t *rapid.T) {
	for _, s := range m.s.Sessions() {
		if len(s.Pending) > 0 && len(Next(s)) == 0 {
			t.Fatalf("requests wait for nothing: %+v", s)
		}
		for _, p := range s.Pending {
			if r := m.s.Record(s.Key, p.Verb, p.ID); r == nil || r.Done {
				t.Fatalf("pending %v has record %+v", p, r)
			}
		}
	}
	pending := 0
	for _, sl := range m.s.recordQ {
		if !sl.r.Done {
			pending++
		}
	}
	waiting := 0
	for _, s := range m.s.Sessions() {
		waiting += len(s.Pending)
	}
	if pending != waiting {
		t.Fatalf("%d requests are pending, %d wait", pending, waiting)
	}
}

func (m *model) snapshotEqualsState(t *rapid.T) {
	first := dump(t, m.s)
	s, err := ReadState(bytes.NewReader(first))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, dump(t, s)) || !sameUsage(s, m.s) {
		t.Fatal("a restored state differs")
	}
	if len(first) > 10 {
		if _, err := ReadState(bytes.NewReader(first[:len(first)-10])); err == nil && bytes.Count(first, []byte("\n")) > 1 {
			t.Fatal("a snapshot that is cut short was accepted")
		}
	}
}

func sameUsage(a, b *State) bool {
	for _, h := range a.Hosts() {
		if a.Usage(h.ID) != b.Usage(h.ID) {
			return false
		}
	}
	return true
}

// replayIsDeterministic also restores in the middle.
func (m *model) replayIsDeterministic(t *rapid.T) {
	want := dump(t, m.s)
	s := NewState()
	cut := rapid.IntRange(0, len(m.log)).Draw(t, "cut")
	for i, e := range m.log {
		if i == cut {
			r, err := ReadState(bytes.NewReader(dump(t, s)))
			if err != nil {
				t.Fatal(err)
			}
			s = r
		}
		s.Apply(m.indexes[i], e)
	}
	if got := dump(t, s); !bytes.Equal(want, got) {
		a, b := bytes.Split(want, []byte("\n")), bytes.Split(got, []byte("\n"))
		for i := range a {
			if i >= len(b) || !bytes.Equal(a[i], b[i]) {
				t.Fatalf("a replay differs:\n%s\n%s", a[i], b[min(i, len(b)-1)])
			}
		}
		t.Fatalf("a replay has more:\n%s", got)
	}
}
