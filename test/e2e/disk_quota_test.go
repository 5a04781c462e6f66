package e2e

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestQuotaIsToldAndGrows: a program that fills the disk gets 'No space left on device'; the user's
// frontend and the operator hear it in a sentence, first at 90%, then when it is full. The session
// sleeps, wakes, can delete and write again; and a program that waits for room goes on once the disk
// has grown under it.
func TestQuotaIsToldAndGrows(t *testing.T) {
	e := diskEnv(t, diskTerms{Disk: 128 << 20})
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	user, operator := listen(t, c, s.Key()), listen(t, e.Operator(), s.Key())
	put(t, s, "/root/precious", "precious")
	fill := func(upTo string) string {
		return sh(t, s, `cd /root; while [ $(df --output=pcent / | tail -n1 | tr -dc 0-9) -lt `+upTo+` ]; do head -c 2000000 /dev/urandom >> big || break; sync; done 2>&1`)
	}
	near := func(b *hostv1.Event) bool { return strings.Contains(b.GetReason(), "% full") }
	full := func(b *hostv1.Event) bool { return strings.Contains(b.GetReason(), "is full") }
	hear := func(what string, ok func(*hostv1.Event) bool) {
		t.Helper()
		for who, l := range map[string]*listener{"user": user, "operator": operator} {
			b := hostEvent(t, l.await(t, "quota", func(ev sdk.Event) bool { return ok(hostEvent(t, ev)) }))
			sentence(t, who+" at "+what, b.GetReason())
			if b.GetTotalBytes() == 0 || b.GetDoneBytes() > b.GetTotalBytes() {
				t.Errorf("%s at %s: %d of %d bytes", who, what, b.GetDoneBytes(), b.GetTotalBytes())
			}
		}
	}
	fill("91")
	hear("90%", near)
	out := sh(t, s, `cd /root; cat /dev/zero > rest 2>err; cat err; i=0; while echo x > small.$i; do i=$((i+1)); done 2>/dev/null; sync`)
	if !strings.Contains(out, "No space left on device") {
		t.Errorf("the program that fills the disk says %q", out)
	}
	hear("its end", full)

	for range 2 {
		if err := s.Close(t.Context()); err != nil {
			t.Fatalf("a full session does not sleep: %v", err)
		}
		if s = open(t, c, sdk.OpenOptions{}); s.Origin() != sdk.Resumed || content(t, s, "/root/precious") != "precious" {
			t.Fatalf("a full session wakes %s and says %q", s.Origin(), content(t, s, "/root/precious"))
		}
	}
	s = writesOnOnceItGrew(t, e, c, s)
	if out := sh(t, s, "rm -f /root/more /root/rest /root/small.* && head -c 30000000 /dev/zero > /root/again && sync && stat -c %s /root/again"); out != "30000000" {
		t.Errorf("after deleting: %q", out)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s = open(t, c, sdk.OpenOptions{}); content(t, s, "/root/precious") != "precious" || sh(t, s, "df --output=size -B1M / | tail -n1 | tr -dc 0-9") < "200" {
		t.Errorf("after growing and a sleep: %q, %s MiB", content(t, s, "/root/precious"), sh(t, s, "df --output=size -B1M / | tail -n1"))
	}
}

// writesOnOnceItGrew has a program wait for room while the disk grows under it. Where the kernel lets
// nobody resize a mounted file system here, the disk grows with the next wake, and that is said.
func writesOnOnceItGrew(t *testing.T, e *testenv.Env, c *sdk.Client, s *sdk.Session) *sdk.Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	const write = "head -c 40000000 /dev/zero > /root/more"
	r, w := io.Pipe()
	p, err := s.Exec(ctx, sdk.Cmd{Args: []string{"sh", "-c", "until " + write + " 2>/dev/null; do echo waiting; sleep 0.2; done; echo written"}, Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	go func() { _ = w.CloseWithError(errors.Join(p.Wait(), io.EOF)) }()
	lines := bufio.NewScanner(r)
	if !lines.Scan() || lines.Text() != "waiting" {
		t.Fatalf("the program on a full disk says %q (%v)", lines.Text(), lines.Err())
	}
	out, err := e.CLI("disk", "grow", s.Key(), "256MiB")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !mayResize(t) {
		t.Logf("no CAP_SYS_RESOURCE here, so that no mounted disk grows: %s", strings.TrimSpace(out))
		if !strings.Contains(out, "next") {
			t.Errorf("a growth that waits for the next open says %q", out)
		}
		go func() { _, _ = io.Copy(io.Discard, r) }()
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		s = open(t, c, sdk.OpenOptions{})
		sh(t, s, write)
		return s
	}
	for lines.Scan() && lines.Text() == "waiting" {
	}
	if lines.Text() != "written" {
		t.Errorf("the program that waited for room says %q (%v)", lines.Text(), lines.Err())
	}
	return s
}

// mayResize reports whether this process, and so berth up, may resize a file system that is mounted.
func mayResize(t *testing.T) bool {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(raw), "CapEff:")
	caps, err := strconv.ParseUint(strings.Fields(rest)[0], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	const sysResource = 24
	return caps&(1<<sysResource) != 0
}
