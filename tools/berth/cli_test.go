package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

// world is the fake with one user.
type world struct {
	t     *testing.T
	srv   *sdktest.Server
	token string
}

func start(t *testing.T) *world {
	for _, v := range []string{"BERTH_TENANT", "BERTH_USER", "BERTH_TOKEN", "BERTH_CLIENT", "BERTH_DIR"} {
		t.Setenv(v, "")
		os.Unsetenv(v)
	}
	srv := sdktest.Start(t)
	w := &world{t: t, srv: srv, token: srv.Token("acme", "ann")}
	t.Setenv("BERTH_DIR", srv.Dir())
	t.Setenv("BERTH_TENANT", "acme")
	t.Setenv("BERTH_TOKEN", w.token)
	return w
}

// berth runs the program.
func (w *world) berth(stdin string, args ...string) (stdout, stderr string, code int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var out, errOut bytes.Buffer
	code = run(&app{ctx: ctx, stdin: strings.NewReader(stdin), stdout: &out, stderr: &errOut}, args)
	return out.String(), errOut.String(), code
}

// ok runs the program and needs it to do well.
func (w *world) ok(args ...string) string {
	w.t.Helper()
	out, errOut, code := w.berth("", args...)
	if code != 0 || errOut != "" {
		w.t.Fatalf("berth %s: exit %d, %s", strings.Join(args, " "), code, errOut)
	}
	return out
}

// json runs the program with --json and reads what it printed.
func (w *world) json(into any, args ...string) {
	w.t.Helper()
	out := w.ok(append([]string{"--json"}, args...)...)
	dec := json.NewDecoder(strings.NewReader(out))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		w.t.Fatalf("berth %s printed %q: %v", strings.Join(args, " "), out, err)
	}
}

func TestSessions(t *testing.T) {
	w := start(t)
	var open openOut
	w.json(&open, "session", "open")
	if open.Origin != "created" || open.Name != "default" || open.Place.Tier != "gvisor" || open.Timing.TotalMS <= 0 {
		t.Fatalf("%+v", open)
	}
	if out := w.ok("session", "open"); !strings.Contains(out, "joined: it was awake") {
		t.Errorf("%s", out)
	}
	w.ok("session", "open", "second", "--queue", "--ephemeral")
	var list listOut
	w.json(&list, "session", "list")
	if len(list.Sessions) != 2 || list.Sessions[0].User != "ann" {
		t.Errorf("%+v", list)
	}
	w.json(&list, "session", "list", "--mine")
	if len(list.Sessions) != 2 || list.Sessions[0].Tenant != "acme" {
		t.Errorf("%+v", list)
	}
	var show showOut
	w.json(&show, "session", "show")
	if show.Session != open.Session || show.State != "active" || len(show.LastWake.Steps) == 0 {
		t.Errorf("%+v", show)
	}
	w.ok("session", "close", open.Session)
	if out := w.ok("session", "show", open.Session); !strings.Contains(out, "asleep") || !strings.Contains(out, "host.disk.attach") {
		t.Errorf("%s", out)
	}
	for _, args := range [][]string{{"session", "delete"}, {"session", "delete", "nosuch"}, {"disk", "export", "nosuch", "-"}} {
		if _, stderr, code := w.berth("", args...); code == 0 {
			t.Errorf("%v ended well, %q", args, stderr)
		}
	}
	w.json(&list, "session", "list", "--mine")
	if len(list.Sessions) != 2 {
		t.Errorf("a mistyped name deleted or made a session: %+v", list)
	}
	w.ok("session", "delete", "default")
	var again openOut
	w.json(&again, "session", "open")
	if again.Origin != "created" || again.Generation == open.Generation {
		t.Errorf("%+v", again)
	}
	var stored submittedOut
	w.json(&stored, "session", "open", "third", "--no-wait")
	if stored.RequestID == "" {
		t.Error("no request id")
	}
	if out := w.ok("host", "list"); !strings.Contains(out, "alive") {
		t.Errorf("%s", out)
	}
}

func TestExec(t *testing.T) {
	w := start(t)
	for _, c := range []struct {
		stdin    string
		args     []string
		out, say string
		code     int
	}{
		{"", []string{"exec", "default", "--", "echo", "-n", "--x"}, "-n --x\n", "", 0},
		{"", []string{"exec", "default", "echo", "plain"}, "", "flags come first", 2},
		{"", []string{"exec", "default", "--tenant", "acme", "--", "true"}, "", "flags come first", 2},
		{"", []string{"exec", "--", "echo", "--", "x"}, "-- x\n", "", 0},
		{"", []string{"exec", "-w", "/tmp", "--", "pwd"}, "/tmp\n", "", 0},
		{"", []string{"exec", "other", "--", "echo", "-i", "--", "x"}, "-i -- x\n", "", 0},
		{"", []string{"exec"}, "", "no command", 2},
		{"", []string{"exec", "default", "--"}, "", "no command", 2},
		{"in\n", []string{"exec", "-i", "default", "--", "cat"}, "in\n", "", 0},
		{"in\n", []string{"exec", "default", "--", "cat"}, "", "", 0},
		{"", []string{"exec", "default", "--", "sh", "-c", "echo err >&2; exit 7"}, "", "err", 7},
		{"", []string{"exec", "-e", "A=b,c", "default", "--", "env"}, "A=b,c\n", "", 0},
		{"", []string{"exec", "-w", "/tmp", "default", "--", "pwd"}, "/tmp\n", "", 0},
		{"", []string{"exec", "--timeout", "100ms", "default", "--", "sleep", "9"}, "", "after its time-out", 137},
		{"", []string{"exec", "default", "--", "/no/such"}, "", "no such program", 1},
		{"", []string{"exec", "default"}, "", "no command", 2},
		{"", []string{"exec", "-t", "default", "--", "true"}, "", "needs a terminal", 2},
		{"", []string{"exec", "-e", "A", "default", "--", "true"}, "", "not NAME=VALUE", 2},
		{"", []string{"exec", "A.B", "--", "true"}, "", "session name", 2},
	} {
		out, say, code := w.berth(c.stdin, c.args...)
		if out != c.out || code != c.code || !strings.Contains(say, c.say) || c.say == "" && say != "" {
			t.Errorf("berth %q: exit %d, out %q, err %q", c.args, code, out, say)
		}
	}
	w.srv.Register("doomed", func(ctx context.Context, p *sdktest.Proc) int {
		list, _ := w.session()
		go func() { time.Sleep(50 * time.Millisecond); w.srv.Sleep(list) }()
		<-ctx.Done()
		return 0
	})
	if _, say, code := w.berth("", "exec", "default", "--", "doomed"); code != 255 || strings.Count(say, "\n") != 1 {
		t.Errorf("an exit that nobody knows: exit %d, %q", code, say)
	}
}

// session is the key of the user's default session.
func (w *world) session() (string, error) {
	c := w.srv.Client(w.t, "acme")
	list, err := c.Status(context.Background(), sdk.UserSession{User: sdk.Token(w.token), Name: "default"})
	if err != nil || len(list) != 1 {
		return "", err
	}
	return list[0].Key, nil
}

func TestTerminal(t *testing.T) {
	w := start(t)
	master, tty, err := pty.Open()
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	defer master.Close()
	defer tty.Close()
	if err := pty.Setsize(master, &pty.Winsize{Rows: 33, Cols: 99}); err != nil {
		t.Fatal(err)
	}
	w.ok("session", "open")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out := &watched{want: "33 99", seen: make(chan struct{})}
	w.srv.Register("sizes", func(ctx context.Context, p *sdktest.Proc) int {
		for last := (sdktest.Size{}); ctx.Err() == nil && last.Cols != 111; time.Sleep(time.Millisecond) {
			if size, _ := p.TTY(); size != last {
				fmt.Fprintf(p.Stdout, "%d %d\n", size.Rows, size.Cols)
				last = size
			}
		}
		line, _ := bufio.NewReader(p.Stdin).ReadString('\r')
		fmt.Fprintf(p.Stdout, "%q\n", line)
		return 6
	})
	done := make(chan int, 1)
	go func() {
		done <- run(&app{ctx: ctx, stdin: tty, stdout: out, stderr: io.Discard}, []string{"exec", "-it", "--", "sizes"})
	}()
	select {
	case <-out.seen:
	case <-ctx.Done():
		t.Fatal("the first size did not come")
	}
	if err := pty.Setsize(master, &pty.Winsize{Rows: 44, Cols: 111}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	if _, err := master.WriteString("\x03key\r"); err != nil { // raw: no signal, no line discipline
		t.Fatal(err)
	}
	if code := <-done; code != 6 || !strings.HasSuffix(out.String(), "44 111\n\"\\x03key\\r\"\n") {
		t.Errorf("exit %d, %q", code, out.String())
	}
}

// watched is a Writer that says when it has seen a text.
type watched struct {
	mu   sync.Mutex
	b    bytes.Buffer
	want string
	seen chan struct{}
}

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	had := strings.Contains(w.b.String(), w.want)
	w.b.Write(p)
	if !had && strings.Contains(w.b.String(), w.want) {
		close(w.seen)
	}
	return len(p), nil
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

func TestCopy(t *testing.T) {
	w := start(t)
	src := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(src, "tree", "deep"), 0o755))
	must(os.WriteFile(filepath.Join(src, "tree", "a"), []byte("aaa"), 0o640))
	must(os.WriteFile(filepath.Join(src, "tree", "deep", "b"), bytes.Repeat([]byte("b"), 200_000), 0o600))
	must(os.Symlink("a", filepath.Join(src, "tree", "link")))
	out, say, code := w.berth("", "--json", "cp", filepath.Join(src, "tree"), "default:/work")
	var up copyOut
	must(json.Unmarshal([]byte(out), &up))
	if code != 0 || up.Files != 2 || up.Dirs != 2 || up.Bytes != 200_003 || len(up.Skipped) != 1 || !strings.Contains(say, "skipped") {
		t.Fatalf("exit %d, %s, %s", code, out, say)
	}
	dst := t.TempDir()
	w.ok("cp", "default:/work/tree", dst)
	got, err := os.ReadFile(filepath.Join(dst, "tree", "deep", "b"))
	must(err)
	if len(got) != 200_000 {
		t.Errorf("%d bytes came back", len(got))
	}
	info, err := os.Stat(filepath.Join(dst, "tree", "a"))
	must(err)
	if info.Mode().Perm() != 0o640 {
		t.Errorf("mode %s", info.Mode())
	}
	w.ok("cp", "default:/work/tree/a", filepath.Join(dst, "renamed"))
	if _, say, code = w.berth("from stdin", "cp", "-", "default:/tmp/x"); code != 0 {
		t.Errorf("%s", say)
	}
	if _, say, code = w.berth("at home", "cp", "-", ":y"); code != 0 {
		t.Errorf("%s", say)
	}
	if out := w.ok("cp", "default:/root/y", "-"); out != "at home" {
		t.Errorf("%q", out)
	}
	if out := w.ok("cp", "default:/tmp/x", "-"); out != "from stdin" {
		t.Errorf("%q", out)
	}
	for _, args := range [][]string{{"a", "b"}, {"default:/a", "default:/b"}} {
		if _, say, code := w.berth("", append([]string{"cp"}, args...)...); code != 2 || say == "" {
			t.Errorf("cp %q: exit %d, %q", args, code, say)
		}
	}
	if _, say, code := w.berth("", "cp", "default:/none", "b"); code != 1 || !strings.Contains(say, "no such file") {
		t.Errorf("exit %d, %q", code, say)
	}
	if _, say, code := w.berth("", "cp", "/no/such", "default:/b"); code != 1 || !strings.Contains(say, "no such file") {
		t.Errorf("exit %d, %q", code, say)
	}
}

func TestTail(t *testing.T) {
	w := start(t)
	w.ok("session", "open")
	w.ok("session", "close")
	out := w.ok("tail", "--since", "1h", "--no-follow")
	var names []string
	for _, l := range strings.Split(strings.TrimSpace(out), "\n") {
		names = append(names, strings.Fields(l)[3])
	}
	if got := strings.Join(names, " "); got != "admitted placed active asleep" {
		t.Errorf("%s", out)
	}
	out = w.ok("--json", "tail", "--since", "1h", "--no-follow", "--event", "active", "--tenant", "acme")
	var e eventOut
	if err := json.Unmarshal([]byte(out), &e); err != nil || e.Event != "active" || e.State != "active" || e.RequestID == "" || len(e.Body) == 0 {
		t.Errorf("%v: %s", err, out)
	}
	if out = w.ok("tail", "--since", "1h", "--no-follow", "--tenant", "umbrella"); out != "" {
		t.Errorf("%s", out)
	}
	if _, say, code := w.berth("", "tail", "--since", "1h", "--no-follow", "--session", "A.B"); code != 2 || !strings.Contains(say, "session key") {
		t.Errorf("a session that is none: %d %s", code, say)
	}
	if _, say, code := w.berth("", "tail", "--no-follow"); code != 2 || say == "" {
		t.Errorf("exit %d, %q", code, say)
	}
	if _, say, code := w.berth("", "tail", "--since", "1h", "--client", "fe-acme-app"); code != 1 || !strings.Contains(say, "operator") {
		t.Errorf("exit %d, %q", code, say)
	}
}

func TestDead(t *testing.T) {
	w := start(t)
	if out := w.ok("dead", "list"); out != "no dead messages\n" {
		t.Errorf("%s", out)
	}
	if err := w.srv.Bury("lifecycle", "cannot decode", []byte("body")); err != nil {
		t.Fatal(err)
	}
	var list deadListOut
	w.json(&list, "dead", "list")
	if len(list.Messages) != 1 || list.Messages[0].Reason != "cannot decode" || list.Messages[0].Deliveries != 10 {
		t.Fatalf("%+v", list)
	}
	var one deadOut
	w.json(&one, "dead", "show", "1")
	if string(one.Body) != "body" || one.Header["Ce-Id"] == nil {
		t.Errorf("%+v", one)
	}
	w.ok("dead", "retry", "1")
	if out := w.ok("dead", "list"); out != "no dead messages\n" {
		t.Errorf("%s", out)
	}
	if _, say, code := w.berth("", "dead", "show", "99"); code != 1 || strings.Count(say, "\n") != 1 {
		t.Errorf("exit %d, %q", code, say)
	}
}

func TestRequest(t *testing.T) {
	w := start(t)
	keys := filepath.Join(t.TempDir(), "keys.json")
	var s sealOut
	w.json(&s, "request", "seal", "--verb", "open", "--body", `{"session_name":"x"}`, "--key-out", keys)
	if info, err := os.Stat(keys); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info, err)
	}
	if strings.Contains(string(s.Body), w.token) {
		t.Fatal("the token is in the clear")
	}
	msg := &nats.Msg{Subject: s.Subject, Data: s.Body, Header: nats.Header{"Content-Type": {"application/json"}}}
	answer, err := w.srv.Client(t, "acme").NATS().RequestMsg(msg, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	out, say, code := w.berth(string(answer.Data), "request", "unseal", "--key", keys)
	if code != 0 || !strings.Contains(out, `"grant"`) {
		t.Fatalf("exit %d, %s, %s", code, out, say)
	}
	for _, c := range []struct {
		args []string
		code int
	}{
		{[]string{"request", "seal", "--verb", "open", "--body", `{"no_such":1}`}, 1},
		{[]string{"request", "seal", "--verb", "steal"}, 2},
		{[]string{"request", "seal", "--verb", "open", "--key-out", keys}, 1}, // never written over
		{[]string{"request", "unseal", "--key", "/no/such"}, 1},
	} {
		if _, say, code := w.berth("", c.args...); code != c.code || strings.Count(say, "\n") != 1 {
			t.Errorf("%q: exit %d, %q", c.args, code, say)
		}
	}
}

func TestLogins(t *testing.T) {
	w := start(t)
	os.Unsetenv("BERTH_TENANT")
	for _, c := range []struct {
		args []string
		say  string
		code int
	}{
		{[]string{"session", "open"}, "several tenants", 2},
		{[]string{"session", "open", "--tenant", "nobody"}, "has no login", 1},
		{[]string{"session", "open", "--client", "operator"}, "no frontend", 1},
		{[]string{"session", "open", "--client", "fe-umbrella-app"}, "another tenant", 1},
		{[]string{"--dir", "/no/such", "session", "open"}, "berth up", 1},
		{[]string{"--dir", "/no/such", "host", "list"}, "operator", 1},
		{[]string{"no-such-verb"}, "berth --help", 2},
		{[]string{"session", "open", "--no-such-flag"}, "berth --help", 2},
	} {
		if _, say, code := w.berth("", c.args...); code != c.code || !strings.Contains(say, c.say) || strings.Count(say, "\n") != 1 {
			t.Errorf("%q: exit %d, %q", c.args, code, say)
		}
	}
	os.Unsetenv("BERTH_TOKEN")
	if _, say, code := w.berth("", "session", "open", "--tenant", "acme"); code != 2 || !strings.Contains(say, "--user") {
		t.Errorf("exit %d, %q", code, say)
	}
}

func TestDevToken(t *testing.T) {
	w := start(t)
	if _, say, code := w.berth("", "dev", "token", "--user", "ann"); code != 1 || strings.Count(say, "\n") != 1 {
		t.Errorf("without an issuer: exit %d, %q", code, say)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		cfg := devissuer.Config{Dir: keysDir(w.srv.Dir()), Tenants: []ids.Tenant{"acme"}}
		ended <- devissuer.Run(ctx, cfg, discard(), func() { close(ready) })
	}()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	var token tokenOut
	w.json(&token, "dev", "token", "--user", "ann", "--ttl", "5m")
	if strings.Count(token.Token, ".") != 2 || time.Until(token.Expires) > 5*time.Minute {
		t.Errorf("%+v", token)
	}
	if _, say, code := w.berth("", "dev", "token", "--user", "ann", "--ttl", "-1s"); code != 2 || say == "" {
		t.Errorf("exit %d, %q", code, say)
	}
	// A token that no issuer of the tenant stands behind is refused only when it is used.
	for _, args := range [][]string{{"dev", "token", "--tenant", "umbrella", "--user", "ann"}, {"session", "open", "--tenant", "umbrella", "--user", "ann", "--token", ""}} {
		if _, say, code := w.berth("", args...); code != 1 || !strings.Contains(say, "tenant umbrella has no development issuer") || strings.Count(say, "\n") != 1 {
			t.Errorf("berth %v: exit %d, %q", args, code, say)
		}
	}
	// The fake's identity does not know the issuer: what matters is that the token was used.
	os.Unsetenv("BERTH_TOKEN")
	if _, say, code := w.berth("", "session", "open", "--user", "ann"); code != 1 || !strings.Contains(say, "the token is not good") {
		t.Errorf("exit %d, %q", code, say)
	}
}

func TestHelp(t *testing.T) {
	w := start(t)
	out, _, code := w.berth("")
	if code != 0 || !strings.Contains(out, "session open") {
		t.Errorf("exit %d, %s", code, out)
	}
	if out := w.ok("exec", "--help"); !strings.Contains(out, "[SESSION] -- COMMAND") {
		t.Errorf("%s", out)
	}
	if out := w.ok("version"); !strings.HasPrefix(out, "berth ") {
		t.Errorf("%s", out)
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
