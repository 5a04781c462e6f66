package subjects

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "rewrite golden files")

func golden(t *testing.T, file, got string) {
	t.Helper()
	path := "testdata/" + file
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s is stale; run this test with -update and read the difference", path)
	}
}

func TestMarkdownGolden(t *testing.T) { golden(t, "catalogue.golden.md", Markdown()) }

var (
	nameGen = rapid.StringMatching(`[a-z0-9]([a-z0-9_-]{0,20}[a-z0-9])?`).Filter(func(s string) bool { _, err := ids.ParseHost(s); return err == nil })
	word_   = rapid.StringMatching(`[a-z0-9_-]{1,20}`)
	keyGen  = rapid.Custom(func(t *rapid.T) ids.SessionKey {
		return ids.DeriveSessionKey([]byte("k"), "i", "t", rapid.String().Draw(t, "subject"), "n")
	})
	callerGen = rapid.Custom(func(t *rapid.T) Caller {
		switch rapid.IntRange(0, 5).Draw(t, "role") {
		case 0:
			return Service(rapid.SampledFrom(Services).Draw(t, "service"))
		case 1:
			return Host(ids.Host(nameGen.Draw(t, "host")))
		case 2:
			return Frontend(ids.Tenant(nameGen.Draw(t, "tenant")), ids.Frontend(nameGen.Draw(t, "frontend")))
		case 3:
			return Operator()
		case 4:
			return Gate(ids.Host(nameGen.Draw(t, "host")))
		}
		return Keeper()
	})
)

func same[T comparable](t *rapid.T, subject string, got T, err error, want T) {
	if err != nil || got != want {
		t.Fatalf("%s: got %+v, %v; want %+v", subject, got, err, want)
	}
}

func TestBuildersAndParsersAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tenant, fe := ids.Tenant(nameGen.Draw(t, "t")), ids.Frontend(nameGen.Draw(t, "f"))
		host, w, key := ids.Host(nameGen.Draw(t, "h")), word_.Draw(t, "w"), keyGen.Draw(t, "key")
		epoch := ids.Epoch{Incarnation: rapid.Uint32().Draw(t, "inc"), Index: rapid.Uint64().Draw(t, "idx")}

		s := Request(tenant, fe, w)
		r, err := ParseRequest(s)
		same(t, s, r, err, RequestSubject{tenant, fe, w})
		s = Session(tenant, key, w)
		se, err := ParseSession(s)
		same(t, s, se, err, SessionSubject{tenant, key, w})
		s = HostEvent(host, w)
		he, err := ParseHostEvent(s)
		same(t, s, he, err, HostSubject{host, w})
		s = PoolEvent(ids.Template(w), w)
		pe, err := ParsePoolEvent(s)
		same(t, s, pe, err, PoolSubject{ids.Template(w), w})
		s = TimerSet(tenant, key, w)
		ti, err := ParseTimer(s)
		same(t, s, ti, err, TimerSubject{false, tenant, key, w})
		s = TimerDue(tenant, key, w)
		ti, err = ParseTimer(s)
		same(t, s, ti, err, TimerSubject{true, tenant, key, w})
		s = Audit(w, tenant, key)
		au, err := ParseAudit(s)
		same(t, s, au, err, AuditSubject{w, tenant, key})
		s = Audit(w, "", "")
		au, err = ParseAudit(s)
		same(t, s, au, err, AuditSubject{Service: w})
		s = Usage(tenant, key)
		us, err := ParseUsage(s)
		same(t, s, us, err, SessionSubject{Tenant: tenant, Session: key})
		s = Dead(w)
		d, err := ParseDead(s)
		same(t, s, d, err, w)
		s = BoxSubject(key, epoch, w)
		bx, err := ParseBox(s)
		same(t, s, bx, err, BoxCall{key, epoch, w})
	})
}

func TestRPCTakesTheCallerFromTheSubject(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.SampledFrom(Methods).Draw(t, "method")
		caller := callerGen.Draw(t, "caller")
		var host ids.Host
		s := RPC(m.Service, m.Name, caller)
		if PerHost(m.Service) {
			host = ids.Host(nameGen.Draw(t, "host"))
			if caller.Host != "" && rapid.Bool().Draw(t, "own") {
				host = caller.Host
			}
			s = HostRPC(host, m.Name, caller)
			if m.Service == "gate" {
				s = GateRPC(host, m.Name, caller)
			}
		}
		got, err := ParseRPC(s)
		if m.Allows(caller) && (m.CallersHost(caller) == "*" || caller.Host == host) {
			same(t, s, got, err, Call{m.Service, host, m.Name, caller})
			if !slices.ContainsFunc(m.Endpoints(host), func(p string) bool { return Match(p, s) }) {
				t.Fatalf("%s lies in none of %v", s, m.Endpoints(host))
			}
		} else if err == nil {
			t.Fatalf("%s was accepted as %+v", s, got)
		}
	})
}

func TestIdentityNamesAreUnique(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := callerGen.Draw(t, "a"), callerGen.Draw(t, "b")
		if (a.Name() == b.Name()) != (a == b) {
			t.Fatalf("%+v and %+v are both %s", a, b, a.Name())
		}
		got, err := ParseName(a.Name())
		same(t, a.Name(), got, err, a)
	})
	for _, c := range []struct {
		t ids.Tenant
		f ids.Frontend
		w string
	}{{"acme", "web", "fe-acme-web"}, {"a-b", "c", "fe-a--b-c"}, {"a", "b-c", "fe-a-b-c"}} {
		if got := Frontend(c.t, c.f).Name(); got != c.w {
			t.Errorf("got %s, want %s", got, c.w)
		}
	}
	for _, s := range []string{"", "fe-", "fe-a", "fe-a-", "fe-A-b", "svc-nobody", "host-", "host-operator", "root", "fe--a-b"} {
		if c, err := ParseName(s); err == nil {
			t.Errorf("%q became %+v", s, c)
		}
	}
}

func TestInInbox(t *testing.T) {
	c := Frontend("acme", "web")
	for s, want := range map[string]bool{
		"_INBOX.fe-acme-web.x": true, "_INBOX.fe-acme-web.box.d1": true, "_INBOX.fe-acme-web": false, "_INBOX.fe-acme-web.": false,
		"_INBOX.fe-acme-web2.x": false, "_INBOX.fe-acme-web.*": false, "_INBOX.fe-acme-web.>": false, "berth.v1.rpc.scheduler.delete.lifecycle": false,
		"": false, "_INBOX.fe-acme-web.a..b": false, "_INBOX.fe-acme-web.a b": false,
	} {
		if c.InInbox(s) != want {
			t.Errorf("%q: want %t", s, want)
		}
	}
}

func TestBuildersRefuseWhatIsNoToken(t *testing.T) {
	for _, bad := range []string{"a.b", "*", ">", "", "A"} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%q was built into a subject", bad)
				}
			}()
			Session(ids.Tenant(bad), "s", "active")
		}()
	}
}

// TestCatalogueIsWhole holds the catalogue to itself.
func TestCatalogueIsWhole(t *testing.T) {
	for _, s := range Streams {
		if s.MaxBytes <= 0 || s.Doc == "" || s.MaxMsgSize <= 0 {
			t.Errorf("%s: MaxBytes, MaxMsgSize and Doc are needed", s.Name)
		}
		for _, o := range Streams {
			for _, a := range s.Subjects {
				for _, b := range o.Subjects {
					if s.Name != o.Name && (Match(a, b) || Match(b, a)) {
						t.Errorf("%s and %s overlap in %s", s.Name, o.Name, a)
					}
				}
			}
		}
	}
	types := map[string]bool{}
	for _, e := range Events {
		s, ok := FindStream(e.Stream)
		if !ok || !slices.ContainsFunc(s.Subjects, func(p string) bool { return Match(p, Wildcard(e.Subject)) }) {
			t.Errorf("%s is not in stream %s", e.Subject, e.Stream)
		}
		ty := EventType(Wildcard(e.Subject))
		if types[ty] || strings.Contains(ty, "*") {
			t.Errorf("type %s is used twice", ty)
		}
		types[ty] = true
	}
	seen := map[string]bool{}
	for _, m := range Methods {
		id := m.Service + "." + m.Name
		if seen[id] || len(m.Callers) == 0 || m.Doc == "" {
			t.Errorf("method %s: twice, or without callers or doc", id)
		}
		seen[id] = true
	}
	for _, c := range Consumers {
		s, ok := FindStream(c.Stream)
		if !ok || !strings.HasPrefix(c.Durable, c.Owner+"-") || c.AckWait <= 0 || c.MaxDeliver <= 0 || c.MaxPending <= 0 {
			t.Errorf("consumer %s is not whole", c.Durable)
		}
		if c.Memory && s.Retention != WorkQueue {
			t.Errorf("consumer %s: memory would redeliver everything of a limits stream", c.Durable)
		}
	}
}

func TestEventType(t *testing.T) {
	for s, want := range map[string]string{
		Session("acme", "s", "placed"):              "dev.berth.v1.session.placed",
		TimerDue("acme", "s", "idle"):               "dev.berth.v1.timer.due",
		Audit("identity", "", ""):                   "dev.berth.v1.audit.identity",
		Request("acme", "web", "open"):              "dev.berth.v1.request.open",
		"berth.v1.session.acme.s.unknown":           "dev.berth.v1.other",
		HostEvent(ids.Host("h1"), "facts"):          "dev.berth.v1.host.facts",
		Dead("identity"):                            "dev.berth.v1.dead",
		Usage(ids.Tenant("a"), ids.SessionKey("s")): "dev.berth.v1.usage",
	} {
		if got := EventType(s); got != want {
			t.Errorf("%s: %s", s, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("berth.v1.request.acme.web.open")
	f.Add("berth.v1.rpc.host.h1.wake.scheduler")
	f.Add("berth.v1.rpc.identity.open.acme.web")
	f.Add("berth.v1.box." + string(ids.DeriveSessionKey(nil, "", "", "", "")) + ".1-2.open")
	f.Fuzz(func(t *testing.T, s string) {
		if r, err := ParseRequest(s); err == nil && Request(r.Tenant, r.Frontend, r.Verb) != s {
			t.Fatal(s)
		}
		if x, err := ParseSession(s); err == nil && Session(x.Tenant, x.Session, x.Event) != s {
			t.Fatal(s)
		}
		if x, err := ParseAudit(s); err == nil && Audit(x.Service, x.Tenant, x.Session) != s {
			t.Fatal(s)
		}
		if x, err := ParseBox(s); err == nil && BoxSubject(x.Session, x.Epoch, x.Method) != s {
			t.Fatal(s)
		}
		if x, err := ParseRPC(s); err == nil {
			again := RPC(x.Service, x.Method, x.Caller)
			if x.Service == "host" {
				again = HostRPC(x.Host, x.Method, x.Caller)
			}
			if again != s {
				t.Fatal(s)
			}
		}
		if x, err := ParseName(s); err == nil && x.Name() != s {
			t.Fatal(s)
		}
		_ = fmt.Sprint(Match(s, s), EventType(s))
	})
}

// TestWordsAreWhatTheBuildersWrite: the catalogue names the subjects that are really used.
func TestWordsAreWhatTheBuildersWrite(t *testing.T) {
	built := []string{Serving("{service}"), ServingHost("{host}")}
	if len(Words) != len(built) {
		t.Fatalf("%d words, %d builders", len(Words), len(built))
	}
	for i, w := range Words {
		if w.Subject != built[i] {
			t.Errorf("the catalogue says %s, the builder %s", w.Subject, built[i])
		}
	}
}
