package sdktest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// Env is one system under Conformance.
type Env struct {
	// Client of a frontend.
	Client *sdk.Client
	// User makes a token source for a user of the client's tenant; every name
	// is a user without any session.
	User func(name string) sdk.TokenSource
	// Lacks names what the system does not have: pty, watch, checkpoint, archives. A
	// check that needs it is skipped and says so.
	Lacks map[string]bool
	// LoseHost has the host of a session die. What it returns waits until the session was handed over,
	// or has that happen; it may be called again. nil: the system has one host, and the checks are
	// skipped.
	LoseHost func(session string) (handOver func())
	// Operator's client; nil: what only an operator sees is not checked.
	Operator *sdk.Client
	// Dir is a directory in every session that may be written; "/root" if empty.
	Dir string
}

// Conformance runs the suite that the fake and a real system must pass. The
// factory is called once for every check.
//
// The programs that it needs in a session: true, false, echo, cat, sleep, env,
// pwd, seq, sha256sum, stty, and sh with -c.
func Conformance(t *testing.T, factory func(t *testing.T) Env) {
	checks := []struct {
		name, needs string
		run         func(*check)
	}{
		{"open_join_sleep_resume", "", (*check).openJoinSleepResume},
		{"open_is_idempotent", "", (*check).openIsIdempotent},
		{"open_by_the_queue", "", (*check).openByTheQueue},
		{"open_bad_input", "", (*check).openBadInput},
		{"open_for_reading", "", (*check).openForReading},
		{"progress", "", (*check).progress},
		{"events", "", (*check).events},
		{"ephemeral", "", (*check).ephemeral},
		{"delete", "", (*check).delete},
		{"exit_codes", "", (*check).exitCodes},
		{"exec_bad_input", "", (*check).execBadInput},
		{"environment", "", (*check).environment},
		{"bulk_output", "", (*check).bulkOutput},
		{"bulk_input", "", (*check).bulkInput},
		{"reattach_after_reconnect", "", (*check).reattachAfterReconnect},
		{"bulk_over_reconnects", "", (*check).bulkOverReconnects},
		{"attach_by_key", "", (*check).attachByKey},
		{"cancel_kills", "", (*check).cancelKills},
		{"time_out", "", (*check).timeOut},
		{"terminal", "pty", (*check).terminal},
		{"files", "", (*check).files},
		{"big_files", "", (*check).bigFiles},
		{"watch", "watch", (*check).watch},
		{"checkpoint", "checkpoint", (*check).checkpoint},
		{"export_import", "archives", (*check).exportImport},
		{"import_bad_input", "archives", (*check).importBadInput},
		{"stale_handle", "", (*check).staleHandle},
		{"two_users", "", (*check).twoUsers},
		{"sleep_ends_streams", "", (*check).sleepEndsStreams},
		{"handoff_ends_streams_with_a_cause", "hosts", (*check).handoffEndsStreams},
		{"handoff_ends_transfers_with_a_cause", "hosts", (*check).handoffEndsTransfers},
		{"open_during_handoff_joins_it", "hosts", (*check).openDuringHandoffJoinsIt},
		{"hosts_say_what_they_have", "operator", (*check).hostsSayWhatTheyHave},
	}
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			env := factory(t)
			if c.needs != "" && env.Lacks[c.needs] || c.needs == "hosts" && env.LoseHost == nil || c.needs == "operator" && env.Operator == nil {
				t.Skipf("the system has no %s", c.needs)
			}
			if env.Dir == "" {
				env.Dir = "/root"
			}
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			c.run(&check{T: t, Env: env, ctx: ctx})
		})
	}
}

type check struct {
	*testing.T
	Env
	ctx context.Context
}

func (c *check) must(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}

func (c *check) is(err, target error) {
	c.Helper()
	if !errors.Is(err, target) {
		c.Fatalf("got error %v, want one of kind %v", err, target)
	}
}

func (c *check) equal(got, want any) {
	c.Helper()
	if got != want {
		c.Fatalf("got %v, want %v", got, want)
	}
}

// open opens a session and deletes it after the check.
func (c *check) open(o sdk.OpenOptions) *sdk.Session {
	c.Helper()
	if o.User == nil {
		o.User = c.User("ann")
	}
	s, err := c.Client.Open(c.ctx, o)
	c.must(err)
	c.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := s.Delete(ctx); err != nil && !errors.Is(err, sdk.ErrNotFound) {
			c.Logf("delete after the check: %v", err)
		}
	})
	return s
}

func (c *check) openJoinSleepResume() {
	o := sdk.OpenOptions{User: c.User("ann")}
	s := c.open(o)
	c.equal(s.Origin(), sdk.Created)
	c.equal(s.Name(), "default")
	if s.Place().Tier == "" || s.Place().Network == "" || s.Place().Idle <= 0 || s.Place().Persists == "" {
		c.Fatalf("the place does not say what it is: %+v", s.Place())
	}
	if s.Timing().Total <= 0 || len(s.Timing().Steps) == 0 {
		c.Fatalf("the answer has no times: %+v", s.Timing())
	}
	again, err := c.Client.Open(c.ctx, o)
	c.must(err)
	c.equal(again.Origin(), sdk.Joined)
	c.equal(again.Key(), s.Key())
	c.equal(again.Epoch(), s.Epoch())
	again.Detach()
	_, err = s.Files().Write(c.ctx, c.Dir+"/kept", strings.NewReader("kept"), sdk.WriteOptions{})
	c.must(err)
	epoch := s.Epoch()
	c.must(s.Close(c.ctx))
	list, err := c.Client.Status(c.ctx, sdk.UserSession{User: o.User})
	c.must(err)
	if len(list) != 1 || list[0].State != sdk.Asleep || list[0].Key != s.Key() {
		c.Fatalf("after the close the status is %+v", list)
	}
	s, err = c.Client.Open(c.ctx, o)
	c.must(err)
	c.equal(s.Origin(), sdk.Resumed)
	if s.Epoch() == epoch {
		c.Fatal("the epoch did not change over a sleep")
	}
	b, err := s.Files().ReadAll(c.ctx, c.Dir+"/kept")
	c.must(err)
	c.equal(string(b), "kept")
}

func (c *check) openIsIdempotent() {
	id := fmt.Sprintf("req-%d", rand.Uint64())
	o := sdk.OpenOptions{User: c.User("ann"), RequestID: id}
	a, b := c.open(o), c.open(o)
	c.equal(a.Key(), b.Key())
	c.equal(a.Origin(), b.Origin()) // the stored outcome, not a second open
	c.must(b.Run(c.ctx, sdk.Command("true")))
	other := o
	other.MinTier = sdk.Container
	_, err := c.Client.Open(c.ctx, other)
	c.is(err, sdk.ErrReplayMismatch)
	// Once the session sleeps, the stored outcome opens nothing, and wakes nothing.
	c.must(b.Close(c.ctx))
	_, err = c.Client.Open(c.ctx, o)
	c.is(err, sdk.ErrSuperseded)
	c.equal(c.open(sdk.OpenOptions{User: o.User}).Origin(), sdk.Resumed)
	_, err = c.Client.Open(c.ctx, o)
	c.is(err, sdk.ErrSuperseded)
}

func (c *check) openByTheQueue() {
	s := c.open(sdk.OpenOptions{ViaQueue: true})
	c.must(s.Run(c.ctx, sdk.Command("true")))
	next, stop := c.follow(sdk.EventFilter{Event: "admitted"})
	defer stop()
	id, err := c.Client.Submit(c.ctx, sdk.OpenOptions{User: c.User("ann"), Name: "second"})
	c.must(err)
	for {
		if e := next(); e.RequestID() == id {
			break
		}
	}
	second := c.open(sdk.OpenOptions{Name: "second"})
	if second.Key() == s.Key() {
		c.Fatal("two names are one session")
	}
}

// follow returns the next event of a subscription at each call.
func (c *check) follow(f sdk.EventFilter) (next func() sdk.Event, stop func()) {
	c.Helper()
	ctx, cancel := context.WithCancel(c.ctx)
	seq, err := c.Client.Events(ctx, f)
	c.must(err)
	ch := make(chan sdk.Event, 256)
	go func() {
		for e, err := range seq {
			if err != nil {
				return
			}
			ch <- e
		}
	}()
	return func() sdk.Event {
		c.Helper()
		select {
		case e := <-ch:
			return e
		case <-time.After(20 * time.Second):
			c.Fatal("no event came")
			return sdk.Event{}
		}
	}, cancel
}

func (c *check) openBadInput() {
	u := c.User("ann")
	for name, o := range map[string]sdk.OpenOptions{
		"a name with a dot":       {User: u, Name: "a.b"},
		"a name that is too long": {User: u, Name: strings.Repeat("x", 64)},
		"no such template":        {User: u, Template: "no-such-template"},
		"no such tier":            {User: u, MinTier: "paper"},
	} {
		if _, err := c.Client.Open(c.ctx, o); err == nil {
			c.Errorf("%s was accepted", name)
		}
	}
	_, err := c.Client.Open(c.ctx, sdk.OpenOptions{User: sdk.Token("not.a.token")})
	c.is(err, sdk.ErrUnauthenticated)
	list, err := c.Client.Status(c.ctx, sdk.UserSession{User: u})
	c.must(err)
	c.equal(len(list), 0) // bad input changes nothing
}

func (c *check) progress() {
	var mu sync.Mutex
	var names []string
	s := c.open(sdk.OpenOptions{Progress: func(e sdk.Event) {
		mu.Lock()
		defer mu.Unlock()
		names = append(names, e.Name)
	}})
	_ = s
	mu.Lock()
	defer mu.Unlock()
	// Facts are published beside the critical path: the last may come later.
	if len(names) == 0 {
		c.Log("no event came before the answer")
	}
	for _, n := range names {
		if !strings.Contains(" resume admitted placed active renewed ", " "+n+" ") {
			c.Errorf("an event %q is no progress of an open", n)
		}
	}
}

func (c *check) events() {
	next, stop := c.follow(sdk.EventFilter{})
	defer stop()
	s := c.open(sdk.OpenOptions{User: c.User("eve")})
	c.must(s.Close(c.ctx))
	want := []string{"admitted", "placed", "active", "asleep"}
	last := uint64(0)
	for len(want) > 0 {
		e := next()
		if e.Session != s.Key() || e.Revision == 0 {
			continue
		}
		if e.Revision <= last {
			c.Fatalf("revision %d after %d", e.Revision, last)
		}
		last = e.Revision
		if e.Name == want[0] {
			want = want[1:]
		}
		if e.Body == nil || e.Time.IsZero() {
			c.Fatalf("event %s has no body or no time", e.Name)
		}
	}
	_, err := c.Client.Events(c.ctx, sdk.EventFilter{Tenant: "somebody-else"})
	c.is(err, sdk.ErrDenied)
}

func (c *check) ephemeral() {
	o := sdk.OpenOptions{User: c.User("ann"), Name: "short", Persistence: sdk.Ephemeral}
	s := c.open(o)
	generation := s.Generation()
	_, err := s.Files().Write(c.ctx, c.Dir+"/gone", strings.NewReader("x"), sdk.WriteOptions{})
	c.must(err)
	c.must(s.Close(c.ctx))
	s = c.open(o)
	c.equal(s.Origin(), sdk.Created)
	if s.Generation() == generation {
		c.Fatal("a new life has the generation of the old one")
	}
	_, err = s.Files().Stat(c.ctx, c.Dir+"/gone")
	c.is(err, sdk.ErrNotFound)
}

func (c *check) delete() {
	u := c.User("ann")
	s := c.open(sdk.OpenOptions{User: u})
	generation := s.Generation()
	old, err := c.Client.Open(c.ctx, sdk.OpenOptions{User: u})
	c.must(err)
	c.must(s.Delete(c.ctx))
	c.is(old.Run(c.ctx, sdk.Command("true")), sdk.ErrStaleEpoch)
	old.Detach()
	s = c.open(sdk.OpenOptions{User: u})
	c.equal(s.Origin(), sdk.Created)
	if s.Generation() == generation {
		c.Fatal("a new life has the generation of the old one")
	}
}

func (c *check) staleHandle() {
	u := c.User("ann")
	s := c.open(sdk.OpenOptions{User: u})
	c.must(c.Client.CloseSession(c.ctx, sdk.UserSession{User: u}))
	c.is(s.Run(c.ctx, sdk.Command("true")), sdk.ErrStaleEpoch)
	c.must(s.Reopen(c.ctx))
	c.equal(s.Origin(), sdk.Resumed)
	c.must(s.Run(c.ctx, sdk.Command("true")))
	s.Detach()
	c.is(s.Run(c.ctx, sdk.Command("true")), sdk.ErrCanceled)
}

func (c *check) twoUsers() {
	a, b := c.open(sdk.OpenOptions{User: c.User("ann")}), c.open(sdk.OpenOptions{User: c.User("bob")})
	if a.Key() == b.Key() {
		c.Fatal("two users share a session")
	}
	_, err := a.Files().Write(c.ctx, c.Dir+"/secret", strings.NewReader("x"), sdk.WriteOptions{})
	c.must(err)
	_, err = b.Files().Stat(c.ctx, c.Dir+"/secret")
	c.is(err, sdk.ErrNotFound)
	list, err := c.Client.Status(c.ctx, sdk.UserSession{User: c.User("bob")})
	c.must(err)
	c.equal(len(list), 1)
	c.equal(list[0].Key, b.Key())
}

func (c *check) checkpoint() {
	s := c.open(sdk.OpenOptions{})
	m, err := s.Checkpoint(c.ctx)
	c.must(err)
	if m.ID == "" || m.TakenAt.IsZero() {
		c.Fatalf("the manifest is empty: %+v", m)
	}
	_, err = s.Files().Write(c.ctx, c.Dir+"/saved", strings.NewReader("saved"), sdk.WriteOptions{})
	c.must(err)
	both := make(chan error, 1)
	go func() { _, err := s.Checkpoint(c.ctx); both <- err }()
	next, err := s.Checkpoint(c.ctx)
	c.must(err)
	c.must(<-both)
	if next.ID == m.ID || next.ID == "" {
		c.Fatalf("what was written since is not in it: %+v", next)
	}
	given, giveUp := context.WithCancel(c.ctx)
	giveUp()
	_, err = s.Checkpoint(given)
	c.is(err, sdk.ErrCanceled)
	info, err := s.Info(c.ctx)
	c.must(err)
	if !strings.Contains(info, "network") {
		c.Fatalf("the place is %q", info)
	}
}

// noise returns n bytes that do not repeat, and their hash.
func noise(n int) ([]byte, string) {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)})
	_, _ = r.Read(b)
	return b, fmt.Sprintf("%x", sha256.Sum256(b))
}

// lockedBuffer is a Writer that another goroutine reads.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// await waits until the buffer holds text.
func (c *check) await(l *lockedBuffer, text string) {
	c.Helper()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(l.String(), text); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			c.Fatalf("the output is %q, still without %q", l.String(), text)
		}
	}
}

var _ io.Writer = (*lockedBuffer)(nil)
