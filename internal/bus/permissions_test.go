package bus_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

var (
	hostH1, hostH2 = subjects.Host("h1"), subjects.Host("h2")
	// two frontends whose names would be one if dashes were not doubled
	dashA, dashB = subjects.Frontend("a-b", "c"), subjects.Frontend("a", "b-c")
	// a user of acme with a login of its own
	acmeAnn = subjects.Frontend("acme", subjects.UserFrontend("https://login.example.com", "ann"))
)

func identities() []subjects.Caller {
	out := []subjects.Caller{subjects.Operator(), subjects.Keeper(), hostH1, hostH2, subjects.Gate("h1"), subjects.Gate("h2"), acmeWeb, acmeAnn, otherWeb, dashA, dashB}
	for _, s := range subjects.Services {
		out = append(out, subjects.Service(s))
	}
	return out
}

// probe logs in and collects what the server refuses.
type probe struct {
	nc      *nats.Conn
	mu      sync.Mutex
	refused map[string]bool
}

func newProbe(t *testing.T, e *bus.Embedded, c subjects.Caller) *probe {
	p := &probe{refused: map[string]bool{}}
	conn := bustest.Connect(t, e, c, bus.WithNATS(nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if _, rest, ok := strings.Cut(err.Error(), " to \""); ok && errors.Is(err, nats.ErrPermissionViolation) {
			subject, _, _ := strings.Cut(rest, "\"")
			p.refused[subject] = true
		}
	})))
	p.nc = conn.NATS()
	return p
}

func (p *probe) take(t *testing.T) map[string]bool {
	t.Helper()
	if err := p.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	// errors are handed over by a goroutine of nats.go: wait for the last one
	marker := fmt.Sprintf("refused.for.sure.%d", time.Now().UnixNano())
	if err := p.nc.Publish(marker, nil); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		if p.refused[marker] {
			out := p.refused
			p.refused = map[string]bool{}
			p.mu.Unlock()
			delete(out, marker)
			return out
		}
		p.mu.Unlock()
		if time.Now().After(deadline) {
			t.Fatal("the marker was not refused")
		}
	}
}

type want func(subjects.Caller) bool

func only(list ...subjects.Caller) want {
	return func(c subjects.Caller) bool {
		for _, x := range list {
			if x == c {
				return true
			}
		}
		return false
	}
}

func service(name string) want { return only(subjects.Service(name)) }

// publishes lists concrete subjects of the whole catalogue with who may
// publish each. It states the rules of the design, not those of the generator.
func publishes() map[string]want {
	w := map[string]want{}
	// events: their owner alone, with its own names
	for _, e := range subjects.Events {
		fill := func(t, f, h, s string) string {
			return strings.NewReplacer("{tenant}", t, "{frontend}", f, "{host}", h, "{service}", s, "{session}", string(session), "{kind}", "idle").Replace(e.Subject)
		}
		switch e.Owner {
		case "frontend":
			w[fill("acme", "web", "", "")], w[fill("other", "web", "", "")] = only(acmeWeb), only(otherWeb)
			w[fill("acme", "app", "", "")], w[fill("a-b", "c", "", "")], w[fill("a", "b-c", "", "")] = only(), only(dashA), only(dashB)
		case "hostagent":
			w[fill("acme", "", "h1", "")] = only(hostH1, hostH2)
			if strings.Contains(e.Subject, "{host}") {
				w[fill("", "", "h1", "")], w[fill("", "", "h2", "")] = only(hostH1), only(hostH2)
			}
		case "gate":
			w[fill("acme", "", "", "")] = role(subjects.RoleGate)
		case "every service":
			for _, s := range subjects.Services {
				w[fill("", "", "", s)] = service(s)
			}
			w[fill("", "", "", "hostagent")] = only()
		case "server":
			w[fill("acme", "", "", "")] = only()
		default:
			w[fill("acme", "web", "h1", "")] = service(e.Owner)
		}
	}
	w[subjects.Session("acme", session, "invented")] = only()
	// calls: the callers of the method, each with its own token
	for _, m := range subjects.Methods {
		for _, c := range identities() {
			s := subjects.Prefix + "rpc." + m.Service + "." + m.Name + "." + c.Token()
			switch m.Service {
			case "host":
				s = subjects.HostRPC("h1", m.Name, c)
			case "gate":
				s = subjects.GateRPC("h1", m.Name, c)
			}
			own := m.CallersHost(c) == "*" || c.Host == "h1"
			if m.Allows(c) && own {
				w[s] = only(c)
			} else {
				w[s] = only()
			}
		}
	}
	// data plane
	// whoever may have a grant: operators get one by identity.operator_attach
	holdsGrants := func(c subjects.Caller) bool {
		return c.Role == subjects.RoleFrontend || c.Role == subjects.RoleOperator
	}
	w[subjects.BoxSubject(session, ids.Epoch{Incarnation: 1, Index: 2}, "open")] = holdsGrants
	w[subjects.BoxSubject(session, ids.Epoch{Incarnation: 1, Index: 2}, "in")] = holdsGrants
	w[subjects.BoxSubject(session, ids.Epoch{Incarnation: 1, Index: 2}, "peek")] = only()
	w[subjects.BoxFrames(acmeWeb, "d1")] = func(c subjects.Caller) bool { return c.Role == subjects.RoleHost || c == subjects.Service("identity") }
	// that a service serves: itself alone
	for _, s := range subjects.Services {
		w[subjects.Serving(s)] = service(s)
	}
	w[subjects.Serving("host")] = only()
	w[subjects.ServingHost("h1")] = func(c subjects.Caller) bool { return c.Role == subjects.RoleHost && c.Host == "h1" }
	// inboxes: identity answers the durable door; nobody writes to a service unasked
	w[acmeWeb.Inbox()+".x"] = service("identity")
	w[subjects.Service("scheduler").Inbox()+".x"] = only()
	w[subjects.Operator().Inbox()+".x"] = only()
	return w
}

func role(r subjects.Role) want { return func(c subjects.Caller) bool { return c.Role == r } }

// jetStream lists calls of JetStream's API, acknowledgements and buckets.
func jetStream() map[string]want {
	keeper, operator := subjects.Keeper(), subjects.Operator()
	w := map[string]want{
		"$JS.API.STREAM.CREATE.EVIL":                                only(keeper),
		"$JS.API.STREAM.UPDATE.BERTH_SESSIONS":                      only(keeper),
		"$JS.API.STREAM.MSG.GET.BERTH_SESSIONS":                     only(keeper, operator),
		"$JS.API.STREAM.MSG.GET.BERTH_REQUESTS":                     only(keeper),
		"$JS.API.CONSUMER.CREATE.BERTH_SESSIONS.tail":               only(keeper),
		"$JS.API.CONSUMER.CREATE.BERTH_SESSIONS.tail.berth.v1.x":    only(keeper, operator),
		"$JS.API.CONSUMER.CREATE.BERTH_SESSIONS.lifecycle-sessions": only(keeper),
		"$JS.API.CONSUMER.DELETE.BERTH_SESSIONS.x":                  only(keeper, operator),
		"$JS.API.STREAM.MSG.DELETE.BERTH_AUDIT":                     only(keeper),
		"$SRV.PING":                                                 only(operator),
		"$SYS.REQ.SERVER.PING":                                      only(), "$SYS.REQ.ACCOUNT.APP.CONNZ": only(),
		"$JS.EVENT.ADVISORY.FORGED": only(), "berth.v1": only(), "elsewhere": only(), "$KV.OTHER.x": only(),
		"$JS.API.STREAM.PURGE.BERTH_TIMERS": only(keeper, subjects.Service("lifecycle")),
	}
	// an operator may make readers of a stream, hence this form for it too
	w["$JS.API.CONSUMER.CREATE.BERTH_SESSIONS.tail"] = only(keeper, operator)
	for _, d := range subjects.Consumers {
		n := d.Stream + "." + d.Durable
		w["$JS.API.CONSUMER.MSG.NEXT."+n] = only(keeper, subjects.Service(d.Owner))
		w["$JS.API.CONSUMER.INFO."+n] = only(keeper, operator, subjects.Service(d.Owner))
		w["$JS.API.CONSUMER.DELETE."+n] = only(keeper)
		w["$JS.ACK."+n+".1.1.1.1.0"] = service(d.Owner)
		w["$JS.ACK._.hash."+n+".1.1.1.1.0"] = service(d.Owner)
	}
	for _, b := range subjects.Buckets {
		w["$KV."+b.Name+".probe"] = service(b.Owner)
		reads := only(keeper, subjects.Service(b.Owner))
		if b.Name == "BERTH_EGRESS" { // gates read what they judge by
			reads = only(keeper, subjects.Service(b.Owner), subjects.Gate("h1"), subjects.Gate("h2"))
		}
		w["$JS.API.DIRECT.GET.KV_"+b.Name+".$KV."+b.Name+".probe"] = reads
		w["$JS.API.STREAM.MSG.DELETE.KV_"+b.Name] = only(keeper, subjects.Service(b.Owner))
		w["$JS.API.CONSUMER.CREATE.KV_"+b.Name+".w.x"] = reads
	}
	for _, o := range subjects.ObjectStores {
		host := role(subjects.RoleHost)
		w["$O."+o.Name+".C.probe"], w["$O."+o.Name+".M.probe"], w["$O.OTHER.M.probe"] = host, host, only()
		for _, verb := range []string{"STREAM.INFO", "STREAM.PURGE", "STREAM.MSG.GET", "DIRECT.GET"} {
			w["$JS.API."+verb+".OBJ_"+o.Name] = func(c subjects.Caller) bool { return c == keeper || host(c) }
		}
		for _, verb := range []string{"STREAM.UPDATE", "STREAM.DELETE", "STREAM.MSG.DELETE"} {
			w["$JS.API."+verb+".OBJ_"+o.Name] = only(keeper)
		}
		w["$JS.API.CONSUMER.CREATE.OBJ_"+o.Name+".w.x"] = only(keeper)
	}
	return w
}

func TestPublishPermissionsOfTheWholeCatalogue(t *testing.T) {
	publishTheCatalogue(t, bustest.Start(t, identities()...), identities())
}

func publishTheCatalogue(t *testing.T, e *bus.Embedded, all []subjects.Caller) {
	t.Helper()
	table := publishes()
	for s, w := range jetStream() {
		table[s] = w
	}
	checked, refusals := 0, 0
	for _, c := range all {
		p := newProbe(t, e, c)
		for s := range table {
			// an invalid body: JetStream's API refuses it and changes nothing
			if err := p.nc.Publish(s, []byte("{")); err != nil {
				t.Fatal(err)
			}
		}
		refused := p.take(t)
		for s, w := range table {
			checked++
			if refused[s] {
				refusals++
			}
			if w(c) == refused[s] {
				t.Errorf("%s publishes to %s: allowed %t, want %t", c, s, !refused[s], w(c))
			}
		}
	}
	t.Logf("%d pairs of identity and subject, %d refused", checked, refusals)
}

func TestSubscribePermissionsOfTheWholeCatalogue(t *testing.T) {
	subscribeToTheCatalogue(t, bustest.Start(t, identities()...), identities())
}

func subscribeToTheCatalogue(t *testing.T, e *bus.Embedded, all []subjects.Caller) {
	t.Helper()
	operator := subjects.Operator()
	table := map[string]want{
		">": only(), "berth.v1.>": only(), "_INBOX.>": only(), "$KV.>": only(), "$JS.API.>": only(), "$SYS.>": only(),
		"berth.v1.request.acme.web.open": only(), "berth.v1.request.>": only(), "berth.v1.rpc.>": only(),
		"berth.v1.session.acme.*.*":   only(acmeWeb, operator),
		"berth.v1.session.*.*.*":      only(operator),
		"berth.v1.audit.*.*.*":        only(operator),
		"berth.v1.audit.identity.*.*": only(operator),
		"berth.v1.box.*.*.open":       role(subjects.RoleHost),
		"berth.v1.box.*.*.in":         role(subjects.RoleHost),
		"berth.v1.box.>":              only(),
		"$JS.EVENT.ADVISORY.>":        only(operator, subjects.Keeper()),
		"berth.v1.timer.due.*.*.*":    only(operator),
		"berth.v1.serving.*": func(c subjects.Caller) bool {
			return c.Role == subjects.RoleService || c.Role == subjects.RoleHost || c.Role == subjects.RoleGate || c == operator
		},
		"berth.v1.serving.host.*":       only(subjects.Service("scheduler"), subjects.Service("lifecycle"), subjects.Service("pool"), subjects.Gate("h1"), subjects.Gate("h2"), operator),
		"$JS.API.CONSUMER.MSG.NEXT.*.*": only(),
	}
	for _, c := range all {
		table[c.Inbox()+".>"] = only(c)
		table[c.Inbox()+".x"] = only(c)
	}
	for _, m := range subjects.Methods {
		server := only(subjects.Service(m.Service))
		if m.Service == "bus" {
			server = only(subjects.Keeper())
		}
		if subjects.PerHost(m.Service) {
			one, two := hostH1, hostH2
			if m.Service == "gate" {
				one, two = subjects.Gate("h1"), subjects.Gate("h2")
			}
			for _, s := range m.Endpoints("h2") {
				table[s] = only(two)
			}
			server = only(one)
		}
		for _, s := range m.Endpoints("h1") {
			table[s] = server
		}
	}
	for _, c := range all {
		p := newProbe(t, e, c)
		for s := range table {
			_, _ = p.nc.SubscribeSync(s)
		}
		refused := p.take(t)
		for s, w := range table {
			if w(c) == refused[s] {
				t.Errorf("%s subscribes to %s: allowed %t, want %t", c, s, !refused[s], w(c))
			}
		}
	}
	t.Logf("%d pairs of identity and subject", len(table)*len(all))
}

func TestNobodyLogsInWithoutAKey(t *testing.T) {
	t.Parallel() // the refusal in process takes the server's write deadline
	e := bustest.Start(t)
	stranger, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	pub, _ := stranger.PublicKey()
	for what, opts := range map[string][]nats.Option{
		"nobody":         nil,
		"a password":     {nats.UserInfo("operator", "operator")},
		"a token":        {nats.Token("x")},
		"a strange nkey": {nats.Nkey(pub, stranger.Sign)},
	} {
		nc, err := nats.Connect(e.URL(), append(opts, bustest.Trust(e))...)
		if err == nil {
			nc.Close()
			t.Errorf("%s logged in", what)
		} else if !strings.Contains(strings.ToLower(err.Error()), "authorization") {
			t.Errorf("%s: %v", what, err)
		}
	}
	seed, _ := stranger.Seed()
	op, err := e.Login(subjects.Operator())
	if err != nil {
		t.Fatal(err)
	}
	_, err = bus.Connect(context.Background(), bus.Login{URL: e.URL(), Name: "operator", Seed: string(seed), CA: op.CA})
	if !errs.Is(err, errkind.Unauthenticated) {
		t.Errorf("got %v", err)
	}
	_, err = bus.Connect(context.Background(), bus.Login{Name: "operator", Seed: string(seed)}, bus.InProcess(e.Server))
	if !errs.Is(err, errkind.Unauthenticated) {
		t.Errorf("in process: got %v", err)
	}
}

func TestKeysAreKeptAndPrivate(t *testing.T) {
	dir := t.TempDir()
	first, err := bus.EnsureKeys(dir, "nats://a", []subjects.Caller{acmeWeb})
	if err != nil {
		t.Fatal(err)
	}
	second, err := bus.EnsureKeys(dir, "nats://b", []subjects.Caller{acmeWeb, hostH1})
	if err != nil || second[0] != first[0] || second[1] == first[0] {
		t.Fatalf("%v %v %v", first, second, err)
	}
	l, err := bus.ReadLogin(bus.LoginPath(dir, acmeWeb))
	if err != nil || l.URL != "nats://b" || l.Name != "fe-acme-web" || l.Inbox != "_INBOX.fe-acme-web" {
		t.Fatalf("%+v %v", l, err)
	}
	err = filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err == nil && info.Mode().Perm()&0o077 != 0 && path != dir {
			t.Errorf("%s is %s", path, info.Mode())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestUsersAreAddedAndRemovedWhileRunning(t *testing.T) {
	e := bustest.Start(t)
	if _, err := e.Connect(bustest.Context(t), acmeWeb); err == nil {
		t.Fatal("logged in before it was allowed")
	}
	if err := e.Allow(acmeWeb); err != nil {
		t.Fatal(err)
	}
	c := bustest.Connect(t, e, acmeWeb)
	if c.Self() != acmeWeb {
		t.Fatal(c.Self())
	}
}

// A handler's answer goes to the caller's own inbox or nowhere: a frontend
// must not have identity speak to scheduler, or write an event, through the
// reply subject.
func TestNoAnswerToAForeignReplySubject(t *testing.T) {
	e := bustest.Start(t, acmeWeb, otherWeb)
	idn := bustest.Connect(t, e, subjects.Service("identity"))
	fe := bustest.Connect(t, e, acmeWeb)
	op := bustest.Connect(t, e, subjects.Operator())
	ctx := bustest.Context(t)
	svc, err := idn.Serve(ctx, bus.ServiceConfig{Name: "identity"})
	if err != nil {
		t.Fatal(err)
	}
	calls := make(chan string, 10)
	if err := svc.HandleRaw("keys", func(_ context.Context, r bus.Request, _ []byte) ([]byte, error) {
		calls <- r.Caller.Name()
		return []byte("key"), nil
	}); err != nil {
		t.Fatal(err)
	}
	target := subjects.Session("acme", session, "resume")
	got, err := op.NATS().SubscribeSync(target)
	if err != nil {
		t.Fatal(err)
	}
	_ = op.NATS().Flush()
	subject := subjects.RPC("identity", "keys", acmeWeb)
	for _, reply := range []string{target, subjects.RPC("lifecycle", "delete", subjects.Service("identity")), otherWeb.Inbox() + ".x"} {
		if err := fe.NATS().PublishRequest(subject, reply, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := fe.NATS().Publish(subject, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := fe.CallRaw(ctx, subject, nil, ""); err != nil {
		t.Fatal(err)
	}
	if n := len(calls); n != 1 {
		t.Errorf("the handler ran %d times", n)
	}
	if m, err := got.NextMsg(50 * time.Millisecond); err == nil {
		t.Errorf("an event was forged: %q", m.Data)
	}
}
