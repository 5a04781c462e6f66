package policy

import (
	"cmp"
	"slices"
	"strings"

	"github.com/berth-dev/berth/services/egress/authority"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// Layered is the document of one scope that concerns a session.
type Layered struct {
	Scope      *egressv1.Scope
	Generation uint64
	Document   *Document
}

// Policy is what holds for one session. It does not change and may be used by many at once; a nil one, and
// the zero one, deny everything. Documents and what finds their rules are shared between policies.
type Policy struct {
	layers     []Layered
	generation uint64
	ask        string
}

// Merge puts the documents of a session's scopes together: the session's own first, then its template's, its
// tenant's, its plan's and the cell's.
func Merge(layers []Layered) *Policy {
	p := &Policy{layers: slices.Clone(layers)}
	p.layers = slices.DeleteFunc(p.layers, func(l Layered) bool { return l.Document == nil })
	slices.SortStableFunc(p.layers, func(a, b Layered) int { return cmp.Compare(b.Scope.GetLayer(), a.Scope.GetLayer()) })
	for _, l := range p.layers {
		p.generation = max(p.generation, l.Generation)
		if p.ask == "" {
			p.ask = l.Document.Contact
		}
	}
	return p
}

// kind of rules that are asked together.
type kind int

const (
	allowing kind = iota
	denying
	reporting
	kinds
)

func (r *Rule) kind() kind {
	switch {
	case r.ReportOnly:
		return reporting
	case r.Deny:
		return denying
	}
	return allowing
}

// entry is one rule; of two in a document the one of lower order comes first.
type entry struct {
	*Rule
	order int
}

// index finds the rules of a host. Each list is in order.
type index struct {
	exact map[authority.Name][]entry
	below map[authority.Name][]entry
}

// find is the index of the document's rules of a kind, made when it is first asked for.
func (d *Document) find(k kind) *index {
	d.once.Do(func() {
		for i := range d.Rules {
			r := &d.Rules[i]
			d.indexes[r.kind()].add(entry{r, i})
		}
	})
	return &d.indexes[k]
}

func (x *index) add(e entry) {
	if x.exact == nil {
		x.exact, x.below = map[authority.Name][]entry{}, map[authority.Name][]entry{}
	}
	for _, h := range e.Hosts {
		m := x.exact
		if h.Below {
			m = x.below
		}
		m[h.Name] = append(m[h.Name], e)
	}
}

// first is the first rule of a host for which ok holds. ok may be asked of others too, in any order.
func (x *index) first(n authority.Name, ok func(*Rule) bool) (best entry, found bool) {
	if x.exact == nil {
		return best, false
	}
	look := func(list []entry) {
		for _, e := range list {
			if found && e.order >= best.order {
				return
			}
			if ok(e.Rule) {
				best, found = e, true
				return
			}
		}
	}
	look(x.exact[n])
	if len(x.below) == 0 {
		return best, found
	}
	for _, up, more := strings.Cut(string(n), "."); more; _, up, more = strings.Cut(up, ".") {
		look(x.below[authority.Name(up)])
	}
	return best, found
}

// hit is a rule that was found, and where.
type hit struct {
	*Rule
	layer int // in Policy.layers
	order int
}

// before reports whether h comes before o.
func (h hit) before(o hit) bool {
	return h.layer < o.layer || h.layer == o.layer && h.order < o.order
}

// first is the first rule of a host, over all layers, for which ok holds.
func (p *Policy) first(k kind, n authority.Name, ok func(*Rule) bool) (hit, bool) {
	for i := range p.layers {
		if e, is := p.layers[i].Document.find(k).first(n, ok); is {
			return hit{e.Rule, i, e.order}, true
		}
	}
	return hit{}, false
}

// Generation is that of the newest policy in force; 0 if there is none.
func (p *Policy) Generation() uint64 {
	if p == nil {
		return 0
	}
	return p.generation
}

// Ask is whom to ask, from the most specific policy that says so.
func (p *Policy) Ask() string {
	if p == nil {
		return ""
	}
	return p.ask
}

// Layers are the documents that were merged, the most specific first; not to be changed.
func (p *Policy) Layers() []Layered {
	if p == nil {
		return nil
	}
	return p.layers
}

// Secrets are the names of those that rules put in, sorted.
func (p *Policy) Secrets() []string {
	var out []string
	for _, l := range p.Layers() {
		for i := range l.Document.Rules {
			if r := &l.Document.Rules[i]; !r.ReportOnly {
				for _, in := range r.Inject {
					out = append(out, in.Secret)
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Allowance is what one rule lets a session do, as its user may read it.
type Allowance struct {
	Host     string   `json:"host"`
	Ports    []uint16 `json:"ports"`
	Protocol Protocol `json:"protocol"`
	Methods  []string `json:"methods,omitempty"`
	Paths    []string `json:"paths,omitempty"`
	Rule     string   `json:"rule"`
	Layer    string   `json:"layer"`
	// Placeholder that may be sent for a secret.
	Placeholders []string `json:"placeholders,omitempty"`
}

// Allowances are what is allowed now, in the order in which rules are asked; a host that is denied wholly is
// not among them.
func (p *Policy) Allowances() []Allowance {
	var out []Allowance
	for _, l := range p.Layers() {
		for i := range l.Document.Rules {
			r := &l.Document.Rules[i]
			if r.Deny || r.ReportOnly {
				continue
			}
			for _, h := range r.Hosts {
				if p.shut(h) {
					continue
				}
				a := Allowance{Host: h.String(), Ports: r.Ports, Protocol: r.Protocol, Methods: r.Methods, Paths: r.Paths, Rule: r.Name, Layer: LayerName(l.Scope.GetLayer())}
				for _, in := range r.Inject {
					a.Placeholders = append(a.Placeholders, in.Placeholder)
				}
				out = append(out, a)
			}
		}
	}
	return out
}

// shut reports whether one rule denies all of a pattern.
func (p *Policy) shut(h Pattern) bool {
	n := h.Name
	if h.Below {
		n = "x." + n // stands for any
	}
	_, is := p.first(denying, n, func(r *Rule) bool {
		return r.whole() && (!h.Below || slices.ContainsFunc(r.Hosts, func(d Pattern) bool {
			return d.Below && (d.Name == h.Name || d.Matches(h.Name))
		}))
	})
	return is
}

// LayerName is a layer in a word: cell, plan, tenant, template or session.
func LayerName(l egressv1.Layer) string {
	if l == egressv1.Layer_LAYER_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(l.String(), "LAYER_"))
}
