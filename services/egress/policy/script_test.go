package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/script"
	"github.com/berth-dev/berth/services/egress/authority"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

func document(t testing.TB, file string) *Document {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", "policies", file))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Parse(raw)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return d
}

func layer(name string) *egressv1.Scope {
	return &egressv1.Scope{Layer: egressv1.Layer(egressv1.Layer_value["LAYER_"+strings.ToUpper(name)])}
}

func number(t testing.TB, s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestDecisions: what is decided, in the words in which it is told.
func TestDecisions(t *testing.T) {
	script.Run(t, func(t *testing.T) func(string) string {
		s := &scripted{t: t}
		return s.step
	})
}

type scripted struct {
	t      *testing.T
	layers []Layered
}

func (s *scripted) step(line string) string {
	words := strings.Fields(line)
	verb, args := words[0], words[1:]
	p := Merge(s.layers)
	switch verb {
	case "load":
		d := document(s.t, args[2])
		s.layers = append(s.layers, Layered{layer(args[0]), number(s.t, args[1]), d})
		var b strings.Builder
		for _, r := range d.Rules {
			fmt.Fprintf(&b, "%s: %s\n", r.Name, r)
		}
		return b.String()
	case "ask":
		q, err := ParseProbe(strings.TrimPrefix(line, "ask "))
		if err != nil {
			return err.Error() + "\n"
		}
		d := p.Probe(q)
		return q.Sentence(d) + "\n" + said(d)
	case "need":
		need, d := p.Need(authority.Name(args[0]), uint16(number(s.t, args[1])), args[2] == "tls")
		return []string{"refuse", "pass", "intercept", "raw"}[need] + "; " + said(d)
	case "resolve":
		return said(p.Resolve(authority.Name(args[0])))
	}
	return s.list(p, verb, args)
}

func (s *scripted) list(p *Policy, verb string, args []string) string {
	var b strings.Builder
	switch verb {
	case "allowances":
		for _, a := range p.Allowances() {
			fmt.Fprintf(&b, "%+v\n", a)
		}
	case "secrets":
		fmt.Fprintln(&b, p.Secrets())
	case "cases":
		raw, err := os.ReadFile(filepath.Join("testdata", "policies", args[0]))
		if err != nil {
			s.t.Fatal(err)
		}
		cases, err := ParseCases(raw)
		if err != nil {
			s.t.Fatal(err)
		}
		for _, r := range p.Run(cases) {
			fmt.Fprintf(&b, "line %d, %s: %v %v\n", r.Line, r.Name, r.Resolves, r.Wrong)
		}
	case "diff":
		c := Diff(document(s.t, args[0]), document(s.t, args[1]))
		fmt.Fprintf(&b, "nothing changes: %v\n%s", c.None(), c)
	default:
		s.t.Fatalf("%s is no step", verb)
	}
	return b.String()
}

func said(d Decision) string {
	text := fmt.Sprintf("%s %s rule=%s layer=%s generation=%d", verdict(d.Allowed), d.Reason, d.Rule, LayerName(d.Layer), d.Generation)
	if d.Reported != "" {
		text += " reported=" + d.Reported
	}
	if d.Limit != (Limit{}) {
		text += " limit=" + d.Limit.String()
	}
	for _, in := range d.Inject {
		text += " " + in.String()
	}
	if len(d.Addresses) > 0 {
		text += fmt.Sprintf(" addresses=%v", d.Addresses)
	}
	return text + "\n"
}
