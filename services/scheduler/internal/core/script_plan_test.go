package core

import (
	"fmt"
	"slices"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
)

// plan prints what the leader would propose, or a wake would get. Facts of the
// hosts: alive=h1,h2 sick=h2 image=h1 warm=h3
func (m *stage) plan(what string, a args) string {
	facts := func(h ids.Host) HostFacts {
		f := HostFacts{Alive: slices.Contains(a.hosts("alive"), h)}
		if slices.Contains(a.hosts("sick"), h) {
			f.Unhealthy = "its pool of disks is full"
		}
		if slices.Contains(a.hosts("image"), h) {
			f.Images = func(string) bool { return true }
		}
		if slices.Contains(a.hosts("warm"), h) {
			f.Warm = func(name string) uint32 { return map[string]uint32{"/gvisor": 2}[name] }
		}
		return f
	}
	var b strings.Builder
	s := m.s.Session(a.keys()...)
	if what == "explain" {
		p := m.s.Explain(s, facts)
		fmt.Fprintf(&b, "  on %q: %s\n", p.Host, p.Reason)
		for _, r := range p.Rows {
			fmt.Fprintf(&b, "  - %s %s %v\n", r.Host, r.Refused, r.Ranks)
		}
		return b.String() + fmt.Sprintf("  and %d more\n", p.More)
	}
	o := m.open(a)
	o.Terms.Image = "img"
	if s == nil {
		s = &Session{Tenant: o.Actor.Tenant, Key: o.Keys[0]}
	}
	for _, c := range m.s.Rank(s, o.Terms, facts) {
		fmt.Fprintf(&b, "  %s %s %s\n", c.Host, strings.Join(c.Ranks, ", "), c.Refused)
	}
	return b.String()
}

func (m *stage) lefts() string {
	var b strings.Builder
	for _, p := range m.s.Lefts() {
		fmt.Fprintf(&b, "  %s left %s on %s\n", p.Session.Key, p.Left.Epoch, p.Left.Host)
	}
	return b.String() + "  that is all\n"
}
