package policy

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/services/egress/authority"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// A small world in which rules and requests meet often.
var (
	worldNames = []authority.Name{"a.test", "b.a.test", "c.b.a.test", "x.test", "ba.test"}
	worldPaths = []string{"/", "/v1", "/v1/x", "/v10", "/v1/admin", "//v1/x", "/v1%2Fx", "/v1/x%2Fadmin"}
	worldPorts = []uint16{80, 443, 22}
	worldVerbs = []string{"GET", "POST"}
	protocols  = []Protocol{HTTP, HTTPS, TLS, TCP}
)

func drawRule(t *rapid.T, name string) string {
	deny := rapid.Bool().Draw(t, "deny")
	protocol := rapid.SampledFrom(append([]Protocol{""}, protocols...)).Draw(t, "protocol")
	web := protocol != TLS && protocol != TCP
	hosts := []string{string(rapid.SampledFrom(worldNames).Draw(t, "host"))}
	if protocol != TCP && rapid.Bool().Draw(t, "wide") {
		hosts = append(hosts, "'*."+string(rapid.SampledFrom(worldNames).Draw(t, "below"))+"'")
	}
	parts := []string{"hosts: [" + strings.Join(hosts, ", ") + "]"}
	if protocol != "" {
		parts = append(parts, "protocol: "+string(protocol))
	}
	if protocol == TCP && !deny || rapid.Bool().Draw(t, "ports") {
		parts = append(parts, fmt.Sprintf("ports: [%d]", rapid.SampledFrom(worldPorts).Draw(t, "port")))
	}
	if web && rapid.Bool().Draw(t, "methods") {
		parts = append(parts, "methods: ["+rapid.SampledFrom(worldVerbs).Draw(t, "method")+"]")
	}
	if web && rapid.Bool().Draw(t, "paths") {
		parts = append(parts, "paths: ["+rapid.SampledFrom([]string{"/v1", "/v1/", "/v1/admin"}).Draw(t, "path")+"]")
	}
	verb, more := "allow", ""
	if deny {
		verb = "deny"
	} else if (protocol == "" || protocol == HTTPS) && len(hosts) == 1 && rapid.Bool().Draw(t, "inject") {
		more = ", inject: {secret: s, header: X-Key}"
	}
	if rapid.IntRange(0, 4).Draw(t, "report") == 0 {
		more += ", report_only: true"
	}
	return fmt.Sprintf("  - {name: %s, %s: {%s}%s}\n", name, verb, strings.Join(parts, ", "), more)
}

func drawDocument(t *rapid.T, label string) *Document {
	text := "rules:\n"
	n := rapid.IntRange(0, 4).Draw(t, label)
	for i := range n {
		text += drawRule(t, fmt.Sprintf("%s-%d", label, i))
	}
	if n == 0 {
		text = "rules: []\n"
	}
	d, err := Parse([]byte(text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return d
}

func drawLayers(t *rapid.T) []Layered {
	var out []Layered
	for l := egressv1.Layer_LAYER_CELL; l <= egressv1.Layer_LAYER_SESSION; l++ {
		if rapid.Bool().Draw(t, "has "+l.String()) {
			out = append(out, Layered{&egressv1.Scope{Layer: l}, uint64(10 * l), drawDocument(t, LayerName(l))})
		}
	}
	return out
}

// requests are all of the world to one name.
func requests(n authority.Name) (out []Request) {
	for _, port := range worldPorts {
		for _, p := range protocols {
			q := Request{Name: n, Port: port, Protocol: p}
			if q.opaque() {
				out = append(out, q)
				continue
			}
			for _, m := range worldVerbs {
				for _, path := range worldPaths {
					q.Method, q.Path = m, path
					out = append(out, q)
				}
			}
		}
	}
	return out
}

// meaning is what the documentation says, without an index: the test's own reading of the layers.
func meaning(layers []Layered, q Request) (allowed bool, rule string, layer egressv1.Layer) {
	has := func(r *Rule) bool {
		for _, h := range r.Hosts {
			if h.Matches(q.Name) {
				return true
			}
		}
		return false
	}
	injected := false
	for _, l := range layers {
		for i := range l.Document.Rules {
			r := &l.Document.Rules[i]
			if !has(r) || r.ReportOnly {
				continue
			}
			if r.Deny && r.denies(&q) {
				return false, "", 0
			}
			injected = injected || r.puts(q.Port)
		}
	}
	if q.opaque() && injected {
		return false, "", 0
	}
	for want := egressv1.Layer_LAYER_SESSION; want >= egressv1.Layer_LAYER_CELL; want-- {
		for _, l := range layers {
			for i := range l.Document.Rules {
				if r := &l.Document.Rules[i]; l.Scope.Layer == want && !r.Deny && !r.ReportOnly && has(r) {
					if ok, _ := r.allows(&q); ok {
						return true, r.Name, want
					}
				}
			}
		}
	}
	return false, "", 0
}

// TestDenyWinsAndTheMostSpecificLayerCounts: whatever rules there are.
func TestDenyWinsAndTheMostSpecificLayerCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := drawLayers(t)
		p := Merge(rapid.Permutation(layers).Draw(t, "order"))
		for _, q := range requests(rapid.SampledFrom(worldNames).Draw(t, "name")) {
			d := p.Judge(q)
			allowed, rule, layer := meaning(layers, q)
			if d.Allowed != allowed || allowed && (d.Rule != rule || d.Layer != layer || d.Generation != uint64(10*layer)) {
				t.Fatalf("%s: %+v; by the documentation %v %s %s", q, d, allowed, rule, layer)
			}
			if d.Allowed != (d.Reason == Allowed) || len(layers) == 0 != (d.Reason == NoPolicy) {
				t.Fatalf("%s: %+v", q, d)
			}
		}
	})
}

// TestWhatHasNoNameOrNeedCannotBeAllowed: DNS and connections refuse only what would be denied anyway, and
// let nothing through unseen that would not be allowed unseen.
func TestWhatHasNoNameOrNeedCannotBeAllowed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := Merge(drawLayers(t))
		n := rapid.SampledFrom(worldNames).Draw(t, "name")
		for _, q := range requests(n) {
			d := p.Judge(q)
			if d.Allowed && !p.MayResolve(n) {
				t.Fatalf("%s is allowed and its name not answered for", q)
			}
			tls := q.Protocol == HTTPS || q.Protocol == TLS
			need, why := p.Need(n, q.Port, tls)
			if (need == Refuse) == why.Allowed {
				t.Fatalf("%s: need %d, %+v", q, need, why)
			}
			switch {
			case d.Allowed && need == Refuse:
				t.Fatalf("%s is allowed and its connection refused: %+v", q, why)
			case need == Pass && (!tls || !p.Judge(Request{Name: n, Port: q.Port, Protocol: TLS}).Allowed):
				t.Fatalf("%s is passed through and TLS is not allowed", q)
			case need == Raw && !p.Judge(Request{Name: n, Port: q.Port, Protocol: TCP}).Allowed:
				t.Fatalf("%s goes raw and TCP is not allowed", q)
			case (need == Pass || need == Raw) && !d.Allowed && !q.opaque():
				t.Fatalf("%s is denied and would pass unseen (%d): %+v", q, need, d)
			case (need == Pass || need == Raw) && len(d.Inject) > 0:
				t.Fatalf("%s takes a secret and would pass unseen", q)
			}
		}
	})
}

// TestAnUnrelatedRuleChangesNothing: of another host, wherever it is added.
func TestAnUnrelatedRuleChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := drawLayers(t)
		text := "rules:\n  - {name: unrelated, " + rapid.SampledFrom([]string{"allow", "deny"}).Draw(t, "verb") + ": {hosts: [other.test, '*.other.test']}}\n"
		d, err := Parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		more := append([]Layered{{&egressv1.Scope{Layer: egressv1.Layer(rapid.IntRange(1, 5).Draw(t, "layer"))}, 1, d}}, layers...)
		if len(layers) == 0 {
			return // then there was no policy before
		}
		before, after := Merge(layers), Merge(more)
		for _, q := range requests(rapid.SampledFrom(worldNames).Draw(t, "name")) {
			if a, b := before.Judge(q), after.Judge(q); fmt.Sprint(a) != fmt.Sprint(b) {
				t.Fatalf("%s: %+v, then %+v", q, a, b)
			}
		}
	})
}

// TestReportOnlyRulesDecideNothing: without them everything is judged as with them.
func TestReportOnlyRulesDecideNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := drawLayers(t)
		bare := make([]Layered, len(layers))
		for i, l := range layers {
			d := &Document{}
			for _, r := range l.Document.Rules {
				if !r.ReportOnly {
					d.Rules = append(d.Rules, r)
				}
			}
			bare[i] = Layered{l.Scope, l.Generation, d}
		}
		with, without := Merge(layers), Merge(bare)
		for _, q := range requests(rapid.SampledFrom(worldNames).Draw(t, "name")) {
			a, b := with.Judge(q), without.Judge(q)
			reported := a.Reported
			a.Reported = ""
			if fmt.Sprint(a) != fmt.Sprint(b) || b.Reported != "" {
				t.Fatalf("%s: %+v, without %+v", q, a, b)
			}
			if reported != "" && !strings.Contains(reported, "-") {
				t.Fatalf("%s: %q", q, reported)
			}
			n1, _ := with.Need(q.Name, q.Port, true)
			n2, _ := without.Need(q.Name, q.Port, true)
			if n1 != n2 || with.MayResolve(q.Name) != without.MayResolve(q.Name) {
				t.Fatalf("%s: need %d, without %d", q, n1, n2)
			}
		}
	})
}
