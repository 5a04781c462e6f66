package callout

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
)

func TestMain(m *testing.M) {
	bustest.Child()
	os.Exit(m.Run())
}

var (
	web  = subjects.Frontend("acme", "web")
	cli  = subjects.Frontend("acme", "cli")
	evil = subjects.Frontend("globex", "web")
	host = subjects.Host("h1")
	ann  = subjects.Frontend("acme", subjects.UserFrontend("https://issuer", "ann"))
)

// book is who may log in.
type book struct {
	mu      sync.Mutex
	nkeys   map[string]subjects.Caller
	shut    map[subjects.Caller]bool
	changed chan struct{}
	tokens  func(ctx context.Context, token string) (Guest, error)
}

func (b *book) ByNKey(q bus.Question) (Guest, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c, ok := b.nkeys[q.NKey]
	if !ok {
		return Guest{}, errors.New("this nkey is not registered")
	}
	if b.shut[c] {
		return Guest{Caller: c}, errors.New("suspended")
	}
	return Guest{Caller: c, Mark: NKeyMark(q.NKey)}, nil
}

func (b *book) ByToken(ctx context.Context, token string) (Guest, error) {
	return b.tokens(ctx, token)
}

func (b *book) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed
}

func (b *book) over() Over {
	return func(c Connected) (string, bool) {
		b.mu.Lock()
		defer b.mu.Unlock()
		return "suspended", b.shut[c.Caller]
	}
}

func (b *book) suspend(c subjects.Caller, is bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shut[c] = is
	close(b.changed)
	b.changed = make(chan struct{})
}

// world is a bus that asks, and what identity would be.
type world struct {
	*bus.Embedded
	book *book
	keys bus.CalloutKeys
	mu   sync.Mutex
	told []Outcome
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := t.TempDir()
	public, err := bus.EnsureCallout(dir)
	if err != nil {
		t.Fatal(err)
	}
	callers := []subjects.Caller{web, cli, evil, host}
	w := &world{book: &book{nkeys: map[string]subjects.Caller{}, shut: map[subjects.Caller]bool{}, changed: make(chan struct{})}}
	w.book.tokens = func(_ context.Context, token string) (Guest, error) {
		if token != "good" {
			return Guest{}, errors.New("the token is not good")
		}
		return Guest{Caller: ann, Mark: IssuerMark("https://issuer"), Expires: time.Now().Add(time.Hour)}, nil
	}
	w.Embedded, err = bus.StartEmbedded(bustest.Context(t), bus.EmbeddedConfig{Dir: dir, Port: -1, Callers: callers, Callout: &public, Log: bustest.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	users, err := bus.EnsureKeys(dir, w.URL(), append(callers, subjects.Operator()))
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range users {
		w.book.nkeys[u.Public] = u.Caller
	}
	if w.keys, err = bus.ReadCallout(dir + "/keys"); err != nil {
		t.Fatal(err)
	}
	return w
}

var lives = Lives{Hosts: time.Hour, Frontends: time.Hour, Operators: time.Hour, Users: time.Hour}

// serve starts one responder.
func (w *world) serve(t *testing.T, l Lives) *Responder {
	t.Helper()
	r, err := Serve(bustest.Connect(t, w.Embedded, subjects.Callout()).NATS(), Config{Keys: w.keys, Guests: w.book, Lives: l,
		Log: bustest.Log(t), Random: rand.Float64, Told: func(o Outcome) { w.mu.Lock(); w.told = append(w.told, o); w.mu.Unlock() }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Stop(bustest.Context(t)) })
	return r
}

// user connects with a token over TCP, where a refusal is heard at once.
func (w *world) user(t *testing.T, token string) (*bus.Conn, error) {
	t.Helper()
	l := w.login(t, web)
	return w.dial(t, bus.Login{URL: l.URL, CA: l.CA, Name: ann.Name()}, bus.WithToken(func() string { return token }))
}

func (w *world) login(t *testing.T, c subjects.Caller) bus.Login {
	t.Helper()
	l, err := w.Login(c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (w *world) dial(t *testing.T, l bus.Login, opts ...bus.Option) (*bus.Conn, error) {
	t.Helper()
	c, err := bus.Connect(bustest.Context(t), l, append(opts, bus.WithLogger(bustest.Log(t)))...)
	if err == nil {
		t.Cleanup(c.Close)
	}
	return c, err
}

func eventually(t *testing.T, what string, within time.Duration, is func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !is() {
		if time.Since(began) > within {
			t.Fatalf("not within %s: %s", within, what)
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(began)
}
