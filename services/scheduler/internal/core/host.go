package core

import (
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
)

// join records a host and its boot. Its sessions stay as they are: the host
// says itself which compute is missing.
func (x *tx) join(h *Host) Outcome {
	if h.ID == "" || h.Boot == "" {
		return refuse(errkind.Invalid, "a host needs an id and a boot")
	}
	old := x.s.hosts[h.ID]
	n := *h
	n.Lost = false
	if old != nil {
		n.Draining = old.Draining
	}
	x.s.hosts[h.ID] = &n
	if old == nil || old.Boot != h.Boot || old.Lost {
		x.push(&Event{Kind: HostJoined, Host: n.ID, Boot: n.Boot, Tiers: n.Tiers, Capacity: n.Capacity})
	}
	return Outcome{}
}

func (x *tx) drain(d *Drain) Outcome {
	old := x.s.hosts[d.Host]
	if old == nil {
		return refuse(errkind.NotFound, "host %s never joined", d.Host)
	}
	if old.Draining == d.On {
		return Outcome{}
	}
	n := *old
	n.Draining = d.On
	x.s.hosts[d.Host] = &n
	if d.On {
		x.push(&Event{Kind: HostDraining, Host: n.ID, Boot: n.Boot})
	}
	return Outcome{}
}

// hostLost displaces what had compute on the host. Disks stay where they are,
// so the sessions stay with it and wake there when asked for.
func (x *tx) hostLost(l *HostLost) Outcome {
	old := x.s.hosts[l.Host]
	if old == nil || old.Boot != l.Boot || old.Lost {
		return Outcome{}
	}
	n := *old
	n.Lost = true
	x.s.hosts[l.Host] = &n
	x.push(&Event{Kind: HostIsLost, Host: n.ID, Boot: n.Boot, Reason: l.Reason})
	var hit []*Session
	for _, s := range x.s.sessions {
		if s.Host == l.Host && (s.State == Active || s.State == Sleeping) {
			hit = append(hit, s)
		}
	}
	slices.SortFunc(hit, func(a, b *Session) int { return compare(a.Key, b.Key) })
	for _, s := range hit {
		x.displace(x.edit(s), "host "+l.Host.String()+" is lost: "+l.Reason, nil)
	}
	return Outcome{}
}

// exited records that compute is gone without being asked.
func (x *tx) exited(c *Exited) Outcome {
	old, no := x.exact(c.Ref)
	if no != nil {
		return *no
	}
	if old.Host != c.Host {
		return refuse(errkind.Denied, "session %s belongs to host %s", c.Session, old.Host)
	}
	if old.State != Active && old.State != Sleeping {
		return Outcome{Session: old}
	}
	return x.displace(x.edit(old), c.Reason, x.named(c.Candidates, c.Alive))
}

// displace leaves a durable session asleep with its newest files on the disk
// of its host, and fails an ephemeral one.
func (x *tx) displace(s *Session, reason string, alive []Candidate) Outcome {
	if s.Terms.Ephemeral {
		x.move(s, tLost)
		x.emit(s, Displaced, func(e *Event) { e.Reason = reason })
		x.fail(s, Failure{Kind: errkind.DataLoss, Reason: "the session was ephemeral and lost its sandbox: " + reason})
		x.put(s)
		return Outcome{Session: s}
	}
	x.move(s, tDisplaced)
	s.Sleep, s.Dirty = nil, true
	x.emit(s, Displaced, func(e *Event) { e.Reason = reason })
	x.emit(s, FellAsleep, func(e *Event) { e.Manifest, e.Reason, e.Terms = s.Manifest, reason, s.Terms })
	if x.v >= movesSince {
		x.settle(s, VerbClose, failWith(errkind.Unsaved, "it sleeps, but not all that was written is saved: "+reason))
	} else {
		x.settle(s, VerbClose, asIs)
	}
	if s.Wake != nil {
		x.place(s, alive)
	}
	x.put(s)
	return Outcome{Session: s}
}
