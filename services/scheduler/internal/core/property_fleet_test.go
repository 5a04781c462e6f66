package core

import (
	"bytes"
	"slices"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

// drawFleet is what becomes of hosts and of what is on them.
func (m *model) drawFleet(t *rapid.T, key ids.SessionKey, ref Ref, host ids.Host) Entry {
	own := host
	if s := m.s.Session(key); s != nil && rapid.IntRange(0, 3).Draw(t, "own") > 0 {
		if own = s.Host; s.Newest != "" {
			own = s.Newest
		}
	}
	clear := Cleared{Ref: ref, Host: host}
	if lefts := m.s.Lefts(); len(lefts) > 0 {
		p := lefts[0]
		clear = Cleared{Ref: Ref{p.Session.Key, p.Session.Generation, p.Left.Epoch}, Host: p.Left.Host}
	}
	boot := "b1"
	if h := m.s.Host(host); h != nil {
		boot = h.Boot
	}
	return rapid.SampledFrom([]Entry{
		{Move: &Move{Session: key, Generation: ref.Generation, Host: own}},
		{Save: &Save{Ref: ref, Host: own}},
		{Dropped: &Dropped{Session: key, Generation: ref.Generation, Host: host}},
		{Cleared: &clear},
		{Drain: &Drain{Host: host, On: true, Deadline: m.now}},
		{Drain: &Drain{Host: host, On: false}},
		{HostLost: &HostLost{Host: host, Boot: boot}},
		{HostLost: &HostLost{Host: host, Boot: boot, Until: m.now + 1}},
		{Join: &Host{ID: host, Boot: "b3", Tiers: allTiers, Capacity: Limits{MemoryBytes: 1000}}},
		{RemoveHost: &RemoveHost{Host: host, LoseUnsaved: m.index%2 == 0}},
	}).Draw(t, "fleet")
}

// likely are steps that a real leader would take next, which chance seldom
// puts one after the other.
func (m *model) likely() (out []Entry) {
	all := named("h1", "h2", "h3")
	for _, s := range m.s.where(func(*Session) bool { return true }) {
		ref := Ref{s.Key, s.Generation, s.Epoch}
		next := ManifestInfo{ID: "m" + s.Epoch.String(), Parent: s.Manifest}
		switch {
		case s.State == Waking:
			origin := corev1.Origin_ORIGIN_RESUMED
			if s.Fresh() {
				origin = corev1.Origin_ORIGIN_CREATED
			}
			out = append(out, Entry{Woke: &Woke{Ref: ref, Origin: origin}},
				Entry{WakeFailed: &WakeFailed{Ref: ref, Retry: true, Failure: Failure{Kind: 1, Reason: "x"}, Candidates: all}})
		case s.State == Active && s.Manifest == "":
			out = append(out, Entry{Manifest: &ManifestCmd{Ref: ref, Host: s.Host, Manifest: next}})
		case s.State == Sleeping:
			out = append(out, Entry{Slept: &Slept{Ref: ref, Manifest: next, Candidates: all}})
		case s.Wake != nil:
			out = append(out, Entry{Place: &Place{Session: s.Key, Generation: s.Generation, Candidates: all}})
		}
		out = append(out, m.likelyOfHost(s, ref)...)
	}
	return out
}

func (m *model) likelyOfHost(s *Session, ref Ref) (out []Entry) {
	if h := m.s.Host(s.Host); h != nil && !h.Lost && (s.State == Active || h.Draining) {
		out = append(out, Entry{HostLost: &HostLost{Host: h.ID, Boot: h.Boot}}, Entry{Drain: &Drain{Host: h.ID, On: true}},
			Entry{Move: &Move{Session: s.Key, Generation: s.Generation, Host: h.ID}}, Entry{Save: &Save{Ref: ref, Host: h.ID}},
			Entry{Sleep: &SleepCmd{Tenant: s.Tenant, Keys: []ids.SessionKey{s.Key}, Reason: ReasonDrain, IdleSince: m.now}})
	}
	if h := m.s.Host(s.Newest); h != nil && h.Lost {
		back := *h
		back.Boot += "x"
		out = append(out, Entry{Join: &back}, Entry{RemoveHost: &RemoveHost{Host: h.ID, LoseUnsaved: true}})
	} else if h != nil {
		out = append(out, Entry{Save: &Save{Ref: ref, Host: h.ID}}, Entry{HostLost: &HostLost{Host: h.ID, Boot: h.Boot}})
	}
	return out
}

// twinAgrees: a copy of the state that applies the same entry says the same.
func (m *model) twinAgrees(t *rapid.T, before *State, e Entry) {
	twin := before.Clone()
	twin.Apply(m.index, e)
	if !bytes.Equal(dump(t, twin), dump(t, m.s)) {
		t.Fatalf("two states that applied the same differ after %+v", e)
	}
}

// unsavedIsNotForgotten: what is only on a disk stays known to be until a guest
// woke from it or from the store, it was saved, or it was given up; and then
// the wake from the store says so.
func (m *model) unsavedIsNotForgotten(t *rapid.T, before *State, e Entry) {
	for _, s := range m.s.Sessions() {
		if s.Dirty != (s.Newest != "") {
			t.Fatalf("unsaved %v, but newest on %q: %+v", s.Dirty, s.Newest, s)
		}
		old := before.Session(s.Key)
		if old == nil || old.Generation != s.Generation {
			continue
		}
		gaveUp := e.RemoveHost != nil && e.RemoveHost.LoseUnsaved && e.RemoveHost.Host == old.Newest
		if old.Dirty && !s.Dirty && e.Woke == nil && e.Slept == nil && e.Manifest == nil && !gaveUp {
			t.Fatalf("unsaved files were forgotten by %+v: %+v", e, old)
		}
		if e.Woke == nil || old.State != Waking || s.State != Active {
			continue
		}
		if older := old.Behind || old.Dirty && old.Newest != old.Host; older && s.Origin != corev1.Origin_ORIGIN_RESTORED {
			t.Fatalf("woke from an older disk and did not say so: %+v", s)
		}
	}
}

// oneOwnerPerEpoch: an epoch is given to one host, for ever.
func (m *model) oneOwnerPerEpoch(t *rapid.T) {
	for _, s := range m.s.Sessions() {
		if s.Host == "" || s.Epoch.IsZero() {
			continue
		}
		of := m.owners[s.Key]
		if of == nil {
			of = map[ids.Epoch]ids.Host{}
			m.owners[s.Key] = of
		}
		if h, ok := of[s.Epoch]; ok && h != s.Host {
			t.Fatalf("%s: epoch %s is given to %s and %s", s.Key, s.Epoch, h, s.Host)
		}
		of[s.Epoch] = s.Host
		if s.State == Active && m.s.Host(s.Host) == nil {
			t.Fatalf("awake on a host that is not there: %+v", s)
		}
		if s.State == Active && m.s.lost(s.Host) {
			t.Fatalf("awake on a lost host: %+v", s)
		}
	}
}

// leftIsSound: compute of earlier epochs is on other hosts that may be alive.
func (m *model) leftIsSound(t *rapid.T) {
	for _, s := range m.s.Sessions() {
		seen := map[ids.Host]bool{}
		for _, l := range s.Left {
			if seen[l.Host] || m.s.lost(l.Host) || l.Epoch.Compare(s.Epoch) > 0 || l.Host == s.Host && s.holds() {
				t.Fatalf("left %+v: %+v", l, s)
			}
			seen[l.Host] = true
		}
		if s.From != "" && s.Wake == nil {
			t.Fatalf("handed over by no wake: %+v", s)
		}
	}
}

// removedIsGone: nothing names a host that was taken out.
func (m *model) removedIsGone(t *rapid.T) {
	for _, h := range []ids.Host{"h1", "h2", "h3"} {
		if !m.s.Removed(h) {
			continue
		}
		if m.s.Host(h) != nil || len(m.s.OnHost(h)) > 0 {
			t.Fatalf("%s was removed and is there", h)
		}
		for _, s := range m.s.Sessions() {
			if s.names(h) {
				t.Fatalf("%s was removed: %+v", h, s)
			}
		}
	}
}

// drainedIsToldOnce in each drain, and at once when nothing is left.
func (m *model) drainedIsToldOnce(t *rapid.T) {
	for _, e := range m.s.EventsAfter(m.out, 1000) {
		switch e.Kind {
		case HostDraining:
			m.drains[e.Host] = true
		case HostDrained:
			if !m.drains[e.Host] {
				t.Fatalf("%s is drained twice", e.Host)
			}
			m.drains[e.Host] = false
		}
	}
	for _, h := range m.s.Hosts() {
		if h.Draining && m.drains[h.ID] != (len(m.s.OnHost(h.ID)) > 0) {
			t.Fatalf("%s: drained is told %v, left are %d", h.ID, !m.drains[h.ID], len(m.s.OnHost(h.ID)))
		}
		if h.Draining && h.Drained == m.drains[h.ID] {
			t.Fatalf("%+v, but told %v", h, !m.drains[h.ID])
		}
	}
}

// nothingRestsUndone: a session that is not at rest, or has a wake on, has a
// next step, and a wake an end.
func (m *model) nothingRestsUndone(t *rapid.T) {
	atRest := states{Active, Asleep, Paused, Failed}
	for _, s := range m.s.Sessions() {
		if (!slices.Contains(atRest, s.State) || s.Wake != nil) && len(Next(s)) == 0 {
			t.Fatalf("nothing is done for %+v", s)
		}
		if s.Wake != nil && s.Wake.Deadline == 0 {
			t.Fatalf("a wake without an end: %+v", s)
		}
		if s.State == Active && s.Wake != nil {
			t.Fatalf("awake, and to be woken: %+v", s)
		}
	}
}
