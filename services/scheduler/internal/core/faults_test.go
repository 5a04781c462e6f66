package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// cell drives a state machine in a test.
type cell struct {
	t     *testing.T
	s     *State
	index uint64
	now   time.Duration
}

func newCell(t *testing.T) *cell {
	c := &cell{t: t, s: NewState(), now: 1000 * time.Hour}
	c.apply(Entry{Join: &Host{ID: "h1", Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR}, Capacity: Limits{MemoryBytes: 1 << 40}}})
	return c
}

func (c *cell) apply(e Entry) Outcome {
	c.t.Helper()
	c.index++
	e.Now = Time(c.now)
	out := c.s.Apply(c.index, e)
	if v := c.s.Violations(); len(v) > 0 {
		c.t.Fatalf("undeclared: %v", v)
	}
	return out
}

func (c *cell) open(tenant ids.Tenant, key ids.SessionKey, req, hash string) Outcome {
	return c.apply(Entry{Open: &Open{Actor: Actor{Tenant: tenant}, Terms: Terms{Tier: corev1.Tier_TIER_GVISOR, Idle: time.Minute, Retention: 720 * time.Hour},
		Request: ids.RequestID(req), Hash: []byte(hash), StoredAt: Time(c.now), Deadline: Time(c.now + time.Minute),
		Keys: []ids.SessionKey{key}, Candidates: named("h1"), Alive: []ids.Host{"h1"}}})
}

func (c *cell) ref(key ids.SessionKey) Ref {
	s := c.s.Session(key)
	return Ref{s.Key, s.Generation, s.Epoch}
}

func (c *cell) woke(key ids.SessionKey, o corev1.Origin) Outcome {
	return c.apply(Entry{Woke: &Woke{Ref: c.ref(key), Origin: o}})
}

func (c *cell) asleep(key ids.SessionKey) {
	c.open("acme", key, "r-"+string(key), "h")
	c.woke(key, corev1.Origin_ORIGIN_CREATED)
	c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{key}, Reason: "close"}})
	c.apply(Entry{Slept: &Slept{Ref: c.ref(key), Manifest: ManifestInfo{ID: "m-" + string(key)}}})
}

func (c *cell) delete(key ids.SessionKey, req string, stored time.Duration) Outcome {
	return c.apply(Entry{Delete: &Delete{Tenant: "acme", Keys: []ids.SessionKey{key}, Request: ids.RequestID(req), StoredAt: Time(stored)}})
}

func (c *cell) refused(out Outcome, kind errkind.Kind) {
	c.t.Helper()
	if out.Refused == nil || out.Refused.Kind != kind {
		c.t.Errorf("outcome %+v (%+v), want a refusal of kind %s", out, out.Refused, kind)
	}
}

func TestRequestIdOfAnotherTenant(t *testing.T) {
	c := newCell(t)
	a := c.open("acme", "sa", "r1", "h")
	b := c.open("umbrella", "sb", "r1", "other") // the same id, used by another tenant
	if a.Refused != nil || b.Refused != nil || a.Session.Generation == b.Session.Generation {
		t.Errorf("requests of two tenants met: %+v %+v", a, b)
	}
	c.refused(c.open("umbrella", "sa", "r2", "h"), errkind.Denied) // nor may it name the other's session
	if s := c.s.Session("sa"); len(s.Pending) != 1 {
		t.Errorf("pending %v", s.Pending)
	}
}

// A replay, whatever its reply subject, gets the stored outcome: no event, no
// new epoch, and nothing in it that opens anything.
func TestReplayWithOtherReplySubject(t *testing.T) {
	c := newCell(t)
	c.open("acme", "sa", "r1", "h")
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	before := dump(t, c.s)
	out := c.open("acme", "sa", "r1", "h")
	if out.Record == nil || !out.Record.Done || out.Events != 0 || len(out.Touched) != 0 {
		t.Errorf("replay: %+v", out)
	}
	c.s.Index-- // the only thing that an applied replay moves
	if after := dump(t, c.s); string(before) != string(after) {
		t.Error("a replay changed the state")
	}
	c.delete("sa", "d1", 0)
	c.apply(Entry{Removed: &Removed{Ref: c.ref("sa"), Erased: true}})
	out = c.open("acme", "sa", "r1", "h") // remembered also after deletion
	if out.Record == nil || !out.Record.Done || c.s.Session("sa") != nil {
		t.Errorf("replay after delete: %+v", out)
	}
}

func TestSecondOpenSameIdOtherBody(t *testing.T) {
	c := newCell(t)
	c.open("acme", "sa", "r1", "body one")
	c.refused(c.open("acme", "sa", "r1", "body two"), errkind.ReplayMismatch)
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	c.refused(c.open("acme", "sa", "r1", "body two"), errkind.ReplayMismatch)
}

func TestRecordsOutliveTenMinutes(t *testing.T) {
	c := newCell(t)
	c.open("acme", "sa", "r1", "h")
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	for range 20 {
		c.apply(Entry{Tick: &Tick{Elapsed: 30 * time.Second}})
	}
	if c.s.Record("sa", VerbOpen, "r1") == nil {
		t.Error("forgotten after ten minutes")
	}
	c.now += 31 * 24 * time.Hour // a wall clock that jumps does not forget
	c.apply(Entry{Tick: &Tick{Elapsed: 30 * time.Second}})
	if c.s.Record("sa", VerbOpen, "r1") == nil {
		t.Error("forgotten because the wall clock jumped")
	}
	for range 12 {
		c.apply(Entry{Tick: &Tick{Elapsed: 30 * time.Second}})
	}
	if c.s.Record("sa", VerbOpen, "r1") != nil {
		t.Error("kept for ever")
	}
}

func TestOpenOlderThanCommittedDelete(t *testing.T) {
	c := newCell(t)
	c.open("acme", "sa", "r1", "h")
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	stored := c.now
	c.now += time.Second
	c.delete("sa", "d1", c.now)
	late := Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: corev1.Tier_TIER_GVISOR}, Request: "r2",
		StoredAt: Time(stored), Deadline: Time(c.now + time.Hour), Keys: []ids.SessionKey{"sa"}, Candidates: named("h1"), Alive: []ids.Host{"h1"}}}
	c.refused(c.apply(late), errkind.Superseded) // while deleting
	c.apply(Entry{Removed: &Removed{Ref: c.ref("sa"), Erased: true}})
	c.refused(c.apply(late), errkind.Superseded) // deleted
	c.now += time.Second
	if out := c.open("acme", "sa", "r3", "h"); out.Refused != nil {
		t.Fatalf("a newer open: %+v", out.Refused)
	}
	c.refused(c.apply(late), errkind.Superseded) // and in the next generation
}

// A delete that waited long takes nothing that was begun after it was asked for.
func TestDeleteOlderThanTheSession(t *testing.T) {
	c := newCell(t)
	asked := c.now
	c.now += time.Minute
	c.open("acme", "sa", "r1", "h")
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	c.refused(c.delete("sa", "d1", asked), errkind.Superseded)
	if s := c.s.Session("sa"); s == nil || s.State != Active {
		t.Errorf("the session is %+v", s)
	}
	// Clocks may differ a little: a delete is then done.
	if out := c.delete("sa", "d2", c.now-10*time.Second); out.Refused != nil || out.Session.State != Deleting {
		t.Errorf("outcome %+v (%+v)", out, out.Refused)
	}
}

func TestClock31DaysAheadDeletesNothing(t *testing.T) {
	c := newCell(t)
	c.asleep("sa")
	expire := func() Outcome {
		s := c.s.Session("sa")
		return c.apply(Entry{Delete: &Delete{Tenant: "acme", Keys: []ids.SessionKey{"sa"},
			Expire: &Expire{Generation: s.Generation, Revision: s.Revision, Notice: 72 * time.Hour, MaxPerHour: 10}}})
	}
	c.refused(expire(), errkind.Conflict) // long before its time
	c.now += 31 * 24 * time.Hour
	for range 100 {
		c.refused(expire(), errkind.Conflict)
		c.apply(Entry{Tick: &Tick{Elapsed: 30 * time.Second}})
	}
	if s := c.s.Session("sa"); s == nil || s.State != Asleep {
		t.Fatal("the session is gone")
	}
	for range 72 * 6 {
		c.apply(Entry{Tick: &Tick{Elapsed: 10 * time.Minute}})
	}
	if out := expire(); out.Refused != nil {
		t.Errorf("after the warning and three days: %+v", out.Refused)
	}
}

func TestExpireNeedsExactlyThisSleep(t *testing.T) {
	c := newCell(t)
	c.asleep("sa")
	s := c.s.Session("sa")
	e := func(gen ids.Generation, rev uint64) Outcome {
		return c.apply(Entry{Delete: &Delete{Tenant: "acme", Keys: []ids.SessionKey{"sa"}, Expire: &Expire{Generation: gen, Revision: rev, Notice: time.Hour, MaxPerHour: 10}}})
	}
	c.now += 40 * 24 * time.Hour
	c.refused(e(ids.Generation{Incarnation: 1, Index: 99}, s.Revision), errkind.StaleEpoch)
	c.refused(e(s.Generation, s.Revision-1), errkind.StaleEpoch)
	c.refused(e(s.Generation, s.Revision), errkind.Conflict) // noted as the warning
	for range 12 {
		c.apply(Entry{Tick: &Tick{Elapsed: 10 * time.Minute}})
	}
	c.open("acme", "sa", "r9", "h") // woken meanwhile
	c.refused(e(s.Generation, s.Revision), errkind.StaleEpoch)
}

func TestMassExpiryStops(t *testing.T) {
	c := newCell(t)
	for i := range 8 {
		c.asleep(ids.SessionKey(fmt.Sprint("s", i)))
	}
	c.now += 40 * 24 * time.Hour
	gone, stopped := 0, 0
	for round := range 2 {
		for i := range 8 {
			k := ids.SessionKey(fmt.Sprint("s", i))
			s := c.s.Session(k)
			out := c.apply(Entry{Delete: &Delete{Tenant: "acme", Keys: []ids.SessionKey{k}, Expire: &Expire{Generation: s.Generation,
				Revision: s.Revision, WarnOnly: round == 0, Notice: time.Hour, MaxPerHour: 3}}})
			switch {
			case round == 0 && out.Refused != nil:
				t.Fatalf("warning: %+v", out.Refused)
			case round == 1 && out.Refused == nil:
				gone++
			case round == 1 && out.Refused.Kind == errkind.Exhausted:
				stopped++
			}
		}
		for range 12 {
			c.apply(Entry{Tick: &Tick{Elapsed: 10 * time.Minute}})
		}
	}
	if gone != 3 || stopped != 5 {
		t.Errorf("%d expired and %d were stopped, want 3 and 5", gone, stopped)
	}
}

func TestFullOutboxRefusesOpensOnly(t *testing.T) {
	c := newCell(t)
	c.open("acme", "sa", "r1", "h")
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	for c.s.OutboxLen() < MaxOutbox {
		c.s.outbox = append(c.s.outbox, &Event{Seq: c.s.OutSeq + 1})
		c.s.OutSeq++
	}
	c.refused(c.open("acme", "sb", "r1", "h"), errkind.Exhausted)
	c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{"sa"}}})
	if out := c.apply(Entry{Slept: &Slept{Ref: c.ref("sa"), Manifest: ManifestInfo{ID: "m"}}}); out.Refused != nil {
		t.Errorf("sleep: %+v", out.Refused)
	}
	if out := c.delete("sa", "d1", 0); out.Refused != nil {
		t.Errorf("delete: %+v", out.Refused)
	}
	c.apply(Entry{Trim: &Trim{Upto: c.s.OutSeq}})
	if out := c.open("acme", "sb", "r2", "h"); out.Refused != nil {
		t.Errorf("open after the bus took them: %+v", out.Refused)
	}
}

// Keys under two versions of the derivation key name one session.
func TestRotatedKeysResolveToOneSession(t *testing.T) {
	c := newCell(t)
	c.open("acme", "old", "r1", "h")
	c.woke("old", corev1.Origin_ORIGIN_CREATED)
	out := c.apply(Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: corev1.Tier_TIER_GVISOR}, Request: "r2",
		StoredAt: Time(c.now), Keys: []ids.SessionKey{"new", "old"}, Candidates: named("h1"), Alive: []ids.Host{"h1"}}})
	if out.Session == nil || out.Session.Key != "old" || c.s.Session("new") != c.s.Session("old") {
		t.Fatalf("two sessions: %+v", out)
	}
	c.delete("new", "d1", 0)
	c.apply(Entry{Removed: &Removed{Ref: c.ref("new"), Erased: true}})
	c.now += time.Second
	if c.s.Session("old", "new") != nil || c.s.Tombstone("new") == nil {
		t.Error("a delete by one key left the session under the other")
	}
}

// A control plane restored from a backup may reuse raft indexes, but never a
// generation, an epoch or the id of an event.
func TestRestoreFromBackupRaisesIncarnation(t *testing.T) {
	c := newCell(t)
	c.asleep("sa")
	backup := c.s.Clone()
	at := c.index
	first := c.open("acme", "sa", "x1", "h").Session.Epoch
	c.s, c.index = backup, at
	c.apply(Entry{Incarnate: &Incarnate{}})
	c.index = at // the same index again
	second := c.open("acme", "sa", "x2", "h").Session.Epoch
	if first == second || second.Compare(first) <= 0 {
		t.Errorf("epoch %s after %s", second, first)
	}
}

// Every request that waits has work under way that will settle it.
func TestStuckWaitersAreTold(t *testing.T) {
	c := newCell(t)
	c.open("acme", "sa", "r1", "h")
	c.apply(Entry{WakeFailed: &WakeFailed{Ref: c.ref("sa"), Failure: Failure{errkind.Internal, "broken"}}})
	r := c.s.Record("sa", VerbOpen, "r1")
	if !r.Done || r.Failure == nil || r.Failure.Kind != errkind.Internal {
		t.Errorf("record %+v", r)
	}
	if s := c.s.Session("sa"); len(s.Pending) != 0 || s.State != Failed {
		t.Errorf("session %+v", s)
	}
}
