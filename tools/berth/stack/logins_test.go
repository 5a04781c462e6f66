package stack

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

// as logs a caller in from outside of the process.
func as(t *testing.T, info Info, c subjects.Caller) *bus.Conn {
	t.Helper()
	l, err := bus.ReadLogin(filepath.Join(info.Clients, c.Name()+".json"))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := bus.Connect(bustest.Context(t), l, bus.WithLogger(bustest.Log(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// userOf logs a user in with its own token.
func userOf(t *testing.T, info Info, tenant, subject string) (*bus.Conn, string, error) {
	t.Helper()
	keys := filepath.Join(filepath.Dir(info.Clients), "keys")
	token, err := devissuer.Mint(keys, devissuer.User{Tenant: ids.Tenant(tenant), Subject: subject}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	entry, err := devissuer.Entry(keys, ids.Tenant(tenant), "default")
	if err != nil {
		t.Fatal(err)
	}
	l, err := bus.ReadLogin(filepath.Join(info.Clients, "fe-"+tenant+"-web.json"))
	if err != nil {
		t.Fatal(err)
	}
	me := subjects.Frontend(ids.Tenant(tenant), subjects.UserFrontend(entry.Issuer, subject))
	conn, err := bus.Connect(bustest.Context(t), bus.Login{URL: l.URL, CA: l.CA, Name: me.Name()},
		bus.WithLogger(bustest.Log(t)), bus.WithToken(func() string { return token }))
	if err == nil {
		t.Cleanup(conn.Close)
	}
	return conn, token, err
}

func wait(t *testing.T, what string, within time.Duration, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", within, what)
		}
	}
}

// Everybody's login ends again and again, and work goes on: opens by both doors, commands and the host's
// lease. That streams of the data plane outlive a reconnect, of the host and of the client, is proved
// where there is a process behind them: services/hostagent and sdk.
func TestWorkGoesOnWhileLoginsEnd(t *testing.T) {
	info, stop := start(t, t.TempDir(), func(c *Config) {
		life := &c.Identity.Callout
		life.Hosts, life.Frontends, life.Operators, life.Users = 3*time.Second, 2*time.Second, 2*time.Second, 2*time.Second
	})
	defer stop()
	c := connect(t, info, "acme", "ann")
	op := as(t, info, subjects.Operator())
	s, err := c.Open(t.Context(), sdk.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	epoch, rounds, worst := s.Epoch(), 0, time.Duration(0)
	for deadline := time.Now().Add(time.Minute); c.NATS().Statistics.Reconnects < 3 || op.NATS().Statistics.Reconnects < 3; rounds++ {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		began := time.Now()
		if again, err := c.Open(ctx, sdk.OpenOptions{ViaQueue: rounds%2 == 1}); err != nil || again.Epoch() != epoch {
			t.Errorf("an open, in round %d: %v", rounds, err)
		}
		worst = max(worst, time.Since(began))
		if _, err := bus.Invoke[*schedulerv1.HostsReply](ctx, op, "scheduler", "hosts", &schedulerv1.HostsRequest{}); err != nil {
			t.Errorf("a command, in round %d: %v", rounds, err)
		}
		cancel()
		if time.Now().After(deadline) {
			t.Fatal("logins do not end")
		}
		time.Sleep(5 * time.Millisecond) // not to fill the disk with events
	}
	t.Logf("%d rounds, the slowest open took %s", rounds, worst)
	if worst > 25*time.Second { // an outcome that is lost in a reconnect is not waited for to the end
		t.Error("an open waited for an answer that was lost")
	}
}

// mayHear checks whether a subscription is allowed.
func mayHear(t *testing.T, c *bus.Conn, subject string, may bool) {
	t.Helper()
	sub, err := c.NATS().SubscribeSync(subject)
	if err == nil {
		err = c.NATS().Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	// What the server refuses it says before it answers the flush.
	if _, err = sub.NextMsg(time.Millisecond); errors.Is(err, nats.ErrPermissionViolation) == may {
		t.Errorf("%s hears %s: %v", c.Self(), subject, err)
	}
}

// A user who is suspended is off the bus within two seconds, with the connection that is the user's own;
// the others stay, and what was refused is under audit without the token.
func TestASuspendedUserIsDisconnected(t *testing.T) {
	info, stop := start(t, t.TempDir())
	defer stop()
	ann, token, err := userOf(t, info, "acme", "ann")
	if err != nil {
		t.Fatal(err)
	}
	bob, _, err := userOf(t, info, "acme", "bob")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ann.CallRaw(bustest.Context(t), subjects.RPC("identity", "keys", ann.Self()), nil, ""); err != nil {
		t.Errorf("a user's own connection cannot call identity: %v", err)
	}
	mayHear(t, ann, subjects.Prefix+"session.acme.*.*", false)
	s, err := connect(t, info, "acme", "ann").Open(t.Context(), sdk.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	mayHear(t, ann, subjects.Prefix+"session.acme."+s.Key()+".*", true)
	mayHear(t, bob, subjects.Prefix+"session.acme."+s.Key()+".*", false)
	op := as(t, info, subjects.Operator())
	issuer := issuerOf(t, op)
	began := time.Now()
	ask := &identityv1.SuspendRequest{Suspended: true, What: &identityv1.Suspension{Tenant: "acme", Issuer: issuer, Subject: "ann", Reason: "a test"}}
	if _, err := bus.Invoke[*identityv1.SuspendReply](bustest.Context(t), op, "identity", "suspend", ask); err != nil {
		t.Fatal(err)
	}
	wait(t, "the suspended user is disconnected", 20*time.Second, func() bool { return !ann.Connected() })
	t.Logf("disconnected %s after the command", time.Since(began))
	if _, _, err := userOf(t, info, "acme", "ann"); err == nil {
		t.Error("the suspended user logs in again")
	}
	if !bob.Connected() || bob.NATS().Statistics.Reconnects != 0 {
		t.Error("another user was disconnected")
	}
	underAudit(t, op, "this user is suspended: a test", token)
}

func issuerOf(t *testing.T, op *bus.Conn) string {
	t.Helper()
	r, err := bus.Invoke[*identityv1.TenantsReply](bustest.Context(t), op, "identity", "tenants", &identityv1.TenantsRequest{Tenant: "acme"})
	if err != nil || len(r.GetIssuers()) == 0 {
		t.Fatalf("no issuers: %v", err)
	}
	return r.GetIssuers()[0].GetIssuer()
}

// underAudit waits for a record with a text, and refuses one with a secret.
func underAudit(t *testing.T, op *bus.Conn, text, secret string) {
	t.Helper()
	cons, err := op.JetStream().OrderedConsumer(bustest.Context(t), "BERTH_AUDIT", jetstream.OrderedConsumerConfig{FilterSubjects: []string{"berth.v1.audit.identity.*.*"}})
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
		m, err := cons.Next(jetstream.FetchMaxWait(time.Second))
		if err != nil {
			continue
		}
		if bytes.Contains(m.Data(), []byte(secret)) {
			t.Fatal("a token is under audit")
		}
		if bytes.Contains(m.Data(), []byte(text)) {
			return
		}
	}
	t.Errorf("nothing under audit says %q", text)
}
