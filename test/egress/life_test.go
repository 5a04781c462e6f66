package egress

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// lifeRows: what a denied one is told, and what comes and goes.
var lifeRows = []row{
	{5, "a tenant without a policy", func(t *testing.T, w *world, _ string) {
		before := w.in.all()
		for _, words := range [][]string{
			{"lookup", "name=api.example.test"},
			{"fetch", "via=connect", "addr=api.example.test:443", "sni=api.example.test", "host=api.example.test"},
			{"fetch", "via=socks", "addr=api.example.test:443", "sni=api.example.test", "host=api.example.test"},
			{"fetch", "addr=203.0.113.7:443", "sni=api.example.test", "host=api.example.test"},
		} {
			if o := tryIn(t, w.neighbour, append(words, "family=4")...); !o.refused() {
				t.Errorf("%s: %s", strings.Join(words, " "), o)
			}
		}
		if n := w.in.all() - before; n != 0 {
			t.Errorf("%d connections went out", n)
		}
	}, true},
	{26, "the denial is understandable and holds no secret", understandable, true},
}

// understandable: what the person whom a denial hits can read, in the answer, the file and the audit.
func understandable(t *testing.T, w *world, _ string) {
	out, _ := w.output(t, tryTime, "curl -sS -m 30 -H 'Accept: application/json' http://api.example.test:80/ -H 'Host: evil.example.test' -w '%{http_code}'")
	for _, want := range []string{"egress", "evil.example.test", contact} {
		if !strings.Contains(out, want) {
			t.Errorf("the denial does not say %q: %s", want, out)
		}
	}
	if page, _ := w.output(t, tryTime, "curl -sS -m 30 -H 'Accept: text/html' http://api.example.test/ -H 'Host: evil.example.test'"); !strings.Contains(page, "<html") {
		t.Errorf("a browser gets no page: %s", page)
	}
	var notice struct {
		Allowed []json.RawMessage `json:"allowed"`
		Refused []json.RawMessage `json:"refused"`
	}
	var o outcome
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		o = w.try(t, "read", "path=/run/berth/egress.json")
		if strings.Contains(o.Body, "evil.example.test") {
			break
		}
	}
	if err := json.Unmarshal([]byte(o.Body), &notice); err != nil || len(notice.Allowed) == 0 || len(notice.Refused) == 0 {
		t.Errorf("/run/berth/egress.json: %v: %s", err, o)
	}
	w.recorded(t, "evil.example.test")
	if strings.Contains(w.records(t)+o.Body+out, secretValue) {
		t.Error("the secret is in what people read")
	}
}
