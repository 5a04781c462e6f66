package sdk_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

// TestAnAttachedHandleLooksAndEndsNothing: it is good for what was asked, and
// neither it nor its end does anything to the session's life.
func TestAnAttachedHandleLooksAndEndsNothing(t *testing.T) {
	s := sdktest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	c := s.Client(t, "acme")
	user, admin := sdk.Token(s.Token("acme", "ann")), sdk.Token(s.Administrator("acme", "root"))
	own, err := c.Open(ctx, sdk.OpenOptions{User: user})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := own.Files().Write(ctx, "/x", strings.NewReader("x"), sdk.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	list, err := c.AdminSessions(ctx, sdk.AdminFilter{User: admin})
	if err != nil || len(list) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	ask := sdk.Attach{User: admin, Handle: list[0].Handle, Issuer: sdktest.Issuer, Subject: "ann", Generation: list[0].Generation, Reason: "ticket"}
	at, err := c.AdminAttach(ctx, ask)
	if err != nil {
		t.Fatal(err)
	}
	defer at.Detach()
	if _, err := at.Files().Stat(ctx, "/x"); err != nil {
		t.Error(err)
	}
	if _, err := at.Output(ctx, "true"); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("exec with a grant for reading: %v", err)
	}
	for name, end := range map[string]func(context.Context) error{"close": at.Close, "delete": at.Delete, "reopen": at.Reopen} {
		if err := end(ctx); !errors.Is(err, sdk.ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if st, err := c.Status(ctx, sdk.UserSession{User: user}); err != nil || len(st) != 1 || st[0].State != sdk.Active {
		t.Errorf("%v, %v", st, err)
	}
	ask.Subject = "bob"
	if _, err := c.AdminAttach(ctx, ask); !errors.Is(err, sdk.ErrNotFound) {
		t.Errorf("another user's: %v", err)
	}
	ask.User, ask.Subject = user, "ann"
	if _, err := c.AdminAttach(ctx, ask); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("by a user: %v", err)
	}
	if _, err := c.OperatorAttach(ctx, ask); !errors.Is(err, sdk.ErrInvalid) {
		t.Errorf("by a frontend: %v", err)
	}
}

// TestAUserTakesAndGivesTheRightToAct: it is listed, and the frontend that it
// is about cannot take it back by itself.
func TestAUserTakesAndGivesTheRightToAct(t *testing.T) {
	s := sdktest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	c, user := s.Client(t, "acme"), sdk.Token(s.Token("acme", "ann"))
	for _, settle := range []func(context.Context, sdk.TokenSource, string) error{c.RevokeFrontend, c.AllowFrontend, c.RevokeFrontend} {
		if err := settle(ctx, user, "agent"); err != nil {
			t.Fatal(err)
		}
	}
	list, err := c.Frontends(ctx, user)
	if err != nil || len(list) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	for _, f := range list {
		if agent := f.Frontend == "agent"; f.RevokedAt.IsZero() == agent || f.FirstAt.IsZero() != agent {
			t.Errorf("listed as %+v", f)
		}
	}
	if err := c.RevokeFrontend(ctx, user, sdktest.Frontend); err != nil {
		t.Fatal(err)
	}
	if err := c.AllowFrontend(ctx, user, sdktest.Frontend); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("it gave itself the right back: %v", err)
	}
}
