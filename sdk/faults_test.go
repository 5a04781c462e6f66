package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

func open(t *testing.T, srv *sdktest.Server) (*sdk.Client, *sdk.Session) {
	t.Helper()
	c := srv.Client(t, "acme")
	s, err := c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann"))})
	if err != nil {
		t.Fatal(err)
	}
	return c, s
}

// Exec: output cut, stalled or doubled after a lost frame.
func TestOutputIsWholeWhenFramesAreLost(t *testing.T) {
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	var once sync.Once
	var out bytes.Buffer
	w := writer(func(p []byte) {
		once.Do(func() { srv.DropFrames(3) })
		out.Write(p)
	})
	if err := s.Run(t.Context(), sdk.Cmd{Args: []string{"seq", "1", "400000"}, Stdout: w}); err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(out.Bytes(), []byte("\n")); n != 400000 || !strings.HasSuffix(out.String(), "\n400000\n") {
		t.Fatalf("%d lines came", n)
	}
}

type writer func([]byte)

func (w writer) Write(p []byte) (int, error) { w(p); return len(p), nil }

// State: control service restart; Exec: stall after reattach.
func TestHostForgetsStreams(t *testing.T) {
	srv := sdktest.Start(t)
	c, s := open(t, srv)
	in, feed := io.Pipe()
	got := make(chan string, 16)
	p, err := s.Exec(t.Context(), sdk.Cmd{Args: []string{"cat"}, Stdin: in, Stdout: writer(func(b []byte) { got <- string(b) })})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(feed, "a")
	<-got
	srv.ForgetStreams()
	// The host says nothing any more; the client learns of it at the next reconnect.
	if err := c.NATS().ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(feed, "b")
	if b := <-got; b != "b" {
		t.Fatalf("got %q", b)
	}
	feed.Close()
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
}

// Exec: invented exit code 0 when the host is lost.
func TestExitIsUnknownWhenTheProcessIsLost(t *testing.T) {
	srv := sdktest.Start(t)
	c, s := open(t, srv)
	p, err := s.Exec(t.Context(), sdk.Command("sleep", "100"))
	if err != nil {
		t.Fatal(err)
	}
	srv.ForgetExecs(s.Key())
	_ = c.NATS().ForceReconnect()
	unknown := (*sdk.UnknownExitError)(nil)
	if err := p.Wait(); !errors.As(err, &unknown) {
		t.Fatalf("it ended with %v", err)
	}
	p, err = s.Exec(t.Context(), sdk.Command("sleep", "100"))
	if err != nil {
		t.Fatal(err)
	}
	srv.Sleep(s.Key())
	if err := p.Wait(); !errors.As(err, &unknown) {
		t.Fatalf("asleep it ended with %v", err)
	}
}

// Exec: output that nobody read is gone with an explicit gap.
func TestLostOutputIsTold(t *testing.T) {
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	written := make(chan struct{})
	srv.Register("late", func(ctx context.Context, p *sdktest.Proc) int {
		defer close(written)
		buf := make([]byte, 1)
		p.Stdin.Read(buf)
		p.Stderr.Write(buf)
		for range 6 << 20 / 1024 {
			p.Stdout.Write(bytes.Repeat([]byte("x"), 1024))
		}
		return 4
	})
	in, feed := io.Pipe()
	begun := make(chan struct{})
	p, err := s.Exec(t.Context(), sdk.Cmd{Args: []string{"late"}, Key: "late", Stdin: in, Stderr: writer(func([]byte) { close(begun) })})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(feed, ".")
	<-begun
	p.Detach()
	<-written // while nobody reads
	var n int
	q, err := s.Attach(t.Context(), "late", sdk.AttachOptions{Stdout: writer(func(b []byte) { n += len(b) })})
	if err != nil {
		t.Fatal(err)
	}
	err = q.Wait()
	lost, exit := (*sdk.LostOutputError)(nil), (*sdk.ExitError)(nil)
	if !errors.As(err, &lost) || !errors.As(err, &exit) || exit.Code != 4 {
		t.Fatalf("it ended with %v", err)
	}
	gap := 0
	for _, g := range q.Gaps() {
		gap += int(g.To - g.From)
	}
	if n+gap != 6<<20 {
		t.Fatalf("%d bytes came and %d were told lost, of %d", n, gap, 6<<20)
	}
}

func TestGrantIsRenewed(t *testing.T) {
	t.Parallel()
	srv, err := sdktest.New(sdktest.Options{Dir: t.TempDir(), Tenants: []string{"acme"}, GrantLife: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	_, s := open(t, srv)
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if err := s.Run(t.Context(), sdk.Command("true")); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRefusalHasTheReason(t *testing.T) {
	srv := sdktest.Start(t)
	c := srv.Client(t, "acme")
	srv.Refuse("Your plan allows no sessions on Sundays.")
	_, err := c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann"))})
	if !errors.Is(err, sdk.ErrRefused) || !strings.Contains(err.Error(), "no sessions on Sundays") {
		t.Fatalf("got %v", err)
	}
	if sdk.KindOf(err) != errkind.Refused || errors.Is(err, sdk.ErrNotFound) {
		t.Fatalf("the kind of %v is %v", err, sdk.KindOf(err))
	}
}

// Identity: any valid token reaches any sandbox.
func TestTokenOfAnotherTenant(t *testing.T) {
	srv := sdktest.Start(t)
	c := srv.Client(t, "acme")
	_, err := c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("umbrella", "ann"))})
	if !errors.Is(err, sdk.ErrDenied) {
		t.Fatalf("got %v", err)
	}
	token := srv.Token("acme", "ann")
	srv.Revoke(token)
	if _, err = c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(token)}); !errors.Is(err, sdk.ErrUnauthenticated) {
		t.Fatalf("got %v", err)
	}
}

func TestPermissionIsTold(t *testing.T) {
	srv := sdktest.Start(t)
	c := srv.Client(t, "acme")
	start := time.Now()
	err := c.Call(t.Context(), "scheduler", "hosts", &schedulerv1.HostsRequest{}, &schedulerv1.HostsReply{})
	if !errors.Is(err, sdk.ErrDenied) || time.Since(start) > 5*time.Second {
		t.Fatalf("got %v after %s", err, time.Since(start))
	}
	op, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: srv.OperatorFile()})
	if err != nil {
		t.Fatal(err)
	}
	defer op.Close()
	hosts := &schedulerv1.HostsReply{}
	if err := op.Call(t.Context(), "scheduler", "hosts", &schedulerv1.HostsRequest{}, hosts); err != nil || len(hosts.GetHosts()) != 2 {
		t.Fatalf("got %v, %v", hosts, err)
	}
	err = op.Call(t.Context(), "scheduler", "show", &schedulerv1.ShowRequest{Session: "none"}, &schedulerv1.ShowReply{})
	if !errors.Is(err, sdk.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	if _, err = op.Open(t.Context(), sdk.OpenOptions{User: sdk.Token("x")}); !errors.Is(err, sdk.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
}

func TestStoredEvents(t *testing.T) {
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	op, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: srv.OperatorFile()})
	if err != nil {
		t.Fatal(err)
	}
	defer op.Close()
	seq, err := op.Events(t.Context(), sdk.EventFilter{Tenant: "acme", Since: time.Hour, Stop: true})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for e, err := range seq {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, e.Name)
	}
	seq, err = op.Events(t.Context(), sdk.EventFilter{Tenant: "umbrella", Since: time.Hour, Stop: true})
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range seq {
		t.Fatalf("an event %v of a tenant without sessions, %v", e, err)
	}
	if got := strings.Join(names, " "); got != "admitted placed active asleep" {
		t.Fatalf("the events are %s", got)
	}
}

func TestConnectBadInput(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for name, cfg := range map[string]sdk.Config{
		"nothing":     {},
		"no file":     {ClientFile: filepath.Join(dir, "none")},
		"no json":     {ClientFile: write("a", "x")},
		"unknown key": {ClientFile: write("b", `{"url":"nats://x","name":"operator","nkey_seed":"x","more":1}`)},
		"absurd name": {URL: "nats://127.0.0.1:1", Name: "root", Seed: "x"},
		"absurd seed": {URL: "nats://127.0.0.1:1", Name: "operator", Seed: "x"},
	} {
		if _, err := sdk.Connect(t.Context(), cfg); err == nil {
			t.Errorf("%s: connected", name)
		}
	}
	srv := sdktest.Start(t)
	f, err := sdk.ReadClientFile(srv.ClientFile("acme"))
	if err != nil {
		t.Fatal(err)
	}
	f.URL = "nats://127.0.0.1:1"
	_, err = sdk.Connect(t.Context(), sdk.Config{URL: f.URL, Name: f.Name, Seed: f.Seed})
	if !errors.Is(err, sdk.ErrUnavailable) {
		t.Fatalf("got %v", err)
	}
}

func TestSealAndUnseal(t *testing.T) {
	srv := sdktest.Start(t)
	c := srv.Client(t, "acme")
	u := sdk.UserSession{User: sdk.Token(srv.Token("acme", "ann"))}
	if _, err := c.Seal(t.Context(), "open", []byte(`{"no_such_field":1}`), u); !errors.Is(err, sdk.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
	sealed, err := c.Seal(t.Context(), "open", []byte(`{"session_name":"x"}`), u)
	if err != nil {
		t.Fatal(err)
	}
	msg := newJSON(sealed.Subject, sealed.Body)
	answer, err := c.NATS().RequestMsg(msg, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	reply, err := sdk.Unseal(answer.Data, sealed.ReplySeed)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(reply), `"grant"`) || bytes.Contains(answer.Data, []byte("grant")) {
		t.Fatalf("the reply is %s", reply)
	}
	other, err := c.Seal(t.Context(), "status", []byte(`{}`), u)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sdk.Unseal(answer.Data, other.ReplySeed); !errors.Is(err, sdk.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
}
