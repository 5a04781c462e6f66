package cluster

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/certs"
)

// renewEvery is how often the members' certificates are looked at. Members read
// them again by themselves.
const renewEvery = time.Minute

// certificate makes a member's certificate with its key, or finds it fresh.
func (p *planner) certificate(l certs.Leaf) (path string, err error) {
	if p.leaves == nil {
		p.leaves = map[string]certs.Leaf{}
	}
	path = p.ca.Path(l.Name)
	p.leaves[path] = l
	return path, p.ca.Keep(path, l, time.Now())
}

// renew keeps the members' certificates fresh, and of the root that signs now,
// until ctx ends.
func (p *planner) renew(ctx context.Context) {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for path, l := range p.leaves {
			if err := p.ca.Keep(path, l, time.Now()); err != nil {
				p.log.Warn("a certificate cannot be renewed; it is tried again", "member", l.Name, "error", err)
			}
		}
	}
}
