package core

import (
	"slices"

	"github.com/berth-dev/berth/schemas/ids"
)

// owe lists in t the hosts that may have an image of s, or tells that none has.
// The revision of that event is kept free, whatever follows under the key.
func (x *tx) owe(t *Tombstone, s *Session, c *Removed) {
	if x.v < movesSince {
		if !c.Erased && s.Host != "" {
			t.Erase = []Erasure{{Generation: s.Generation, Epoch: s.Epoch, Host: s.Host}}
		}
		return
	}
	t.Revision = s.Revision + 1
	for _, h := range s.holders() {
		t.Erase = append(t.Erase, Erasure{Generation: s.Generation, Epoch: s.Epoch, Host: h, Session: s.Key,
			Revision: t.Revision, Done: c.confirms(h, s.Host)})
	}
	if h, ok := x.eraser(""); ok && len(t.Erase) == 0 && x.v >= eraserSince && !c.Erased && !s.Epoch.IsZero() {
		// No host has its disk, and none has confirmed that the store is clean of it.
		t.Erase = []Erasure{{Generation: s.Generation, Epoch: s.Epoch, Host: h, Session: s.Key, Revision: t.Revision}}
	}
	if len(t.Erase) == 0 {
		x.tellErased(t, []Erasure{{Generation: s.Generation, Epoch: s.Epoch, Session: s.Key, Revision: t.Revision}})
		return
	}
	x.settleErase(t, s.Generation)
}

// erased notes which hosts have nothing left of a generation that is deleted;
// false if it is not deleted.
func (x *tx) erased(t *Tombstone, c *Removed) bool {
	if !slices.ContainsFunc(t.Erase, func(e Erasure) bool { return e.Generation == c.Generation }) {
		return t.Generation == c.Generation
	}
	n := *t
	n.Erase = slices.Clone(t.Erase)
	for i, e := range n.Erase {
		if e.Generation != c.Generation || e.Done || !c.confirms(e.Host, e.Host) {
			continue
		}
		n.Erase[i].Done = true
		if len(c.Hosts) == 0 {
			break
		}
	}
	x.settleErase(&n, c.Generation)
	x.putTombstone(&n)
	return true
}

// putTombstone stores a changed tombstone under all its keys.
func (x *tx) putTombstone(t *Tombstone) {
	for _, k := range append([]ids.SessionKey{t.Key}, t.Aliases...) {
		x.s.tombs[k] = t
	}
}

// passErasure adds another host to those that erase a generation, unless there
// is one beside e's already. A host that was removed counts as having erased, and
// may not have cleaned the store.
func (x *tx) passErasure(key ids.SessionKey, e Erasure) {
	t := x.s.tombs[key]
	if slices.ContainsFunc(t.Erase, func(v Erasure) bool {
		return v.Generation == e.Generation && v.Host != e.Host && (x.v < eraserSince || x.s.gone[v.Host] == nil)
	}) {
		return
	}
	h, ok := x.eraser(e.Host)
	if !ok {
		return
	}
	n := *t
	e.Host = h
	n.Erase = append(slices.Clone(t.Erase), e)
	x.putTombstone(&n)
}

// assignErasures gives the erasures that wait for a host to h, the first host of
// the cell. While the cell has a host, none waits. The rule has no gate: only
// entries of format waitsSince and later leave an erasure waiting.
func (x *tx) assignErasures(h ids.Host) {
	waits := func(e Erasure) bool { return e.Host == "" }
	for _, t := range x.s.Tombstones() {
		if !slices.ContainsFunc(t.Erase, waits) {
			continue
		}
		n := *t
		n.Erase = slices.Clone(t.Erase)
		for i := range n.Erase {
			if waits(n.Erase[i]) {
				n.Erase[i].Host = h
			}
		}
		x.putTombstone(&n)
	}
}

// eraser is the host that cleans the store of a generation that no host has: the
// first that holds a lease, else the first that may come back. It is never except.
// If the cell has no other host, h is empty. Since format waitsSince, ok is true
// then too: the erasure waits for the next host that joins.
func (x *tx) eraser(except ids.Host) (h ids.Host, ok bool) {
	for _, r := range x.s.order {
		switch {
		case r.id == except:
		case !r.h.Lost:
			return r.id, true
		case h == "" && x.v >= eraserSince:
			h = r.id
		}
	}
	return h, h != "" || x.v >= waitsSince
}

// settleErase forgets a generation once all its hosts have confirmed.
func (x *tx) settleErase(t *Tombstone, g ids.Generation) {
	var mine, rest []Erasure
	for _, e := range t.Erase {
		switch {
		case e.Generation != g:
			rest = append(rest, e)
		case !e.Done:
			return
		default:
			mine = append(mine, e)
		}
	}
	t.Erase = rest
	x.tellErased(t, mine)
}

func (x *tx) tellErased(t *Tombstone, parts []Erasure) {
	first := parts[0]
	if first.Revision == 0 { // deleted by a version that kept none free
		return
	}
	s := &Session{Tenant: t.Tenant, Key: first.Ref(t).Session, Generation: first.Generation, Epoch: first.Epoch,
		State: Deleted, Revision: first.Revision - 1}
	x.move(s, tErased)
	x.emit(s, WasErased, func(e *Event) {
		for _, p := range parts {
			if p.Host != "" {
				e.Hosts = append(e.Hosts, p.Host)
			}
		}
	})
}
