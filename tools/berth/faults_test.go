package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

// running starts a command, which goes on after signals, and whose signals are handled as those of berth exec.
func running(t *testing.T, w *world) (c *sdk.Client, quit <-chan syscall.Signal, told <-chan struct{}) {
	t.Helper()
	heard, over := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(over) })
	w.srv.Register("stubborn", func(ctx context.Context, _ *sdktest.Proc) int {
		<-ctx.Done()
		close(heard)
		<-over
		return 0
	})
	c = w.srv.Client(t, "acme")
	s, err := c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(w.token)})
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Exec(t.Context(), sdk.Command("stubborn"))
	if err != nil {
		t.Fatal(err)
	}
	started, quit, stop := (&execCmd{}).signals(&app{}, c.NATS().IsConnected)
	t.Cleanup(stop)
	started <- p
	return c, quit, heard
}

func hear(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(os.Getpid(), sig); err != nil {
		t.Fatal(err)
	}
}

// Exec: a command that does not end keeps the program too.
func TestASecondSignalEndsExec(t *testing.T) {
	w := start(t)
	_, quit, told := running(t, w)
	hear(t, syscall.SIGTERM)
	<-told
	hear(t, syscall.SIGINT) // the first of its kind
	hear(t, syscall.SIGTERM)
	select {
	case sig := <-quit:
		if sig != syscall.SIGTERM {
			t.Errorf("it ends by %s", sig)
		}
	case <-time.After(10 * time.Second):
		t.Error("the program goes on")
	}
}

// Exec: while the stream is lost a signal does nothing for minutes.
func TestASignalEndsExecWhileTheStreamIsLost(t *testing.T) {
	w := start(t)
	c, quit, _ := running(t, w)
	if _, err := w.srv.ShutOut("acme"); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); c.NATS().IsConnected() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	hear(t, syscall.SIGINT)
	select {
	case sig := <-quit:
		if sig != syscall.SIGINT {
			t.Errorf("it ends by %s", sig)
		}
	case <-time.After(10 * time.Second):
		t.Error("the program goes on")
	}
}

// Exec: of a tenant that is suspended it hangs.
func TestExecOfALoginThatIsRefusedEndsAndSaysWhy(t *testing.T) {
	w := start(t)
	w.ok("session", "open")
	out := &watched{want: "up", seen: make(chan struct{})}
	var said bytes.Buffer
	code := make(chan int, 1)
	go func() {
		a := &app{ctx: t.Context(), stdin: strings.NewReader(""), stdout: out, stderr: &said}
		code <- run(a, []string{"exec", "--", "sh", "-c", "echo up; sleep 100"})
	}()
	<-out.seen
	if _, err := w.srv.ShutOut("acme"); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-code:
		if got != 255 || !strings.Contains(said.String(), "the bus refuses this login now") || strings.Count(said.String(), "\n") != 1 {
			t.Errorf("exit %d, %q", got, said.String())
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it hangs")
	}
	if _, say, got := w.berth("", "session", "list", "--mine"); got != 1 || !strings.Contains(say, "the bus refuses this login now") || strings.Contains(say, "nats:") {
		t.Errorf("a later command: exit %d, %q", got, say)
	}
}

// Tokens: what is no file's name is printed with the error of opening it.
func TestNoErrorOfATokenPrintsIt(t *testing.T) {
	w := start(t)
	long := "eyJ" + strings.Repeat("secret", 100)
	for _, args := range [][]string{
		{"issuer", "test", "https://issuer.example", "--token", long},
		{"issuer", "test", "https://issuer.example", "--token", long + ".secret.secret"},
		{"session", "open", "--token", "@" + long},
		{"session", "open", "--token", "@"},
	} {
		out, say, code := w.berth("", args...)
		if code == 0 || strings.Contains(out+say, "secret") || strings.Count(say, "\n") != 1 {
			t.Errorf("berth %.60q: exit %d, %q, %q", args, code, out, say)
		}
	}
}

// Tokens: --token takes the JWT alone, which then stands in the list of processes.
func TestATokenIsTakenFromAFileAndFromStandardInput(t *testing.T) {
	w := start(t)
	os.Unsetenv("BERTH_TOKEN")
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(w.token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.ok("session", "open", "--token", "@"+file)
	if _, say, code := w.berth(w.token+"\n", "session", "open", "--token", "-"); code != 0 {
		t.Errorf("exit %d, %q", code, say)
	}
	if _, say, code := w.berth("", "session", "open", "--token", "-"); code != 1 || !strings.Contains(say, "is empty") {
		t.Errorf("exit %d, %q", code, say)
	}
	if _, say, code := w.berth(w.token, "exec", "-i", "--token", "-", "--", "cat"); code != 2 || !strings.Contains(say, "@FILE") {
		t.Errorf("exit %d, %q", code, say)
	}
}

// Delegation: a frontend takes its own right and cannot give it back.
func TestRevokingTheFrontendThatAsksIsWarnedOf(t *testing.T) {
	w := start(t)
	w.ok("session", "open")
	_, say, code := w.berth("", "delegation", "revoke", sdktest.Frontend)
	if code != 0 || !strings.Contains(say, "only another frontend can give the right back") || strings.Count(say, "\n") != 1 {
		t.Errorf("exit %d, %q", code, say)
	}
}

// Key: "3 sessions ... was deleted".
func TestWhatIsDeletedLatelyIsCountedInWords(t *testing.T) {
	w := start(t)
	path := w.keyFile()
	for _, name := range []string{"one", "two"} {
		w.ok("session", "open", name)
		w.ok("session", "delete", name)
	}
	if _, say, code := w.berth("", "key", "retire", "session", "1", "--file", path); code != 1 || !strings.Contains(say, "2 sessions derived with it were deleted") {
		t.Errorf("exit %d, %q", code, say)
	}
}

// CA: issue replaces whatever file it is given.
func TestIssueDoesNotReplaceAFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "mine")
	if _, stderr, code := atCA(dir, time.Now(), "ca", "init"); code != 0 {
		t.Fatal(stderr)
	}
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	issue := []string{"ca", "issue", "service", "identity", "--out", file}
	_, stderr, code := atCA(dir, time.Now(), issue...)
	if raw, err := os.ReadFile(file); code != 1 || !strings.Contains(stderr, "--force") || string(raw) != "mine" {
		t.Errorf("exit %d, %q, %v", code, stderr, err)
	}
	if _, stderr, code := atCA(dir, time.Now(), append(issue, "--force")...); code != 0 {
		t.Errorf("exit %d, %q", code, stderr)
	}
}

// CA: an authority that may not be read is taken for none.
func TestAnAuthorityThatCannotBeReadIsThere(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may read everything")
	}
	dir := t.TempDir()
	if _, stderr, code := atCA(dir, time.Now(), "ca", "init"); code != 0 {
		t.Fatal(stderr)
	}
	if err := os.Chmod(filepath.Join(dir, "tls", "ca"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(filepath.Join(dir, "tls", "ca"), 0o700) })
	if _, stderr, code := atCA(dir, time.Now(), "ca", "show"); code != 1 || !strings.Contains(stderr, "cannot be read") || strings.Contains(stderr, "init") {
		t.Errorf("exit %d, %q", code, stderr)
	}
}
