package sdk

import (
	"context"
	"encoding/base64"
	"errors"
	"testing"

	"github.com/berth-dev/berth/schemas/subjects"
)

func jwtOf(payload string) TokenSource {
	return Token("e30." + base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".c2ln")
}

// A user's own login has the name that the bus gives it, so that its inbox and
// subjects are its own.
func TestAUserLogsInUnderTheNameOfItsToken(t *testing.T) {
	c, me, err := Config{URL: "tls://x:1", Tenant: "acme", User: jwtOf(`{"iss":"https://i","sub":"ann"}`)}.resolve()
	want := subjects.Frontend("acme", subjects.UserFrontend("https://i", "ann"))
	if err != nil || me != want || c.Name != want.Name() {
		t.Errorf("it logs in as %s, %v; want %s", me, err, want)
	}
	if opts, err := c.login(me); err != nil || len(opts) == 0 {
		t.Errorf("no login: %v", err)
	}
	for what, bad := range map[string]Config{
		"no tenant":     {URL: "tls://x:1", User: jwtOf(`{"iss":"https://i","sub":"ann"}`)},
		"a bad tenant":  {URL: "tls://x:1", Tenant: "a.b", User: jwtOf(`{"iss":"https://i","sub":"ann"}`)},
		"opaque":        {URL: "tls://x:1", Tenant: "acme", User: Token("opaque")},
		"no subject":    {URL: "tls://x:1", Tenant: "acme", User: jwtOf(`{"iss":"https://i"}`)},
		"no JSON":       {URL: "tls://x:1", Tenant: "acme", User: jwtOf(`x`)},
		"no token":      {URL: "tls://x:1", Tenant: "acme", User: func(context.Context) (string, error) { return "", errors.New("no") }},
		"no URL at all": {Tenant: "acme"},
	} {
		if _, _, err := bad.resolve(); err == nil {
			t.Errorf("%s: it would log in", what)
		}
	}
}

// A user's own login may hear its own sessions alone, and is told so instead of hearing nothing.
func TestAUserSelectsEventsOfItsOwnSession(t *testing.T) {
	c := &Client{me: subjects.Frontend("acme", subjects.UserFrontend("https://i", "ann"))}
	if _, err := c.eventSubject(EventFilter{}); !errors.Is(err, ErrDenied) {
		t.Errorf("the whole tenant's events: %v", err)
	}
	if got, err := c.eventSubject(EventFilter{Session: "s1"}); err != nil || got != "berth.v1.session.acme.s1.*" {
		t.Errorf("one session's: %s, %v", got, err)
	}
	stop, err := c.progress("r1", func(Event) { t.Error("it hears something") })
	if err != nil {
		t.Fatal(err)
	}
	stop()
}
