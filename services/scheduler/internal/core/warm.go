package core

import (
	"slices"

	"github.com/berth-dev/berth/schemas/ids"
)

// maxReservation bounds the name of a reservation.
const maxReservation = 128

// What a reservation adds to the ranks of a host, and to the reason of a placement.
const (
	warmReserved = "a warm one is reserved"
	mustBeCold   = "it starts cold, since its tenant has had its share of the pool"
)

// WarmName is the name under which hosts count warm sandboxes that suit t.
func WarmName(t *Terms) string { return t.Template + "/" + tierName(t) }

// Placeable reports whether a session would get one of the named hosts now. A
// session that is not yet known has its tenant, key and terms alone.
func (s *State) Placeable(sess *Session, t Terms, named []Candidate) bool {
	t = sess.Raised(t)
	q := newQuery(s, sess, &t, EntryVersion)
	p, _ := s.plan(&q, named)
	return p.Host != ""
}

// Reservable are the named hosts of which a warm sandbox may be taken, in
// order: those that may take the session and are no farther from its disk than
// the first, since a warm start never makes good for a disk that is elsewhere.
func Reservable(named []Candidate) (out []ids.Host) {
	nearest := ""
	for _, c := range named {
		if c.Refused != "" {
			continue
		}
		if len(out) == 0 {
			nearest = c.nearness()
		}
		if c.nearness() == nearest {
			out = append(out, c.Host)
		}
	}
	return out[:min(len(out), MaxCandidates)]
}

// Reserved puts the host on which a warm sandbox is reserved first.
func Reserved(named []Candidate, h ids.Host, reservation string) []Candidate {
	i := slices.IndexFunc(named, func(c Candidate) bool { return c.Host == h && c.Refused == "" })
	if i < 0 || reservation == "" || len(reservation) > maxReservation {
		return named
	}
	c := named[i]
	c.Reservation, c.Ranks = reservation, withReserved(c.Ranks)
	return slices.Concat([]Candidate{c}, named[:i], named[i+1:])
}

// Cold has the session start cold wherever it is placed.
func Cold(named []Candidate) []Candidate {
	named = slices.Clone(named)
	for i := range named {
		named[i].Cold = named[i].Refused == ""
	}
	return named
}

// nearness is how near the disk is to a candidate, as its ranks say.
func (c *Candidate) nearness() string {
	if len(c.Ranks) > 0 && (c.Ranks[0] == rankDisk || c.Ranks[0] == rankHeld) {
		return c.Ranks[0]
	}
	return ""
}

// withReserved adds to ranks that a warm one is reserved, where it counts.
func withReserved(ranks []string) []string {
	at := 0
	for at < len(ranks) && slices.Contains([]string{rankDisk, rankHeld, rankImage}, ranks[at]) {
		at++
	}
	return slices.Insert(slices.Clone(ranks), at, warmReserved)
}

// warmth says how a session starts on the host that takes it; empty: nothing
// was asked of a pool.
func (c *Candidate) warmth() string {
	switch {
	case c.Cold:
		return "; " + mustBeCold
	case c.Reservation != "":
		return "; " + warmReserved
	}
	return ""
}

// reserve notes with the wake what the pool said of the host that takes it.
func (w *Wake) reserve(named []Candidate, h ids.Host, version int) {
	w.Reservation, w.Cold = "", false
	for _, c := range named {
		if version >= poolSince && c.Host == h && len(c.Reservation) <= maxReservation {
			w.Reservation, w.Cold = c.Reservation, c.Cold
			return
		}
	}
}
