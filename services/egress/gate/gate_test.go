package gate

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/egress/internal/scope"
	"github.com/berth-dev/berth/services/egress/policy"
)

func TestAllowedTrafficLeavesAndIsRecorded(t *testing.T) {
	w := newWorld(t)
	gen := w.apply(w.rule("api.example.com", ""), 0)
	eventually(t, "the gate has the policy", func() bool { return w.bind(1).GetPolicyGeneration() == gen })
	if !w.reaches(1, "api.example.com") {
		t.Fatal("an allowed host is not reached")
	}
	if w.reaches(1, "other.example.com") || w.reaches(2, "api.example.com") {
		t.Fatal("what is not allowed, or nobody's, is let out")
	}
	list := w.audit(w.bus, func(l []*egressv1.Record) bool { return len(l) >= 2 })
	i := slices.IndexFunc(list, func(r *egressv1.Record) bool { return r.GetVerdict() == egressv1.Verdict_VERDICT_ALLOWED })
	j := slices.IndexFunc(list, func(r *egressv1.Record) bool { return r.GetVerdict() == egressv1.Verdict_VERDICT_DENIED })
	if i < 0 || j < 0 {
		t.Fatalf("%v", list)
	}
	if r := list[i]; r.GetSession().GetSession() != key(1) || r.GetActor().GetSubject() != "ann" || r.GetHost() != "h1" || r.GetAuthority() != "api.example.com" ||
		r.GetAddress() != "127.0.0.1" || r.GetRule() != "api" || r.GetPolicyGeneration() != gen || r.GetBytesIn() == 0 || r.GetBytesOut() == 0 || r.GetDoor() != "connect" {
		t.Errorf("%v", r)
	}
	if r := list[j]; r.GetAuthority() != "other.example.com" || r.GetReason() != string(policy.NoRule) || r.GetAddress() != "" {
		t.Errorf("%v", r)
	}
	events := read(t, w.bus, "BERTH_SESSIONS", "berth.v1.session.acme.*.*", func(l []*egressv1.Event) bool { return len(l) >= 2 })
	for _, e := range events {
		if e.GetWhat() == "denied" && (!strings.Contains(e.GetText(), "ask it@acme.example") || e.GetRecord() != list[j].GetId()) {
			t.Errorf("%v", e)
		}
	}
	eventually(t, "the sandbox is told what was refused", func() bool { return w.noticed("other.example.com") })
}

func TestInjectionGoesThroughTheGate(t *testing.T) {
	w := newWorld(t)
	w.apply(w.rule("api.example.com", "    inject: {secret: api-key, header: Authorization}\n"), 0)
	w.bind(1)
	eventually(t, "the secret is put in", func() bool {
		resp, err := w.get(1, "api.example.com", "/auth")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		b := make([]byte, 4)
		n, _ := resp.Body.Read(b)
		return string(b[:n]) == "true"
	})
	for _, r := range w.audit(w.bus, func(l []*egressv1.Record) bool { return len(l) > 0 }) {
		if strings.Contains(r.String(), secretValue) {
			t.Error("a record holds the secret")
		}
	}
	if roots := w.sync(time.Hour, binding(1)).GetRoots(); !strings.Contains(string(roots), "BEGIN CERTIFICATE") {
		t.Error("the host is not given the cell's roots")
	}
}

// Row 28: a policy is revoked while a download runs.
func TestRevokedPolicyResetsADownload(t *testing.T) {
	w := newWorld(t)
	gen := w.apply(w.rule("api.example.com", ""), 0)
	w.bind(1)
	eventually(t, "the host is reached", func() bool { return w.reaches(1, "api.example.com") })
	ended := w.download(1, "api.example.com")
	began := time.Now()
	w.apply(w.rule("other.example.com", ""), gen)
	select {
	case <-ended:
		if took := time.Since(began); took > time.Second {
			t.Errorf("it was reset after %s", took)
		}
	case <-time.After(patience):
		t.Fatal("it was not reset")
	}
	w.audit(w.bus, func(l []*egressv1.Record) bool {
		return slices.ContainsFunc(l, func(r *egressv1.Record) bool {
			return r.GetVerdict() == egressv1.Verdict_VERDICT_RESET && r.GetReason() == string(policy.Revoked) && r.GetBytesIn() > 0
		})
	})
}

// From the applying of a policy until it is judged by, again and again; also after the connection was lost.
func TestPolicyIsInForceWithinASecond(t *testing.T) {
	w := newWorld(t)
	gen := w.apply(w.rule("api.example.com", ""), 0)
	worst := time.Duration(0)
	for i := range 50 {
		gen = w.apply(w.rule([]string{"api.example.com", "other.example.com"}[i%2], ""), gen)
		began := time.Now()
		eventually(t, "it is in force", func() bool { return w.bind(1).GetPolicyGeneration() == gen })
		worst = max(worst, time.Since(began))
	}
	t.Logf("the slowest of 50 took %s", worst)
	if worst > time.Second {
		t.Errorf("the slowest took %s", worst)
	}
}

// What was applied while the connection to the bus was lost is in force once it is back; until then what was
// last known holds.
func TestWatchIsBegunAnewAfterALostConnection(t *testing.T) {
	w := newWorld(t)
	gen := w.apply(w.rule("api.example.com", ""), 0)
	conn := bustest.Connect(t, w.bus, subjects.Gate("h1"))
	p := newPolicies(conn, bustest.Log(t))
	p.changed, p.applied = func() { p.Of(binding(1)) }, func(time.Duration) {}
	if p.Known() {
		t.Error("the policies are known before they were read")
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); p.follow(ctx) }()
	defer func() { cancel(); <-done }()
	of := func() uint64 { return p.Of(binding(1)).Generation() }
	eventually(t, "the policy is known", func() bool { return of() == gen })
	for range 5 {
		must(t, conn.NATS().ForceReconnect())
		gen = w.apply(w.rule("other.example.com", ""), gen)
		if of() == 0 {
			t.Error("the last known policy does not hold")
		}
		eventually(t, "the later policy is known", func() bool { return of() == gen })
	}
	same := p.Of(binding(1))
	_, err := bus.Invoke[*egressv1.ApplyReply](bustest.Context(t), w.op, "egress", "apply",
		&egressv1.ApplyRequest{Scope: &egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT, Name: "another"}, Document: []byte("rules: []")})
	must(t, err)
	eventually(t, "another tenant's policy is known", func() bool { _, n, _ := p.state(); return n == 2 })
	if p.Of(binding(1)) != same || len(p.merged) != 1 {
		t.Error("a policy of another tenant is a change for this one")
	}
}

// A new bucket with as many revisions as the watch has seen replaces what is known.
func TestReplacedBucketIsNoticed(t *testing.T) {
	w := newWorld(t)
	gen := w.apply(w.rule("api.example.com", ""), 0)
	p := newPolicies(bustest.Connect(t, w.bus, subjects.Gate("h1")), bustest.Log(t))
	p.changed, p.applied = func() {}, func(time.Duration) {}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); p.follow(ctx) }()
	defer func() { cancel(); <-done }()
	of := func() uint64 { return p.Of(binding(1)).Generation() }
	eventually(t, "the policy is known", func() bool { return of() == gen })
	keeper := bustest.Connect(t, w.bus, subjects.Keeper())
	must(t, keeper.API(ctx, "STREAM.DELETE.KV_"+scope.Bucket, nil, nil))
	_, err := bus.Reconcile(ctx, keeper, bus.Declared(1))
	must(t, err)
	_, err = bus.Invoke[*egressv1.ApplyReply](bustest.Context(t), w.op, "egress", "apply",
		&egressv1.ApplyRequest{Scope: &egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT, Name: "another"}, Document: []byte("rules: []")})
	must(t, err)
	eventually(t, "the policy of the earlier bucket is gone", func() bool { _, n, _ := p.state(); return n == 1 && of() == 0 })
}

func TestRemovedPolicyLetsNothingOut(t *testing.T) {
	w := newWorld(t)
	gen := w.apply(w.rule("api.example.com", ""), 0)
	w.bind(1)
	eventually(t, "the host is reached", func() bool { return w.reaches(1, "api.example.com") })
	ended := w.download(1, "api.example.com")
	_, err := bus.Invoke[*egressv1.RemovePolicyReply](bustest.Context(t), w.op, "egress", "remove", &egressv1.RemovePolicyRequest{Scope: acme, Replaces: gen})
	must(t, err)
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("it was not reset")
	}
	if w.reaches(1, "api.example.com") {
		t.Error("it is let out without any policy")
	}
}

func TestEndedLeaseResetsAndRefusesUntilItIsRenewed(t *testing.T) {
	w := newWorld(t)
	w.apply(w.rule("api.example.com", ""), 0)
	w.sync(time.Hour, binding(1))
	eventually(t, "the host is reached", func() bool { return w.reaches(1, "api.example.com") })
	ended := w.download(1, "api.example.com")
	// The host says that its lease ends now.
	_, err := bus.InvokeGate[*egressv1.SyncReply](bustest.Context(t), w.host, "h1", "sync", &egressv1.SyncRequest{Boot: "boot", Bindings: []*egressv1.Binding{binding(1)}})
	must(t, err)
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("it was not reset")
	}
	if w.reaches(1, "api.example.com") {
		t.Error("it is let out without a lease")
	}
	if r := w.sync(300*time.Millisecond, binding(1)); r.GetClosed() != "" {
		t.Errorf("closed: %s", r.GetClosed())
	}
	ended = w.download(1, "api.example.com")
	select {
	case <-ended: // nobody renewed it
	case <-time.After(patience):
		t.Fatal("it outlived the lease")
	}
	w.sync(time.Hour, binding(1))
	if !w.reaches(1, "api.example.com") {
		t.Error("it is not let out with a lease again")
	}
}

func TestUnboundSandboxIsCutOff(t *testing.T) {
	w := newWorld(t)
	w.apply(w.rule("api.example.com", ""), 0)
	w.bind(1)
	eventually(t, "the host is reached", func() bool { return w.reaches(1, "api.example.com") })
	ended := w.download(1, "api.example.com")
	_, err := bus.InvokeGate[*egressv1.UnbindReply](bustest.Context(t), w.host, "h1", "unbind", &egressv1.UnbindRequest{Session: binding(1).Session, Sandbox: "b1"})
	must(t, err)
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("it was not reset")
	}
	if w.reaches(1, "api.example.com") {
		t.Error("it is let out after its unbind")
	}
}

// A gate that restarts knows nobody until the host's next sync, and sends what it had not sent.
func TestRestartedGateTakesUpWithTheNextSync(t *testing.T) {
	w := newWorld(t)
	w.apply(w.rule("api.example.com", ""), 0)
	w.bind(1)
	eventually(t, "the host is reached", func() bool { return w.reaches(1, "api.example.com") })
	ended := w.download(1, "api.example.com")
	w.stop()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("a download outlived the gate")
	}
	w.start()
	w.opened()
	if w.reaches(1, "api.example.com") {
		t.Error("a gate without bindings lets something out")
	}
	w.sync(time.Hour, binding(1))
	eventually(t, "the host is reached again", func() bool { return w.reaches(1, "api.example.com") })
	seen := map[string]int{}
	for _, r := range w.audit(w.bus, func(l []*egressv1.Record) bool { return len(l) >= 3 }) {
		if seen[r.GetId()]++; seen[r.GetId()] > 1 {
			t.Errorf("%s is on the bus twice", r.GetId())
		}
	}
}

// While the bus is away traffic goes on by the last known policies and records wait; when there is no more
// room nothing leaves.
func TestBusAwayFillsTheSpoolAndThenRefuses(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.SpoolBytes = 256 << 10 })
	w.apply(w.rule("api.example.com", ""), 0)
	w.sync(time.Hour, binding(1))
	eventually(t, "the host is reached", func() bool { return w.reaches(1, "api.example.com") })
	w.bus.Close()
	// At the brim one that ends makes room for another: it is full when it refuses again and again.
	n, refused := 0, 0
	for n < 10_000 && refused < 10 {
		if w.reaches(1, "api.example.com") {
			n, refused = n+1, 0
		} else {
			refused++
		}
	}
	t.Logf("%d connections were recorded without a bus", n)
	if n < 100 {
		t.Errorf("only %d connections went out without a bus", n)
	}
	if refused < 10 {
		t.Error("it goes on without a record")
	}
}

// Rows 15 and 16: nothing of a question goes to an upstream resolver, allowed or not, over either family.
func TestNoQuestionReachesAnUpstreamResolver(t *testing.T) {
	var asked atomic.Int64
	p, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	defer p.Close()
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			asked.Add(1)
			var q dns.Msg
			if q.Unpack(buf[:n]) == nil {
				m := new(dns.Msg).SetReply(&q)
				if q.Question[0].Qtype == dns.TypeA {
					m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(127, 0, 0, 1)}}
				}
				raw, _ := m.Pack()
				_, _ = p.WriteTo(raw, from)
			}
		}
	}()
	w := newWorld(t, func(c *Config) { c.Resolvers, c.Hosts = []string{p.LocalAddr().String()}, nil })
	w.apply(strings.NewReplacer("name: *", "name: any", "[*.example.com]", `["*.example.com"]`).Replace(w.rule("*.example.com", "")), 0)
	w.bind(1)
	ask := func(network, name string) (*dns.Msg, error) {
		family := door4
		c := dns.Client{Net: network, Timeout: 5 * time.Second}
		if strings.HasSuffix(network, "6") {
			family = door6
		} else if network == "udp4" {
			c.Dialer = &net.Dialer{LocalAddr: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2)}}
		} else {
			c.Dialer = &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
		}
		at := w.at.door(family, portDNS)
		if strings.HasPrefix(network, "udp") {
			at = w.at.door(network, portDNS)
		}
		m, _, err := c.Exchange(new(dns.Msg).SetQuestion(name+".", dns.TypeA), at)
		return m, err
	}
	eventually(t, "the policy is in force", func() bool { m, err := ask("udp4", "x.example.com"); return err == nil && len(m.Answer) == 1 })
	for _, network := range []string{"udp4", "udp6", "tcp4", "tcp6"} {
		for i := range 20 {
			for name, want := range map[string]int{fmt.Sprintf("secret%d.example.com", i): 1, fmt.Sprintf("secret%d.evil.test", i): 0} {
				m, err := ask(network, name)
				must(t, err)
				if len(m.Answer) != want {
					t.Errorf("%s over %s: %s", name, network, m)
				}
				for _, rr := range m.Answer {
					if a, _ := netip.AddrFromSlice(rr.(*dns.A).A); !netip.MustParsePrefix("198.18.0.0/15").Contains(a) {
						t.Errorf("%s is %s", name, a)
					}
				}
			}
		}
	}
	if n := asked.Load(); n != 0 {
		t.Fatalf("%d packets reached the upstream resolver", n)
	}
	if !w.reaches(1, "api.example.com") || asked.Load() == 0 {
		t.Errorf("an allowed host is not looked up when it is dialled: %d questions", asked.Load())
	}
}

func TestOnlyTheOwnHostBinds(t *testing.T) {
	w := newWorld(t)
	other := bustest.Connect(t, w.bus, subjects.Host("h2"))
	_, err := bus.InvokeGate[*egressv1.BindReply](bustest.Context(t), other, "h1", "bind", &egressv1.BindRequest{Binding: binding(1)})
	if !errs.Is(err, errkind.Denied) {
		t.Errorf("another host binds: %v", err)
	}
	_, err = bus.InvokeGate[*egressv1.BindReply](bustest.Context(t), w.host, "h1", "bind", &egressv1.BindRequest{})
	if !errs.Is(err, errkind.Invalid) {
		t.Errorf("an empty binding: %v", err)
	}
}

// The host's agent makes its router anew: the doors move there.
func TestDoorsFollowTheRouter(t *testing.T) {
	w := newWorld(t)
	w.apply(w.rule("api.example.com", ""), 0)
	w.bind(1)
	eventually(t, "the host is reached", func() bool { return w.reaches(1, "api.example.com") })
	ended := w.download(1, "api.example.com")
	w.at.become("")
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("a connection outlived its router")
	}
	eventually(t, "the doors are shut", func() bool { _, _, err := w.connect(1, "api.example.com"); return err != nil })
	w.at.become("2")
	eventually(t, "the host is reached again", func() bool { return w.reaches(1, "api.example.com") })
}

func TestExampleIsTheDefaults(t *testing.T) {
	raw, err := os.ReadFile("../gate.example.yaml")
	must(t, err)
	var cfg Config
	must(t, svc.ParseConfig(raw, &cfg))
	must(t, cfg.Validate())
	want := NewConfig()
	want.Host, want.Router, want.Dir = cfg.Host, cfg.Router, cfg.Dir
	if len(cfg.Resolvers) > 0 || len(cfg.Hosts) > 0 || len(cfg.Roots) > 0 {
		t.Errorf("the example has lists that are not empty: %+v", cfg)
	}
	cfg.Resolvers, cfg.Hosts, cfg.Roots = nil, nil, nil
	if !reflect.DeepEqual(cfg, want) {
		t.Errorf("the example is %+v, the defaults are %+v", cfg, want)
	}
}

func TestConfigThatCannotWorkIsRefused(t *testing.T) {
	good := func() Config {
		c := NewConfig()
		c.Host, c.Router, c.Dir = "h1", "/run/router", "/var/lib/gate"
		return c
	}
	c := good()
	must(t, c.Validate())
	for name, change := range map[string]func(*Config){
		"host":       func(c *Config) { c.Host = "gate-h1" },
		"router":     func(c *Config) { c.Router = "router" },
		"dir":        func(c *Config) { c.Dir = "" },
		"spool":      func(c *Config) { c.SpoolBytes = 1 },
		"when_full":  func(c *Config) { c.WhenFull = "drop" },
		"max":        func(c *Config) { c.AllConnections = 1 },
		"dial":       func(c *Config) { c.DialTimeout = 0 },
		"resolver":   func(c *Config) { c.Resolvers = []string{"dns.example.com"} },
		"hosts name": func(c *Config) { c.Hosts = map[string][]string{"API.example.com": {"1.1.1.1"}} },
		"hosts addr": func(c *Config) { c.Hosts = map[string][]string{"api.example.com": {"x"}} },
		"roots":      func(c *Config) { c.Roots = []string{"/nowhere.pem"} },
	} {
		c := good()
		change(&c)
		if c.Validate() == nil {
			t.Errorf("%s: it is taken", name)
		}
	}
}
