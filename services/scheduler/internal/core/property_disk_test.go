package core

import (
	"fmt"
	"slices"

	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

// disk is one generation's.
type disk struct {
	key ids.SessionKey
	gen ids.Generation
}

// diskModel is what the model saw of a disk.
type diskModel struct {
	held, confirmed []ids.Host
	placed          bool   // the store may have something of it
	free            uint64 // revision that its end will have
}

func (m *model) disk(k ids.SessionKey, g ids.Generation) *diskModel {
	d := m.disks[disk{k, g}]
	if d == nil {
		d = &diskModel{}
		m.disks[disk{k, g}] = d
	}
	return d
}

// drawCommit is mostly what an honest host would commit.
func (m *model) drawCommit(t *rapid.T, key ids.SessionKey, ref Ref, man ManifestInfo) Entry {
	c := &ManifestCmd{Ref: ref, Host: ids.Host(rapid.SampledFrom([]string{"h1", "h2"}).Draw(t, "committer")), Manifest: man, Sealed: rapid.Bool().Draw(t, "sealed")}
	s := m.s.Session(key)
	for _, k := range []ids.SessionKey{"a", "b"} { // such a wake is rare
		if r := m.s.Session(k); r != nil && r.Restore != nil && r.State == Waking {
			s = r
		}
	}
	if s != nil && rapid.IntRange(0, 4).Draw(t, "honest") > 0 {
		c.Ref, c.Host = Ref{s.Key, s.Generation, s.Epoch}, s.Host
		c.Manifest = ManifestInfo{ID: fmt.Sprint("m", m.index), Parent: s.Manifest}
		if s.Restore != nil {
			c.Manifest.RestoredFrom = s.Restore.Snapshot
		}
	}
	return Entry{Manifest: c}
}

func (m *model) drawRestore(t *rapid.T, key ids.SessionKey, ref Ref) Entry {
	r := &Restore{Tenant: "acme", Session: key, Generation: ref.Generation, AsOf: 5,
		Head:     rapid.SampledFrom([]string{"", "m1", "m2", "m3"}).Draw(t, "head"),
		Snapshot: rapid.SampledFrom([]string{"", "m1", "m2", "m3", "m0"}).Draw(t, "snapshot")}
	if s := m.s.Session(key); s != nil && rapid.IntRange(0, 4).Draw(t, "seen") > 0 {
		r.Head = s.Manifest
	}
	return Entry{Restore: r}
}

// headsMoveWithReason: a head moves by a commit on it, and only while there may
// be something to commit.
func (m *model) headsMoveWithReason(t *rapid.T, before *State, e Entry) {
	for _, s := range m.s.Sessions() {
		old := before.Session(s.Key)
		if old == nil || old.Generation != s.Generation || old.Manifest == s.Manifest {
			continue
		}
		var man ManifestInfo
		switch {
		case e.Manifest != nil:
			man = e.Manifest.Manifest
		case e.Slept != nil:
			man = e.Slept.Manifest
		}
		ok := man.ID == s.Manifest && man.Parent == old.Manifest
		switch old.State {
		case Active, Sleeping:
		case Waking:
			ok = ok && old.Restore != nil && man.RestoredFrom == old.Restore.Snapshot && s.Restore == nil
		case Asleep, Paused:
			ok = ok && old.Dirty && s.Dirty == (e.Manifest == nil || !e.Manifest.Sealed)
		case Failed:
			ok = ok && old.NeedsStop
		default:
			ok = false
		}
		if !ok {
			t.Fatalf("the head moved from %q to %q by %+v: %+v", old.Manifest, s.Manifest, e, old)
		}
	}
}

// unsavedFilesStay: a session leaves its host only when all that it ever
// acknowledged is in its manifest, or its newest disk is known to be on a host
// that is lost, or was given up with its host.
func (m *model) unsavedFilesStay(t *rapid.T, before *State, e Entry) {
	for _, s := range m.s.Sessions() {
		old := before.Session(s.Key)
		if old == nil || old.Generation != s.Generation || old.Host == "" || old.Host == s.Host || e.RemoveHost != nil {
			continue
		}
		saved := !old.bound() || old.Terms.Ephemeral
		switch {
		case old.State == Active || old.State == Sleeping:
			saved = e.Slept != nil && e.Slept.Manifest.ID != "" && e.Slept.Manifest.ID == s.Manifest ||
				old.Sleep != nil && old.Sleep.Save && old.Newest == s.Newest
		case old.Dirty && s.Host != s.Newest: // to be woken from the store
			saved = s.Manifest != "" && m.s.lost(s.Newest) && s.Newest == old.Newest
		case old.Dirty:
			saved = s.Newest == old.Newest
		}
		if !saved {
			t.Fatalf("files are left on %s: %+v, now on %s", old.Host, old, s.Host)
		}
	}
}

// restoresAreSound: a restore never waits for a session that runs or has unsaved files.
func (m *model) restoresAreSound(t *rapid.T) {
	for _, s := range m.s.Sessions() {
		if s.Restore == nil {
			continue
		}
		at := slices.Contains(states{Asleep, Paused, Failed, Waking, Deleting}, s.State)
		if !at || s.Dirty || s.Manifest == "" || s.Terms.Ephemeral {
			t.Fatalf("a restore waits for %+v", s)
		}
	}
}

// noteHolders keeps its own account of who had and who removed what.
func (m *model) noteHolders(before *State, e Entry, out Outcome) {
	for _, s := range m.s.Sessions() {
		d := m.disk(s.Key, s.Generation)
		if s.Host != "" && !slices.Contains(d.held, s.Host) {
			d.held = append(d.held, s.Host)
			d.placed = true
		}
	}
	if out.Refused == nil && e.RemoveHost != nil {
		for _, d := range m.disks {
			d.held = slices.DeleteFunc(d.held, func(h ids.Host) bool { return h == e.RemoveHost.Host })
		}
	}
	if out.Refused == nil && e.Dropped != nil {
		d := m.disk(out.Session.Key, e.Dropped.Generation)
		d.held = slices.DeleteFunc(d.held, func(h ids.Host) bool { return h == e.Dropped.Host })
	}
	if e.Removed == nil || !e.Removed.Erased || out.Refused != nil {
		return
	}
	r := e.Removed
	hosts, key := r.Hosts, r.Session
	if s := before.Session(r.Session); s != nil && s.Generation == r.Generation {
		key = s.Key
		if len(hosts) == 0 {
			hosts = []ids.Host{s.Host}
		}
	} else if tomb := before.Tombstone(r.Session); tomb != nil {
		i := slices.IndexFunc(tomb.Erase, func(p Erasure) bool { return p.Generation == r.Generation && !p.Done })
		if i < 0 {
			return
		}
		key = tomb.Erase[i].Ref(tomb).Session
		if len(hosts) == 0 {
			hosts = []ids.Host{tomb.Erase[i].Host}
		}
	}
	d := m.disk(key, r.Generation)
	d.confirmed = append(d.confirmed, hosts...)
}

// erasedIsTrue: every host that ever held the generation confirmed or was
// removed, a host confirmed that the store is clean, and it is told once, after deleted.
func (m *model) erasedIsTrue(t *rapid.T, e *Event) {
	d := m.disk(e.Session, e.Generation)
	if e.Revision != d.free || d.free == 0 {
		t.Fatalf("erased with revision %d, %d was kept for it", e.Revision, d.free)
	}
	d.free = 0
	if d.placed && len(d.confirmed) == 0 {
		t.Fatalf("%s is said to be erased, and no host confirmed that the store is clean", e.Session)
	}
	for _, h := range d.held {
		if !slices.Contains(e.Hosts, h) || !slices.Contains(d.confirmed, h) {
			t.Fatalf("%s is said to be erased on %v; %v held it, %v confirmed", e.Session, e.Hosts, d.held, d.confirmed)
		}
	}
}
