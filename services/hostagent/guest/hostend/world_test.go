package hostend_test

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

func output(t *testing.T, c *hostend.Conn, sp hostend.ExecSpec) string {
	t.Helper()
	s, err := c.StartExec(testContext(t), sp)
	if err != nil {
		t.Fatal(err)
	}
	o := collect(t, s)
	o.wantCode(t, 0)
	return strings.TrimSpace(string(o.out))
}

func TestUsers(t *testing.T) {
	c := startGuest(t).attach()
	id := []string{"sh", "-c", "echo $(id -u) $(id -g) $USER $HOME; test -w /etc/passwd && echo writable"}
	for _, k := range []struct{ user, want string }{
		{"", "0 0 root /root\nwritable"},
		{"nobody", "65534 65534 nobody /nonexistent"},
		{"12345:23456", "12345 23456 12345 /"},
		{"12345", "12345 0 12345 /"},
		{"nobody:daemon", "65534 1 nobody /nonexistent"},
	} {
		got := output(t, c, hostend.ExecSpec{Key: "as-" + k.user, Argv: []string{id[0], id[1], id[2] + "; true"}, User: k.user})
		if got != k.want {
			t.Errorf("user %q: %q, want %q", k.user, got, k.want)
		}
	}
	if _, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "z", Argv: id, User: "nosuchuser"}); !errors.Is(err, hostend.ErrInvalid) {
		t.Errorf("unknown user: %v", err)
	}
	groups := output(t, c, hostend.ExecSpec{Key: "groups", Argv: []string{"id", "-G"}, User: "nobody"})
	if groups != "65534" {
		t.Errorf("supplementary groups of nobody: %s", groups)
	}
}

func TestEnvironmentAndDescriptors(t *testing.T) {
	c := startGuest(t).attach()
	env := strings.Split(output(t, c, hostend.ExecSpec{Key: "env", Argv: []string{"env"}, Env: []string{"A=1", "HOME=/tmp", "A=2", "BAD=\xff"}}), "\n")
	for _, want := range []string{"A=2", "HOME=/tmp", "LANG=C.UTF-8", "USER=root", "BAD=\xff"} {
		if !slices.Contains(env, want) {
			t.Errorf("%q is missing in %q", want, env)
		}
	}
	if len(env) != 7 { // and PATH and LOGNAME
		t.Errorf("environment %q", env)
	}
	if fds := output(t, c, hostend.ExecSpec{Key: "fds", Argv: []string{"sh", "-c", "for i in $(seq 3 30); do test -e /proc/$$/fd/$i && echo $i; done; true"}}); fds != "" {
		t.Errorf("descriptors %s", fds)
	}
	if wd := output(t, c, hostend.ExecSpec{Key: "cwd", Argv: []string{"pwd"}, Cwd: "/usr/bin"}); wd != "/usr/bin" {
		t.Errorf("working directory %s", wd)
	}
	if sig := output(t, c, hostend.ExecSpec{Key: "sig", Argv: []string{"sh", "-c", "grep -E 'Sig(Ign|Blk)' /proc/self/status; true"}}); sig != ownSignals(t) {
		t.Errorf("signals are ignored or blocked:\n%s\nthis test has\n%s", sig, ownSignals(t))
	}
}

// ownSignals is what this process ignores and blocks: a signal that whoever
// started the test ignores (some shells do) stays ignored for all below it. What
// Go itself blocks for its threads must not be passed on.
func ownSignals(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if strings.HasPrefix(line, "SigIgn:") {
			return "SigBlk:\t0000000000000000\n" + strings.TrimSpace(line)
		}
	}
	t.Fatal("no SigIgn in /proc/self/status")
	return ""
}

func TestStartThatCannotBe(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	for name, k := range map[string]struct {
		spec  hostend.ExecSpec
		err   error
		errno unix.Errno
	}{
		"no program":    {hostend.ExecSpec{Argv: []string{"no-such-program"}}, hostend.ErrStartFailed, unix.ENOENT},
		"no file":       {hostend.ExecSpec{Argv: []string{"/no/such/program"}}, hostend.ErrStartFailed, unix.ENOENT},
		"a directory":   {hostend.ExecSpec{Argv: []string{"/usr"}}, hostend.ErrStartFailed, unix.EACCES},
		"no cwd":        {hostend.ExecSpec{Argv: []string{"true"}, Cwd: "/no/such"}, hostend.ErrStartFailed, unix.ENOENT},
		"empty argv":    {hostend.ExecSpec{}, hostend.ErrInvalid, 0},
		"zero byte":     {hostend.ExecSpec{Argv: []string{"a\x00b"}}, hostend.ErrInvalid, 0},
		"env":           {hostend.ExecSpec{Argv: []string{"true"}, Env: []string{"novalue"}}, hostend.ErrInvalid, 0},
		"long argument": {hostend.ExecSpec{Argv: []string{"true", strings.Repeat("x", 200_000)}}, hostend.ErrStartFailed, unix.E2BIG},
	} {
		k.spec.Key = name
		for range 2 { // a failed start leaves the key free
			_, err := c.StartExec(testContext(t), k.spec)
			var got *hostend.Error
			if !errors.Is(err, k.err) || !errors.As(err, &got) || got.Errno != int(k.errno) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if list, err := c.ListExecs(testContext(t)); err != nil || len(list) != 0 {
		t.Errorf("execs %v, %v", list, err)
	}
	big := strings.Repeat("x", 120_000)
	if got := output(t, c, hostend.ExecSpec{Key: "big", Argv: []string{"sh", "-c", "echo ${#1} ${#2}", "sh", big, big}}); got != "120000 120000" {
		t.Errorf("long arguments: %s", got)
	}
}

func TestSyncLeavesProcessesAlone(t *testing.T) {
	c := startGuest(t).attach()
	ctx := testContext(t)
	s, err := c.StartExec(ctx, hostend.ExecSpec{Key: "goes-on", Argv: []string{"cat"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	if st, err := c.Stats(ctx); err != nil || st.LiveExecs != 1 || st.Quiesced {
		t.Errorf("after a sync: %+v %v", st, err)
	}
	if err := c.Signal(ctx, s.Key(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	collect(t, s)
}

func TestQuiesceEndsEverything(t *testing.T) {
	c := startGuest(t).attach()
	ctx := testContext(t)
	if o := run(t, c, "daemons", "(trap '' TERM; setsid sleep 100000 >/dev/null 2>&1 </dev/null & ) ; exit 0"); o.exit == nil {
		t.Fatal("no exit")
	}
	s, err := c.StartExec(ctx, hostend.ExecSpec{Key: "stubborn", Argv: []string{"sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.01; done"}})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, s, "ready")
	polite, err := c.StartExec(ctx, hostend.ExecSpec{Key: "polite", Argv: []string{"sh", "-c", "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"}})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, polite, "ready")
	q, err := c.Quiesce(ctx, 300*time.Millisecond)
	if err != nil || !q.Killed || q.Remaining != 0 {
		t.Fatalf("%+v, %v", q, err)
	}
	if o := collect(t, s); o.exit.Signal != 9 {
		t.Errorf("stubborn: %s", describe(o.exit))
	}
	if o := collect(t, polite); string(o.out) != "saved\n" || describe(o.exit) != "code 0" {
		t.Errorf("polite: %q, %s", o.out, describe(o.exit))
	}
	if st, err := c.Stats(ctx); err != nil || st.Processes != 0 || !st.Quiesced {
		t.Errorf("%+v, %v", st, err)
	}
	if _, err := c.StartExec(ctx, hostend.ExecSpec{Key: "late", Argv: []string{"true"}}); !errors.Is(err, hostend.ErrQuiesced) {
		t.Errorf("start while quiesced: %v", err)
	}
	if err := c.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	run(t, c, "again", "exit 0").wantCode(t, 0)
}

func TestStatsSayWhetherTheSandboxIsIdle(t *testing.T) {
	c := startGuest(t).attach()
	s := startCat(t, c, "x")
	run(t, c, "daemon", "sleep 1000 >/dev/null 2>&1 &").wantCode(t, 0)
	st, err := c.Stats(testContext(t))
	if err != nil || st.LiveExecs != 1 || st.Background != 1 || st.Processes != 2 || st.MemTotal == 0 || st.AgentRSS == 0 || len(st.Top) != 2 {
		t.Errorf("%+v, %v", st, err)
	}
	if now, err := c.Ping(testContext(t)); err != nil || time.Since(now).Abs() > time.Minute {
		t.Errorf("ping: %v, %v", now, err)
	}
	_ = s
}

func TestShutdownOfPID1IsOrderly(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"sh", "-c", "trap 'echo saved; exit 7' TERM; echo ready; while :; do sleep 0.01; done"}})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, s, "ready")
	if err := g.terminate(); err != nil {
		t.Fatal(err)
	}
	expect(t, s, "saved")
	if err := g.cmd.Wait(); err != nil {
		t.Errorf("PID 1: %v", err)
	}
}
