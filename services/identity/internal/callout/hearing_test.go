package callout

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Events tell who the tenant's users are, and what they do.
func TestAUserHearsNobodyElsesSessions(t *testing.T) {
	w := newWorld(t)
	w.serve(t, lives)
	key := func(who string) ids.SessionKey {
		return ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", who, ids.DefaultSession)
	}
	w.book.tokens = func(context.Context, string) (Guest, error) {
		return Guest{Caller: ann, Mark: IssuerMark("https://issuer"), Expires: time.Now().Add(time.Hour), Sessions: []ids.SessionKey{key("ann")}}, nil
	}
	user, err := w.user(t, "good")
	if err != nil {
		t.Fatal(err)
	}
	own := subjects.Prefix + "session.acme." + string(key("ann")) + ".*"
	for subject, may := range map[string]bool{
		own: true, subjects.Session("acme", key("ann"), "active"): true,
		subjects.Prefix + "session.acme.*.*": false, subjects.Session("acme", key("bob"), "active"): false,
		subjects.Prefix + "session.acme.*.active": false, subjects.Prefix + "session.acme.>": false,
	} {
		sub, err := user.NATS().SubscribeSync(subject)
		if err == nil {
			err = user.NATS().Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		// What the server refused it said before it answered the flush.
		if _, err = sub.NextMsg(time.Millisecond); errors.Is(err, nats.ErrPermissionViolation) == may {
			t.Errorf("%s: %v", subject, err)
		}
	}
}

// Subscriptions take memory of the servers that everybody uses.
func TestAUserCannotFillTheBusWithSubscriptions(t *testing.T) {
	w := newWorld(t)
	w.serve(t, lives)
	l := w.login(t, web)
	full := make(chan struct{}, 1)
	user, err := w.dial(t, bus.Login{URL: l.URL, CA: l.CA, Name: ann.Name()}, bus.WithToken(func() string { return "good" }),
		bus.WithNATS(nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrMaxSubscriptionsExceeded) {
				select {
				case full <- struct{}{}:
				default:
				}
			}
		})))
	if err != nil {
		t.Fatal(err)
	}
	for range 2000 {
		if _, err := user.NATS().SubscribeSync(user.NATS().NewInbox()); err != nil {
			break
		}
	}
	select {
	case <-full:
	case <-time.After(30 * time.Second):
		t.Error("a user subscribes without end")
	}
}
