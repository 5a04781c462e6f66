package e2e

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/test/testenv"
)

const identityTime = 30 * time.Second

// TestASuspendedTenantIsOutAtOnce: a tenant is suspended while one of its users
// works: its frontend is disconnected and nobody of it comes in; another tenant
// notices nothing; and when the suspension ends every file is there.
func TestASuspendedTenantIsOutAtOnce(t *testing.T) {
	e := common.For(t)
	ann, bob := e.Client("acme", "ann"), e.Client("globex", "bob")
	mine := open(t, ann, sdk.OpenOptions{Template: "container"})
	theirs := open(t, bob, sdk.OpenOptions{Template: "container"})
	sh(t, mine, "echo kept > ~/kept")
	began := time.Now()
	cli(t, e, "tenant", "suspend", "acme", "--reason", "unpaid")
	told := time.Since(began)
	eventually(t, identityTime, func() error {
		if ann.NATS().IsConnected() {
			return errors.New("the frontend is still connected")
		}
		return nil
	})
	t.Logf("disconnected after %s; the command took %s of them", time.Since(began).Round(time.Millisecond), told.Round(time.Millisecond))
	if c, err := e.Connect(t.Context(), "acme", "cat"); err == nil {
		c.Close()
		t.Error("a frontend of a suspended tenant logs in")
	}
	if out := sh(t, theirs, "echo still here"); out != "still here" {
		t.Errorf("the other tenant's session says %q", out)
	}
	cli(t, e, "tenant", "resume", "acme")
	eventually(t, identityTime, func() error {
		if !ann.NATS().IsConnected() {
			return errors.New("the frontend is not back")
		}
		return nil
	})
	again := open(t, ann, sdk.OpenOptions{Template: "container"})
	if out := sh(t, again, "cat ~/kept"); out != "kept" {
		t.Errorf("the file is %q", out)
	}
}

// TestAUserTakesARightAway: a frontend that the user does not trust any more is
// refused with this user's token, its open handle ends, and other users and the
// user's other frontend notice nothing.
func TestAUserTakesARightAway(t *testing.T) {
	e := common.For(t)
	token := mint(t, e, devissuer.User{Tenant: "acme", Subject: "amy"})
	web, other := e.Client("acme", "amy"), connect(t, e, "fe-acme-cli", token)
	s := open(t, web, sdk.OpenOptions{Template: "container"})
	bobs := open(t, e.Client("acme", "bob"), sdk.OpenOptions{Template: "container"})
	p, err := s.Exec(t.Context(), sdk.Command("sleep", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	list, err := other.Frontends(t.Context(), nil)
	names := []string{} // cli may be among them: it acts by asking
	for _, f := range list {
		if f.Frontend != "cli" {
			names = append(names, f.Frontend)
		}
	}
	if err != nil || !slices.Equal(names, []string{"web"}) {
		t.Errorf("who acted: %+v, %v", list, err)
	}
	began := time.Now()
	if err := other.RevokeFrontend(t.Context(), nil, "web"); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err == nil {
		t.Error("the stream of a frontend without the right ended well")
	}
	t.Logf("the stream ended %s after the right was taken away", time.Since(began).Round(time.Millisecond))
	if _, err := web.Open(t.Context(), sdk.OpenOptions{Template: "container"}); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("opened without the right: %v", err)
	}
	sh(t, bobs, "true")
	sh(t, open(t, other, sdk.OpenOptions{Template: "container"}), "true")
	if err := other.AllowFrontend(t.Context(), nil, "web"); err != nil {
		t.Fatal(err)
	}
	sh(t, open(t, web, sdk.OpenOptions{Template: "container"}), "true")
}

// TestAnAdministratorLooksIn: by handle, with a reason, into the session that it
// expects and no other; it reads and changes nothing, the user's frontend hears of
// it, and without the tenant's consent there is nothing of it.
func TestAnAdministratorLooksIn(t *testing.T) {
	config := filepath.Join(t.TempDir(), "berth.yaml")
	text := "identity:\n  tenants:\n    - {tenant: acme, plan: default, admin_attach: true}\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	e := testenv.Start(t, "--config", config)
	ann := e.Client("acme", "ann")
	s := open(t, ann, sdk.OpenOptions{Template: "container"})
	sh(t, s, "echo secret plan > ~/notes")
	admin := connect(t, e, "fe-acme-web", mint(t, e, devissuer.User{Tenant: "acme", Subject: "root", Groups: []string{devissuer.AdminGroup}}))
	list, err := admin.AdminSessions(t.Context(), sdk.AdminFilter{})
	if err != nil || len(list) != 1 {
		t.Fatalf("sessions: %+v, %v", list, err)
	}
	if strings.Contains(list[0].Handle, s.Key()) || strings.Contains(s.Key(), list[0].Handle) {
		t.Errorf("the handle %s tells the key", list[0].Handle)
	}
	issuer, err := devissuer.URL(filepath.Join(e.Dir, "keys"), "acme")
	if err != nil {
		t.Fatal(err)
	}
	ask := sdk.Attach{Handle: list[0].Handle, Issuer: issuer, Subject: "ann", Generation: list[0].Generation, Reason: "ticket 7"}
	for name, wrong := range map[string]func(*sdk.Attach){
		"another user":       func(a *sdk.Attach) { a.Subject = "bob" },
		"another generation": func(a *sdk.Attach) { a.Generation = "1-99999" },
		"no reason":          func(a *sdk.Attach) { a.Reason = "" },
	} {
		bad := ask
		wrong(&bad)
		if _, err := admin.AdminAttach(t.Context(), bad); err == nil {
			t.Errorf("%s: attached", name)
		}
	}
	if _, err := ann.AdminSessions(t.Context(), sdk.AdminFilter{}); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("a user lists the tenant's sessions: %v", err)
	}
	heard := make(chan sdk.Event, 1)
	events, err := ann.Events(t.Context(), sdk.EventFilter{Session: s.Key(), Event: "attached"})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for e, err := range events {
			if err == nil {
				heard <- e
			}
			return
		}
	}()
	seen, err := admin.AdminAttach(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	defer seen.Detach()
	home := strings.TrimSpace(sh(t, s, "echo ~"))
	r, err := seen.Files().Read(t.Context(), home+"/notes", 0)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(r)
	r.Close()
	if err != nil || string(raw) != "secret plan\n" {
		t.Errorf("read %q, %v", raw, err)
	}
	if _, err := seen.Exec(t.Context(), sdk.Command("true")); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("a grant for reading runs a program: %v", err)
	}
	select {
	case e := <-heard:
		if b, ok := e.Body.(*identityv1.Attached); !ok || b.GetReason() != "ticket 7" || b.GetBy().GetSubject() != "root" {
			t.Errorf("the user's frontend hears %+v", e)
		}
	case <-time.After(identityTime):
		t.Error("the user's frontend hears nothing of it")
	}
}

// mint makes a token of the development issuer.
func mint(t *testing.T, e *testenv.Env, u devissuer.User) string {
	t.Helper()
	token, err := devissuer.Mint(filepath.Join(e.Dir, "keys"), u, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// connect is a frontend's connection with a token.
func connect(t *testing.T, e *testenv.Env, login, token string) *sdk.Client {
	t.Helper()
	c, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: e.ClientFile(login), User: sdk.Token(token)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// TestAUserComesWithoutAFrontend: a user logs in to the bus with its own token,
// reaches its own session, the same that a frontend opened for it, and nobody
// else's token is good on this connection.
func TestAUserComesWithoutAFrontend(t *testing.T) {
	e := common.For(t)
	s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{Template: "container"})
	sh(t, s, "echo mine > ~/mine")
	f, err := sdk.ReadClientFile(e.ClientFile("fe-acme-web"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := sdk.Connect(t.Context(), sdk.Config{URL: f.URL, CA: f.CA, Tenant: "acme", User: sdk.Token(mint(t, e, devissuer.User{Tenant: "acme", Subject: "ann"}))})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if out := sh(t, open(t, c, sdk.OpenOptions{Template: "container"}), "cat ~/mine"); out != "mine" {
		t.Errorf("the file is %q", out)
	}
	bob := mint(t, e, devissuer.User{Tenant: "acme", Subject: "bob"})
	if _, err := c.Open(t.Context(), sdk.OpenOptions{Template: "container", User: sdk.Token(bob)}); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("another user's token on this connection: %v", err)
	}
}
