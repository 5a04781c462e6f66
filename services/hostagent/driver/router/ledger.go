package router

import (
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// ledger says who makes, or has made, each sandbox. A host may have thousands: whether another driver has
// one of a session is found without looking at all.
type ledger struct {
	all map[ids.SandboxID]made
	of  map[ids.SessionKey]int // how many notes name the session
}

func newLedger() ledger {
	return ledger{all: map[ids.SandboxID]made{}, of: map[ids.SessionKey]int{}}
}

func (n ledger) set(id ids.SandboxID, m made) {
	n.drop(id)
	n.all[id] = m
	if m.session != "" {
		n.of[m.session]++
	}
}

func (n ledger) drop(id ids.SandboxID) {
	m, ok := n.all[id]
	if !ok {
		return
	}
	delete(n.all, id)
	if n.of[m.session]--; n.of[m.session] <= 0 {
		delete(n.of, m.session)
	}
}

func (n ledger) dropIf(which func(ids.SandboxID, made) bool) {
	for id, m := range n.all {
		if which(id, m) {
			n.drop(id)
		}
	}
}

// other is another driver than by that has, or makes, a sandbox of the session.
func (n ledger) other(s ids.SessionKey, by driver.Driver) (made, bool) {
	if n.of[s] == 0 {
		return made{}, false
	}
	for _, m := range n.all {
		if m.session == s && m.by != by {
			return m, true
		}
	}
	return made{}, false
}
