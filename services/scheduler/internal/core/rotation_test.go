package core

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

// under is a principal's key under a version of the derivation key.
func under(version int) ids.SessionKey { return ids.SessionKey(fmt.Sprintf("v%d", version)) }

// identityOf sends the keys under versions lo to hi, that under first before the others.
type identityOf struct{ lo, hi, first int }

func (i identityOf) keys() []ids.SessionKey {
	out := []ids.SessionKey{under(i.first)}
	for v := i.hi; v >= i.lo; v-- {
		if v != i.first {
			out = append(out, under(v))
		}
	}
	return out
}

func (c *cell) openBy(i identityOf, req string) Outcome {
	c.t.Helper()
	return c.apply(Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: corev1.Tier_TIER_GVISOR, Idle: time.Minute, Retention: time.Hour},
		Request: ids.RequestID(req), Hash: []byte("h"), StoredAt: Time(c.now), Deadline: Time(c.now + time.Minute),
		Keys: i.keys(), Candidates: named("h1"), Alive: []ids.Host{"h1"}}})
}

func (c *cell) one(what string, want ids.Generation) {
	c.t.Helper()
	if all := c.s.Sessions(); len(all) != 1 || all[0].Generation != want {
		c.t.Fatalf("%s: %d sessions, %+v; want the one of generation %s", what, len(all), all, want)
	}
}

// TestTwoRotationsForkNoSession: before, between and after two rotations one
// principal's session is found by every identity, whichever versions it has
// seen: awake, asleep, ending and deleted.
func TestTwoRotationsForkNoSession(t *testing.T) {
	first, second, third := identityOf{1, 1, 1}, identityOf{1, 2, 2}, identityOf{1, 3, 3}
	c := newCell(t)
	gen := c.openBy(first, "r1").Session.Generation
	c.woke("v1", corev1.Origin_ORIGIN_CREATED)

	c.openBy(second, "r2") // awake, by one that has seen the rotation
	c.openBy(first, "r3")  // and by one that has not
	c.one("awake after one rotation", gen)
	if out := c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: third.keys(), Reason: "close", Request: "c1", Hash: []byte("h")}}); out.Refused != nil {
		t.Fatalf("close by a version that the session never saw: %+v", out.Refused)
	}
	c.apply(Entry{Slept: &Slept{Ref: c.ref("v1"), Manifest: ManifestInfo{ID: "m"}}})
	c.one("asleep", gen)

	c.openBy(third, "r4") // wakes it
	c.openBy(first, "r5") // joins, and so do the others
	c.openBy(second, "r6")
	c.one("woken by three at once", gen)
	c.woke("v3", corev1.Origin_ORIGIN_RESUMED)
	for _, r := range []ids.RequestID{"r4", "r5", "r6"} {
		if rec := c.s.Record("v1", VerbOpen, r); rec == nil || !rec.Done || rec.Generation != gen {
			t.Errorf("%s was answered with %+v", r, rec)
		}
	}

	stored := Time(c.now)
	c.now += time.Second
	c.apply(Entry{Delete: &Delete{Tenant: "acme", Keys: second.keys(), Request: "d1", Hash: []byte("h")}})
	c.one("being deleted", gen)
	if out := c.openBy(third, "r7"); !out.Wait {
		t.Errorf("an open beside its delete did not wait: %+v", out)
	}
	c.apply(Entry{Removed: &Removed{Ref: c.ref("v1"), Erased: true}})
	if n := len(c.s.Sessions()); n != 0 {
		t.Fatalf("%d sessions after the delete", n)
	}
	for _, i := range []identityOf{first, second, third} {
		late := c.apply(Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: corev1.Tier_TIER_GVISOR}, Request: ids.RequestID(fmt.Sprintf("late%d", i.hi)),
			StoredAt: stored, Keys: i.keys(), Candidates: named("h1")}})
		c.refused(late, errkind.Superseded)
		if out := c.apply(Entry{Delete: &Delete{Tenant: "acme", Keys: i.keys(), Request: "d1", Hash: []byte("h")}}); !out.Deleted || out.Record.Generation != gen {
			t.Errorf("the delete asked for again by versions up to %d: %+v", i.hi, out)
		}
		if out := c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: i.keys(), Reason: "close", Request: "c1", Hash: []byte("h")}}); out.Refused != nil || out.Record == nil || !out.Record.Done {
			t.Errorf("the close asked for again by versions up to %d: %+v", i.hi, out)
		}
	}
}

// TestTwoIdentitiesCreateAtOnce: of two that open what does not exist, each
// with other versions, in either order, the second joins the first.
func TestTwoIdentitiesCreateAtOnce(t *testing.T) {
	behind, ahead, early := identityOf{1, 1, 1}, identityOf{1, 3, 3}, identityOf{1, 2, 1}
	for _, order := range [][]identityOf{{behind, ahead}, {ahead, behind}, {early, ahead}, {ahead, early}, {early, behind}} {
		c := newCell(t)
		gen := c.openBy(order[0], "r1").Session.Generation
		if out := c.openBy(order[1], "r2"); out.Session == nil || out.Session.Generation != gen {
			t.Errorf("%+v: %+v", order, out)
		}
		c.one(fmt.Sprint(order), gen)
	}
}

// readers are identities that see rotations and ends of versions one after the
// other, as files reach them.
type readers struct {
	*cell
	newest, oldest int // versions of the file
	of             []identityOf
	mix            []int // what happens, as often as it stands here
}

// TestRotationForksNothing: any order of rotations, retirements and requests,
// with identities that are behind, leaves one session, and never another
// generation of it without a delete in between.
func TestRotationForksNothing(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		f := &readers{cell: newCell(t), newest: 1, oldest: 1, of: []identityOf{{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}}
		f.mix = rapid.SampledFrom([][]int{{0, 1, 2, 3, 4, 4, 4, 5, 6, 7}, {0, 1, 1, 1, 2, 2, 2, 3, 3, 4}}).Draw(r, "mix")
		var gen ids.Generation
		for n := range rapid.IntRange(5, 80).Draw(r, "steps") {
			deleted := f.step(r, n)
			all := f.s.Sessions()
			if len(all) > 1 {
				r.Fatalf("two sessions of one principal: %+v and %+v", all[0], all[1])
			}
			if len(all) == 1 && !gen.IsZero() && gen != all[0].Generation && !deleted {
				r.Fatalf("generation %s became %s", gen, all[0].Generation)
			}
			gen = ids.Generation{}
			if len(all) == 1 {
				gen = all[0].Generation
			}
		}
	})
}

// step does one thing; it reports whether a session was removed.
func (f *readers) step(r *rapid.T, n int) (removed bool) {
	f.now += time.Second
	i := rapid.IntRange(0, len(f.of)-1).Draw(r, "identity")
	me := &f.of[i]
	s := f.s.Session(me.keys()...)
	switch rapid.SampledFrom(f.mix).Draw(r, "what") {
	case 0: // berth key rotate
		f.newest = min(f.newest+1, 6)
	case 1: // it reads the file
		*me = identityOf{f.oldest, f.newest, min(max(me.first, f.oldest), f.newest)}
	case 2: // the time has come to make new sessions with the version that it knows
		me.first = me.hi
	case 3:
		f.retire()
	case 4:
		f.openBy(*me, fmt.Sprint("r", n))
	case 5:
		f.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: me.keys(), Reason: "close"}})
		if s != nil && s.State == Sleeping {
			f.apply(Entry{Slept: &Slept{Ref: f.ref(s.Key), Manifest: ManifestInfo{ID: fmt.Sprint("m", n), Parent: s.Manifest}}})
		}
	case 6:
		if s != nil && s.State == Waking {
			f.woke(s.Key, corev1.Origin_ORIGIN_CREATED)
		}
	case 7:
		f.apply(Entry{Delete: &Delete{Tenant: "acme", Keys: me.keys(), Request: ids.RequestID(fmt.Sprint("d", n)), StoredAt: Time(f.now)}})
		if s != nil && f.s.Session(s.Key).State == Deleting {
			return f.apply(Entry{Removed: &Removed{Ref: f.ref(s.Key), Erased: true}}).Deleted
		}
	}
	return false
}

// retire is berth key retire, twice: the version ends when everybody makes new
// sessions with a later one and no session's own key is under it.
func (f *readers) retire() {
	if f.oldest == f.newest || slices.ContainsFunc(f.of, func(o identityOf) bool { return o.first <= f.oldest }) {
		return
	}
	if slices.ContainsFunc(f.s.Sessions(), func(s *Session) bool { return s.Key == under(f.oldest) }) {
		return
	}
	f.oldest++
}
