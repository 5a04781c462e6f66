package callout

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
)

func TestWhoIsRegisteredLogsInAndNobodyElse(t *testing.T) {
	w := newWorld(t)
	w.serve(t, lives)
	for _, c := range []subjects.Caller{web, cli, evil, host, subjects.Operator()} {
		bustest.Connect(t, w.Embedded, c)
	}
	w.book.suspend(evil, true)
	if _, err := w.dial(t, w.login(t, evil)); !errs.Is(err, errkind.Unauthenticated) {
		t.Errorf("a suspended frontend: %v", err)
	}
	if _, err := w.user(t, "good"); err != nil {
		t.Errorf("a user: %v", err)
	}
	if _, err := w.user(t, "bad"); !errs.Is(err, errkind.Unauthenticated) {
		t.Errorf("a bad token: %v", err)
	}
}

// Whoever shows no signature of this connection's nonce, or shows two things at once, is nobody.
func TestProofsThatAreNone(t *testing.T) {
	w := newWorld(t)
	w.serve(t, lives)
	l := w.login(t, web)
	pair, err := nkeys.FromSeed([]byte(l.Seed))
	if err != nil {
		t.Fatal(err)
	}
	pub, _ := pair.PublicKey()
	other, _ := nkeys.CreateUser()
	strange, _ := other.PublicKey()
	old := func([]byte) ([]byte, error) { return pair.Sign([]byte("the nonce of another connection")) }
	for what, opts := range map[string][]nats.Option{
		"a registered nkey, signed by another": {nats.Nkey(pub, other.Sign)},
		"a signature over another nonce":       {nats.Nkey(pub, old)},
		"an nkey that nobody registered":       {nats.Nkey(strange, other.Sign)},
		"a name and a password":                {nats.UserInfo("fe-acme-web", "x")},
		"a name alone":                         {nats.Name("fe-acme-web")},
		"an nkey and a token":                  {nats.Nkey(pub, pair.Sign), nats.Token("good")},
	} {
		nc, err := nats.Connect(l.URL, append(opts, nats.RootCAs(ca(t, l)), nats.Timeout(20*time.Second))...)
		if err == nil {
			nc.Close()
			t.Errorf("%s is let in", what)
		} else if !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func ca(t *testing.T, l bus.Login) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, []byte(l.CA), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// A login ends by itself; the client logs in again and goes on.
func TestALoginEndsAndIsRenewed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	short := lives
	short.Frontends = 2 * time.Second
	w.serve(t, short)
	lost, back := make(chan struct{}, 10), make(chan struct{}, 10)
	c := bustest.Connect(t, w.Embedded, web, bus.WithNATS(
		nats.DisconnectErrHandler(func(*nats.Conn, error) { lost <- struct{}{} }), nats.ReconnectHandler(func(*nats.Conn) { back <- struct{}{} })))
	sub, err := c.NATS().SubscribeSync(web.Inbox() + ".x")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, ch := range []chan struct{}{lost, back} {
			select {
			case <-ch:
			case <-time.After(20 * time.Second):
				t.Fatal("the login did not end, or was not renewed")
			}
		}
	}
	idn := bustest.Connect(t, w.Embedded, subjects.Service("identity"))
	if err := idn.NATS().Publish(web.Inbox()+".x", []byte("still here")); err != nil {
		t.Fatal(err)
	}
	if m, err := sub.NextMsg(20 * time.Second); err != nil || string(m.Data) != "still here" {
		t.Errorf("a subscription did not outlive the login: %v", err)
	}
}

// Whoever is suspended is off the bus (how soon: make bench-identity) and does not come back; others
// stay, and services most of all.
func TestASuspensionDisconnects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(t, lives)
	warden := NewWarden(bustest.Connect(t, w.Embedded, subjects.Warden()).NATS(), bustest.Log(t))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); warden.Watch(ctx, w.book.next, w.book.over) }()
	t.Cleanup(func() { stop(); <-done })
	bad, other, svc := bustest.Connect(t, w.Embedded, web), bustest.Connect(t, w.Embedded, cli), bustest.Connect(t, w.Embedded, subjects.Service("scheduler"))
	user, err := w.user(t, "good")
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	user.NATS().SetDisconnectErrHandler(func(*nats.Conn, error) { close(over); user.NATS().SetDisconnectErrHandler(nil) })
	w.book.suspend(web, true)
	t.Logf("disconnected after %s", eventually(t, "the frontend is disconnected", 20*time.Second, func() bool { return !bad.Connected() }))
	w.book.suspend(ann, true)
	select {
	case <-over:
	case <-time.After(20 * time.Second):
		t.Error("the user is still connected")
	}
	if !other.Connected() || !svc.Connected() || other.NATS().Reconnects != 0 || svc.NATS().Reconnects != 0 {
		t.Error("somebody else was disconnected")
	}
	w.book.suspend(web, false)
	eventually(t, "who is let in again comes back", 30*time.Second, bad.Connected)
}

// A login that was being let in while its user was suspended does not stay.
func TestALoginUnderWayDuringASuspensionDoesNotStay(t *testing.T) {
	w := newWorld(t)
	asked, goOn := make(chan struct{}), make(chan struct{})
	w.book.tokens = func(context.Context, string) (Guest, error) {
		close(asked)
		<-goOn // by what was known before
		return Guest{Caller: ann, Mark: IssuerMark("https://issuer"), Expires: time.Now().Add(time.Hour)}, nil
	}
	w.serve(t, lives)
	warden := NewWarden(bustest.Connect(t, w.Embedded, subjects.Warden()).NATS(), bustest.Log(t))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); warden.Watch(ctx, w.book.next, w.book.over) }()
	t.Cleanup(func() { stop(); <-done })
	l, in := w.login(t, web), make(chan *nats.Conn, 1)
	go func() {
		nc, err := nats.Connect(l.URL, nats.Token("good"), nats.RootCAs(ca(t, l)), nats.Timeout(20*time.Second), nats.NoReconnect(),
			nats.CustomInboxPrefix(ann.Inbox()))
		if err != nil {
			t.Error(err)
		}
		in <- nc
	}()
	<-asked
	w.book.suspend(ann, true)
	time.AfterFunc(500*time.Millisecond, func() { close(goOn) }) // the first looks have found nobody
	nc := <-in
	if nc == nil {
		t.FailNow()
	}
	t.Cleanup(nc.Close)
	t.Logf("disconnected after %s", eventually(t, "the user is disconnected", 20*time.Second, nc.IsClosed))
}

// A token of a megabyte is not read to its end, and the server lives.
func TestATokenOfAMegabyteIsRefused(t *testing.T) {
	w := newWorld(t)
	w.serve(t, lives)
	l := w.login(t, web)
	nc, err := nats.Connect(l.URL, nats.Token(strings.Repeat("x", 1<<20)), nats.RootCAs(ca(t, l)), nats.Timeout(20*time.Second), nats.NoReconnect())
	if err == nil {
		nc.Close()
		t.Error("it is let in")
	} else if strings.Contains(err.Error(), "xxx") {
		t.Error("the token is in the error")
	}
	if _, err := w.user(t, "good"); err != nil {
		t.Errorf("nobody else gets in any more: %v", err)
	}
}

// Servers' questions hold signatures and tokens: nobody can read them but identity.
func TestQuestionsAndAnswersAreSealed(t *testing.T) {
	w := newWorld(t)
	spy := bustest.Connect(t, w.Embedded, subjects.Callout()).NATS() // no other identity can hear them at all
	seen := make(chan []byte, 10)
	if _, err := spy.Subscribe(bus.CalloutSubject, func(m *nats.Msg) { seen <- m.Data }); err != nil {
		t.Fatal(err)
	}
	if err := spy.Flush(); err != nil {
		t.Fatal(err)
	}
	w.serve(t, lives)
	if _, err := w.user(t, "good"); err != nil {
		t.Fatal(err)
	}
	data := <-seen
	if bytes.HasPrefix(data, []byte("eyJ")) || !bytes.HasPrefix(data, []byte("xkv1")) {
		t.Errorf("the question is in the clear: %.8q", data)
	}
	for _, c := range []subjects.Caller{subjects.Service("identity"), subjects.Operator(), web, subjects.Warden()} {
		conn := bustest.Connect(t, w.Embedded, c)
		sub, err := conn.NATS().SubscribeSync(bus.CalloutSubject)
		if err == nil {
			if err = conn.NATS().Flush(); err == nil {
				_, err = sub.NextMsg(time.Second)
			}
		}
		if err == nil || errors.Is(err, nats.ErrTimeout) {
			t.Errorf("%s listens to questions: %v", c, err)
		}
	}
}

// An issuer that does not answer keeps users of its own waiting, and no login by nkey.
func TestASlowIssuerHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	asked, answer := make(chan struct{}, 1000), make(chan struct{})
	w.book.tokens = func(context.Context, string) (Guest, error) {
		asked <- struct{}{}
		<-answer
		return Guest{}, errs.E("verify", errkind.Unavailable, "", "the issuer does not answer")
	}
	w.serve(t, lives)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var waiting sync.WaitGroup
	l := w.login(t, web)
	for range 2 * workers {
		waiting.Go(func() {
			c, err := bus.Connect(ctx, bus.Login{URL: l.URL, CA: l.CA, Name: ann.Name()}, bus.WithLogger(bustest.Log(t)),
				bus.WithToken(func() string { return "slow" }), bus.WithNATS(nats.Timeout(bus.CalloutTime)))
			if err == nil {
				c.Close()
				t.Error("a user was let in without an answer of its issuer")
			}
		})
	}
	for range 2 * workers {
		<-asked
	}
	for range 20 { // none of those has its answer meanwhile
		c, err := w.dial(t, w.login(t, host))
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	close(answer)
	cancel()
	waiting.Wait()
}

// With one responder that is dead but takes its share of the questions, logins go through the other, and
// who is connected notices nothing.
func TestADeadResponderLocksNobodyOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	alive := w.serve(t, lives)
	conn := bustest.Connect(t, w.Embedded, web)
	dead := bustest.Connect(t, w.Embedded, subjects.Callout()).NATS()
	if _, err := dead.QueueSubscribe(bus.CalloutSubject, "identity", func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	if err := dead.Flush(); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		c, err := w.dial(t, w.login(t, cli)) // tries again after each second
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	if err := alive.Stop(bustest.Context(t)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*bus.CalloutTime)
	defer cancel()
	if c, err := bus.Connect(ctx, w.login(t, cli), bus.WithLogger(bustest.Log(t))); err == nil {
		c.Close()
		t.Error("somebody was let in while nobody answers")
	} else if errs.Is(err, errkind.Unauthenticated) {
		t.Errorf("nobody answered, and the client takes it for a refusal: %v", err)
	}
	if !conn.Connected() || conn.NATS().Reconnects != 0 {
		t.Error("who was connected lost the connection")
	}
}

// More connections than a server lists at a time are looked at all the same.
func TestASweepLooksAtEveryConnection(t *testing.T) {
	w := newWorld(t)
	w.serve(t, lives)
	nc := bustest.Connect(t, w.Embedded, subjects.Warden()).NATS()
	warden := NewWarden(nc, bustest.Log(t))
	defer func(n int) { page = n }(page)
	page = 2
	for _, c := range []subjects.Caller{web, cli, evil, host, subjects.Operator(), web, cli} {
		bustest.Connect(t, w.Embedded, c)
	}
	seen := map[subjects.Caller]int{}
	n, err := warden.Sweep(t.Context(), func(c Connected) (string, bool) {
		if _, ok := c.Mark.NKey(); !ok {
			t.Errorf("%s has no mark", c.Caller)
		}
		seen[c.Caller]++
		return "all of acme", c.Caller.Tenant == "acme"
	})
	if err != nil || n != 4 || seen[web] != 2 || seen[cli] != 2 || seen[evil] != 1 || seen[host] != 1 || seen[subjects.Operator()] != 1 {
		t.Errorf("%d ended, %v seen, %v", n, seen, err)
	}
}

func TestNobodyOutlivesTheToken(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		span := func(name string) time.Duration {
			return time.Duration(rapid.Int64Range(int64(2*time.Second), int64(48*time.Hour)).Draw(t, name))
		}
		l := Lives{Hosts: span("hosts"), Frontends: span("frontends"), Operators: span("operators"), Users: span("users")}
		now := time.Unix(rapid.Int64Range(0, 4e9).Draw(t, "now"), 0)
		var token time.Time
		if rapid.Bool().Draw(t, "token") {
			token = now.Add(time.Duration(rapid.Int64Range(int64(-time.Hour), int64(96*time.Hour)).Draw(t, "left")))
		}
		c := rapid.SampledFrom([]subjects.Caller{web, ann, host, subjects.Operator()}).Draw(t, "who")
		life := map[subjects.Caller]time.Duration{web: l.Frontends, ann: l.Users, host: l.Hosts, subjects.Operator(): l.Operators}[c]
		end, err := l.until(c, token, now, rapid.Float64Range(0, 1).Draw(t, "random"))
		if err != nil {
			if c != ann && token.IsZero() {
				t.Fatalf("refused: %v", err)
			}
			return
		}
		if end.After(now.Add(life)) || !token.IsZero() && end.After(token) || end.Before(now.Add(time.Second)) {
			t.Fatalf("ends %s after now", end.Sub(now))
		}
		if token.IsZero() && end.Before(now.Add(life-life/10-time.Microsecond)) {
			t.Fatalf("ends %s early", now.Add(life).Sub(end))
		}
		if c == ann && token.IsZero() {
			t.Fatal("a user without an expiry was let in")
		}
	})
	for _, c := range []subjects.Caller{subjects.Service("identity"), subjects.Keeper(), subjects.Callout(), subjects.Warden(), {}} {
		if _, err := lives.until(c, time.Time{}, time.Now(), 0); err == nil {
			t.Errorf("%q is let in by the callout", c)
		}
	}
}
