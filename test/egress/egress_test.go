package egress

import (
	"fmt"
	"strings"
	"testing"
)

// row is one way round a policy; the number is that of the list of cases.
type row struct {
	number int
	name   string
	try    func(t *testing.T, w *world, family string)
	// once: the family of addresses makes no difference.
	once bool
}

// TestEgress tries every row in every tier with a network, over both families of addresses.
func TestEgress(t *testing.T) {
	in := newInternet(t)
	e := up(t, in)
	apply(t, e, policy)
	secret(t, e)
	program := probe(t)
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			w := enter(t, e, in, tier, program)
			t.Run("what is allowed comes through", func(t *testing.T) { allowed(t, w) })
			ran := 0
			for _, r := range rows() {
				for _, family := range families {
					if r.once && family != "4" {
						continue
					}
					name := fmt.Sprintf("row %02d %s v%s", r.number, r.name, family)
					if r.once {
						name = strings.TrimSuffix(name, " v4")
					}
					t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) { ran++; r.try(t, w, family) })
				}
			}
			fmt.Printf("EGRESS tier %s: %d rows tried\n", tier, ran)
		})
	}
}

// rows are all of them, in order.
func rows() []row {
	var out []row
	for _, part := range [][]row{nameRows, routeRows, webRows, lifeRows} {
		out = append(out, part...)
	}
	return out
}

// TestEveryCaseHasARow holds the rows to the list of cases, which has 33.
func TestEveryCaseHasARow(t *testing.T) {
	has := map[int]bool{}
	for _, r := range rows() {
		has[r.number] = true
	}
	for n := 1; n <= 33; n++ {
		if !has[n] && !elsewhere[n] {
			t.Errorf("no row %d", n)
		}
	}
}

// elsewhere are cases whose test is one of its own, beside the rows: see policy_test.go.
var elsewhere = map[int]bool{5: true, 6: true, 12: true, 26: true, 28: true, 29: true}

// allowed: the doors, protocols and families that a policy opens.
func allowed(t *testing.T, w *world) {
	for _, family := range families {
		t.Run("v"+family, func(t *testing.T) {
			w.passes(t, "fetch", "addr=api.example.test:443", "sni=api.example.test", "host=api.example.test", "family="+family)
			w.passes(t, "fetch", "addr=api.example.test:80", "host=api.example.test", "family="+family)
			w.passes(t, "fetch", "addr=a.wild.example.test:443", "sni=a.wild.example.test", "host=a.wild.example.test", "family="+family)
			o := w.passes(t, "fetch", "addr=inject.example.test:443", "sni=inject.example.test", "host=inject.example.test", "family="+family)
			if got := w.in.lastSecret(); got != "Bearer "+secretValue {
				t.Errorf("the server got %d bytes as its secret", len(got))
			}
			if strings.Contains(o.String(), secretValue) {
				t.Error("the sandbox saw the secret")
			}
			w.passes(t, "fetch", "addr=paths.example.test:443", "sni=paths.example.test", "host=paths.example.test", "path=/acme/x", "family="+family)
		})
	}
	w.passes(t, "fetch", "via=connect", "addr=api.example.test:443", "sni=api.example.test", "host=api.example.test")
	w.passes(t, "fetch", "via=socks", "addr=api.example.test:443", "sni=api.example.test", "host=api.example.test")
	w.passes(t, "fetch", "via=socks", "addr=api.example.test:80", "host=api.example.test")
	w.passes(t, "fetch", "addr="+connectDoor, "path=http://api.example.test/proxied", "host=api.example.test")
	if o := w.try(t, "dial", "addr=api.example.test:7000"); o.Error != "" || !strings.HasPrefix(o.Body, "welcome") {
		t.Errorf("raw bytes to an allowed port: %s", o)
	}
	if o := w.passes(t, "h2", "addr=inject.example.test:443", "sni=inject.example.test", "host=inject.example.test"); o.Header["Proto"] != "HTTP/2.0" {
		t.Errorf("HTTP/2 came as %s", o.Header["Proto"])
	}
	for _, words := range [][]string{
		{"websocket", "addr=api.example.test:80", "host=api.example.test", "path=/socket"},
		{"websocket", "addr=other-inject.example.test:443", "sni=other-inject.example.test", "host=other-inject.example.test", "path=/socket"},
	} {
		if o := w.try(t, words...); o.Status != 101 || o.Body != "over the socket" {
			t.Errorf("%s: %s", strings.Join(words, " "), o)
		}
	}
}
