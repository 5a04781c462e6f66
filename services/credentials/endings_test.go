package credentials

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials/internal/core"
)

func (w *world) end(t *testing.T, req *credentialsv1.EndGrantsRequest) error {
	t.Helper()
	_, err := bus.Invoke[*credentialsv1.EndGrantsReply](t.Context(), w.identity, "credentials", "end_grants", req)
	return err
}

func (w *world) jwks(t *testing.T, c *bus.Conn, req *credentialsv1.JwksRequest) *credentialsv1.JwksReply {
	t.Helper()
	reply, err := bus.Invoke[*credentialsv1.JwksReply](t.Context(), c, "credentials", "jwks", req)
	if err != nil {
		t.Fatal(err)
	}
	return reply
}

// Grants that were ended are dead at hosts and are not renewed, also after a restart; those of others live,
// and so do those that are given for what is asked later.
func TestEndedGrantsAreDeadAndStayDead(t *testing.T) {
	w := newWorld(t)
	asked := w.mintReq(10, 12)
	token, err := w.mint(t, asked)
	if err != nil {
		t.Fatal(err)
	}
	bobs := w.mintReq(10, 12)
	bobs.Actor.Subject = "bob"
	other, err := w.mint(t, bobs)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // idempotent
		if err := w.end(t, &credentialsv1.EndGrantsRequest{Tenant: "acme", Issuer: "https://idp", Subject: "alice", Reason: "suspended"}); err != nil {
			t.Fatal(err)
		}
	}
	check := func() {
		t.Helper()
		v := w.verifier(t, w.host)
		_, err := v.Verify(token, grant.BindingOf(ref(10, 12), "h1"), time.Now())
		if grant.KindOf(err) != errkind.Denied {
			t.Errorf("the old grant: %v", err)
		}
		if _, err := v.Verify(other, grant.BindingOf(ref(10, 12), "h1"), time.Now()); err != nil {
			t.Errorf("another user's grant: %v", err)
		}
		_, err = w.renew(t, token, nil)
		wantKind(t, err, errkind.Denied)
		_, err = w.mint(t, asked) // the wake took long
		wantKind(t, err, errkind.Denied)
		fresh, err := w.mint(t, w.mintReq(10, 12))
		if err == nil {
			_, err = w.verifier(t, w.host).Verify(fresh, grant.BindingOf(ref(10, 12), "h1"), time.Now())
		}
		if err != nil {
			t.Errorf("what was asked later: %v", err)
		}
	}
	check()
	w.stop()
	w.run(t)
	check()
}

func TestEndGrantsRefusesWhatIsNoScope(t *testing.T) {
	w := newWorld(t)
	for name, tc := range map[string]struct {
		req  *credentialsv1.EndGrantsRequest
		want errkind.Kind
	}{
		"nobody":                {&credentialsv1.EndGrantsRequest{}, errkind.Invalid},
		"no tenant":             {&credentialsv1.EndGrantsRequest{Issuer: "i", Subject: "s"}, errkind.Invalid},
		"tenant with wildcards": {&credentialsv1.EndGrantsRequest{Tenant: "*"}, errkind.Invalid},
		"subject, no issuer":    {&credentialsv1.EndGrantsRequest{Tenant: "acme", Subject: "s"}, errkind.Invalid},
		"absurd frontend":       {&credentialsv1.EndGrantsRequest{Tenant: "acme", Frontend: "a.b"}, errkind.Invalid},
		"subject of a megabyte": {&credentialsv1.EndGrantsRequest{Tenant: "acme", Issuer: "i", Subject: strings.Repeat("s", 500_000)}, errkind.TooLarge},
	} {
		wantKind(t, w.end(t, tc.req), tc.want)
		if t.Failed() {
			t.Fatal(name)
		}
	}
	if n := len(w.jwks(t, w.host, &credentialsv1.JwksRequest{}).GetEnded()); n != 0 {
		t.Errorf("%d endings were noted", n)
	}
}

// An asker that has all of it is told so in two numbers; any change is told whole, a new run counts anew,
// and a frontend hears of no user.
func TestTheFeedTellsChangesAndNothingElse(t *testing.T) {
	w := newWorld(t)
	first := w.jwks(t, w.host, &credentialsv1.JwksRequest{})
	if first.GetFeed() == "" || len(first.GetJwks()) == 0 {
		t.Fatal(first)
	}
	has := &credentialsv1.JwksRequest{Feed: first.GetFeed(), Seq: first.GetSeq()}
	if same := w.jwks(t, w.host, has); len(same.GetJwks()) > 0 || same.GetFeed() != first.GetFeed() || same.GetSeq() != first.GetSeq() || same.GetCurveKey() != "" {
		t.Errorf("nothing changed: %v", same)
	}
	if _, err := w.mint(t, w.mintReq(10, 12)); err != nil {
		t.Fatal(err)
	}
	if same := w.jwks(t, w.host, has); len(same.GetJwks()) > 0 {
		t.Errorf("a grant was minted: %v", same)
	}
	if err := w.end(t, &credentialsv1.EndGrantsRequest{Tenant: "globex", Issuer: "https://idp", Subject: "carol"}); err != nil {
		t.Fatal(err)
	}
	told := w.jwks(t, w.host, has)
	if len(told.GetEnded()) != 1 || told.GetSeq() <= first.GetSeq() || len(told.GetJwks()) == 0 {
		t.Errorf("a user was suspended: %v", told)
	}
	if n := len(w.jwks(t, w.front, &credentialsv1.JwksRequest{}).GetEnded()); n != 0 {
		t.Errorf("a frontend was told of %d users", n)
	}
	w.stop()
	w.run(t)
	if again := w.jwks(t, w.host, &credentialsv1.JwksRequest{Feed: told.GetFeed(), Seq: told.GetSeq()}); len(again.GetEnded()) != 1 || again.GetFeed() == told.GetFeed() {
		t.Errorf("after a restart: %v", again)
	}
}

// However much is revoked, the answer fits into a message of the bus, with the latest of it; what has no
// room ends more grants than were asked for, never fewer.
func TestTheListOfRevocationsFitsIntoAMessage(t *testing.T) {
	box, err := seal.RandomBox()
	if err != nil {
		t.Fatal(err)
	}
	s := &service{feed: "f1", state: core.NewState(core.Policy{TTL: time.Hour}), box: box}
	for i := range 20_000 {
		g := core.Generation{Tenant: "acme", Session: session, Generation: ids.Generation{Incarnation: 1, Index: uint64(i + 1)}}
		s.state.Revoked[g] = time.Unix(int64(i), 0)
	}
	long := strings.Repeat("s", 3000)
	for i := range 2000 {
		scope := grant.Scope{Tenant: ids.Tenant(fmt.Sprintf("t%d", i%20)), Issuer: "https://idp", Subject: fmt.Sprint(long, i)}
		if _, err := s.decide(core.EndGrants{Scope: scope}); err != nil {
			t.Fatal(err)
		}
		if s.state.Ended.Last(scope.Tenant, grant.Principal{Issuer: scope.Issuer, Subject: scope.Subject}, "web").IsZero() {
			t.Fatal("what was ended lives")
		}
	}
	reply, err := s.jwks(t.Context(), bus.Request{Call: subjects.Call{Caller: subjects.Host("h1")}}, &credentialsv1.JwksRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if n := proto.Size(reply); n > bus.MaxPayload/2 || len(reply.GetRevoked()) != maxTold || reply.GetRevoked()[0].GetGeneration().GetIndex() != 20_000 {
		t.Errorf("%d bytes, %d generations, %d endings", n, len(reply.GetRevoked()), len(reply.GetEnded()))
	}
}

// A host hears of an ending soon enough for a stream to end within a second.
func TestAHostHearsOfAnEndingWithinASecond(t *testing.T) {
	w := newWorld(t)
	feed := grant.NewFeed(func(ctx context.Context, req *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
		return bus.Invoke[*credentialsv1.JwksReply](ctx, w.host, "credentials", "jwks", req)
	}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); feed.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	token, err := w.mint(t, w.mintReq(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	v, err := feed.For(t.Context(), token)
	if err != nil {
		t.Fatal(err)
	}
	c, err := v.Authenticate(token, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	_, changed := feed.Current()
	began := time.Now()
	if err := w.end(t, &credentialsv1.EndGrantsRequest{Tenant: "acme"}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(20 * time.Second):
		t.Fatal("never heard")
	}
	if v, _ = feed.Current(); v.Alive(c) == nil {
		t.Error("the grant lives")
	}
	t.Logf("heard after %s", time.Since(began))
}

// Verbs, a life of its own and that it cannot be renewed are in the grant as they were asked for.
func TestMintedGrantsAreGoodForWhatWasAskedFor(t *testing.T) {
	w := newWorld(t)
	req := w.mintReq(10, 12)
	req.Verbs, req.Once, req.Ttl = []string{"read", "files", "read"}, true, durationpb.New(2*time.Minute)
	token, err := w.mint(t, req)
	if err != nil {
		t.Fatal(err)
	}
	c, err := w.verifier(t, w.host).Authenticate(token, time.Now())
	if err != nil || len(c.Verbs) != 2 || c.Verbs[0] != grant.VerbFiles || c.Verbs[1] != grant.VerbRead || !c.Once || c.Expires-c.IssuedAt > 120 {
		t.Errorf("%+v %v", c, err)
	}
	_, err = w.renew(t, token, nil)
	wantKind(t, err, errkind.Denied)
	plain := w.mintReq(10, 12)
	plain.Verbs = []string{"read"}
	if token, err = w.mint(t, plain); err != nil {
		t.Fatal(err)
	}
	fresh, err := w.renew(t, token, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = w.verifier(t, w.host).Authenticate(fresh, time.Now()); err != nil || len(c.Verbs) != 1 || c.Verbs[0] != grant.VerbRead {
		t.Errorf("renewed: %+v %v", c, err)
	}
	for name, change := range map[string]func(*credentialsv1.MintRequest){
		"no such verb":     func(r *credentialsv1.MintRequest) { r.Verbs = []string{"admin"} },
		"no life":          func(r *credentialsv1.MintRequest) { r.Once, r.Ttl = true, durationpb.New(0) },
		"a life of a day":  func(r *credentialsv1.MintRequest) { r.Once, r.Ttl = true, durationpb.New(24*time.Hour) },
		"a short renewing": func(r *credentialsv1.MintRequest) { r.Ttl = durationpb.New(time.Minute) },
	} {
		req := w.mintReq(10, 12)
		change(req)
		if _, err := w.mint(t, req); errs.Kind(err) != errkind.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// An operator's grant names no frontend, since no frontend has that name; whoever is no operator gets none like it.
func TestAnOperatorIsGivenAGrant(t *testing.T) {
	w := newWorld(t)
	req := w.mintReq(10, 12)
	req.Actor = &corev1.Actor{Tenant: "acme", Issuer: grant.OperatorIssuer, Subject: "operator", Frontend: "operator", Role: "operator"}
	req.Once, req.Ttl = true, durationpb.New(2*time.Minute)
	token, err := w.mint(t, req)
	if err != nil {
		t.Fatal(err)
	}
	c, err := w.verifier(t, w.host).Authenticate(token, time.Now())
	if err != nil || !c.OfOperator() || !c.Once {
		t.Errorf("%+v, %v", c, err)
	}
	for name, change := range map[string]func(*credentialsv1.MintRequest){
		"renewable":           func(r *credentialsv1.MintRequest) { r.Once, r.Ttl = false, nil },
		"of a user":           func(r *credentialsv1.MintRequest) { r.Actor.Issuer = "https://idp" },
		"of no operator":      func(r *credentialsv1.MintRequest) { r.Actor.Role = "administrator" },
		"a frontend's by it":  func(r *credentialsv1.MintRequest) { r.Actor.Frontend = "web" },
		"of another reserved": func(r *credentialsv1.MintRequest) { r.Actor.Frontend = "keeper" },
	} {
		bad := proto.CloneOf(req)
		change(bad)
		if _, err := w.mint(t, bad); err == nil {
			t.Errorf("%s: minted", name)
		}
	}
}

// Keys rotate every few seconds here: whoever holds a grant that is alive is never refused at a host that asks
// as hosts do.
func TestKeysRotateWithoutAGap(t *testing.T) {
	t.Attr("wait", "9s: tokens carry whole seconds, and three keys have to follow each other")
	t.Parallel()
	w := newWorld(t)
	w.stop()
	conn := bustest.Connect(t, w.bus, subjects.Service("credentials"))
	cfg := NewConfig()
	cfg.KeyDir = w.dir
	s, err := start(t.Context(), cfg, conn, bustest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.end(context.Background()); err != nil {
			t.Error(err)
		}
	})
	s.mu.Lock()
	s.state.Policy = core.Policy{TTL: 4 * time.Second, MaxAuth: time.Hour, Rotate: 2500 * time.Millisecond, Ahead: 1200 * time.Millisecond}
	for i := range s.state.Keys {
		s.state.Keys[i].From = time.Now()
	}
	s.mu.Unlock()
	feed := grant.NewFeed(func(ctx context.Context, req *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
		return bus.Invoke[*credentialsv1.JwksReply](ctx, w.host, "credentials", "jwks", req)
	}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); feed.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	live := map[string]time.Time{}
	kids := map[string]bool{}
	for end := time.Now().Add(9 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err := s.tick(t.Context()); err != nil {
			t.Fatal(err)
		}
		asked := time.Now() // a busy machine may be late with the answer
		token, err := w.mint(t, w.mintReq(10, 12))
		if err != nil {
			t.Fatal(err)
		}
		live[token] = asked.Add(2500 * time.Millisecond) // exp counts whole seconds
		kids[strings.SplitN(token, ".", 2)[0]] = true
		for token, until := range live {
			now := time.Now()
			if now.After(until) {
				delete(live, token)
				continue
			}
			v, err := feed.For(t.Context(), token)
			if err == nil {
				_, err = v.Authenticate(token, now)
			}
			if err != nil {
				t.Fatalf("a live grant is refused: %v", err)
			}
		}
	}
	if len(kids) < 3 {
		t.Errorf("only %d keys signed", len(kids))
	}
}

// FuzzEnding: a record is read as what was written under its name, or refused.
func FuzzEnding(f *testing.F) {
	scope := grant.Scope{Tenant: "acme", Issuer: "https://idp", Subject: "alice", Frontend: "web"}
	raw, err := json.Marshal(endedRecord{scope.Tenant, scope.Issuer, scope.Subject, scope.Frontend, timestamppb.Now().AsTime(), timestamppb.Now().AsTime()})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(endedName(scope), raw)
	f.Add("ended.acme.x", []byte("{}"))
	f.Fuzz(func(t *testing.T, name string, raw []byte) {
		e, err := parseEnding(name, raw)
		if err != nil {
			if errs.Kind(err) != errkind.DataLoss {
				t.Errorf("%v", err)
			}
			return
		}
		if e.Check() != nil || endedName(e.Scope) != name || e.At.IsZero() {
			t.Errorf("%q was read as %+v", raw, e)
		}
	})
}
