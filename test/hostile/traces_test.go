package hostile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// traces are attempts that need more than one moment: what is left on the disk for the next wake, for
// the host that moves files, or for the one who reads the guest's channel.
var traces = []struct {
	name string
	do   func(*world, *testing.T)
}{
	{"set-user-id files and device nodes are dead after a sleep", (*world).leftovers},
	{"links that change under a transfer lead nowhere", (*world).transfers},
	{"an export holds only the session's own files", (*world).exports},
	{"two sandboxes of one template have no number in common", (*world).twins},
	{"a session that writes into its guest's channel harms itself alone", (*world).garbles},
	{"a killed guest is the session's own loss", (*world).killsGuest},
	{"what it writes to files of the image stays its own", (*world).sharedPaths},
}

// traceRows runs them in every tier.
func traceRows(t *testing.T, e *testenv.Env) {
	program := probe(t)
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			w := enter(t, e, tier, program)
			for _, r := range traces {
				t.Run(r.name, func(t *testing.T) { counted(t, tier); r.do(w, t) })
			}
		})
	}
}

func (w *world) leftovers(t *testing.T) {
	o, err := w.try("root", "leave")
	if err != nil || !o.Through {
		t.Fatalf("%s, %v", o.Detail, err)
	}
	t.Logf("left: %s", o.Detail)
	w.sleepAndWake(t)
	for _, user := range users {
		if o, err := w.try(user, "left"); err != nil || o.Through {
			t.Errorf("a device node on the disk works as %s: %s, %v", user, o.Detail, err)
		}
	}
	var out bytes.Buffer
	err = w.attacker.Run(t.Context(), sdk.Cmd{Args: []string{"/root/left/suid", "look-self"}, User: "nobody", Stdout: &out})
	if strings.Contains(out.String(), "Uid: 65534 0 ") {
		t.Errorf("a set-user-id file on the disk gives root: %s %v", out.String(), err)
	}
	for _, link := range []string{"/root/left/link", "/root/left/up"} {
		w.ownShadow(t, link)
	}
}

// ownShadow reads a file of passwords by a link: it may be the session's own, never the host's.
func (w *world) ownShadow(t *testing.T, path string) {
	t.Helper()
	host, _ := os.ReadFile("/etc/shadow")
	own, _ := w.attacker.Output(t.Context(), "cat", "/etc/shadow")
	got, err := w.attacker.Files().ReadAll(t.Context(), path)
	if err == nil && !bytes.Equal(got, own) {
		t.Errorf("%s leads to something that is not the session's", path)
	}
	if len(host) > 0 && err == nil && bytes.Equal(got, host) && !bytes.Equal(own, host) {
		t.Errorf("%s leads to the host's file", path)
	}
}

func (w *world) sleepAndWake(t *testing.T) {
	t.Helper()
	if err := w.rewake(t); err != nil {
		t.Fatalf("wake: %v", err)
	}
}

// rewake has the attacker's session sleep and opens it again.
func (w *world) rewake(t *testing.T) error {
	t.Helper()
	w.sleep(t)
	return w.wake(t)
}

func (w *world) sleep(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := w.attacker.Close(ctx); err != nil {
		t.Fatalf("sleep: %v", err)
	}
}

func (w *world) wake(t *testing.T) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := w.client.Open(ctx, w.ask())
	if err == nil {
		w.attacker = s
	}
	return err
}

// transfers reads and writes through paths that a program inside exchanges for links all the time.
func (w *world) transfers(t *testing.T) {
	canary, err := os.CreateTemp("", "berth-hostile-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(canary.Name())
	if _, err := canary.WriteString("the host's"); err != nil {
		t.Fatal(err)
	}
	done := make(chan string, 1)
	go func() {
		o, err := w.try("root", "race", canary.Name())
		done <- fmt.Sprint(o.Detail, " ", err)
	}()
	files, reads, writes := w.attacker.Files(), 0, 0
	for {
		for _, path := range []string{"/root/race/file", "/root/race/target", "/root/race/hard", "/root/race/sub/file"} {
			if b, err := files.ReadAll(t.Context(), path); err == nil {
				reads++
				if bytes.Contains(b, []byte("the host's")) {
					t.Fatalf("%s gave a file of the host", path)
				}
			}
			if _, err := files.Write(t.Context(), path, strings.NewReader("from outside"), sdk.WriteOptions{}); err == nil {
				writes++
			}
			_ = files.Move(t.Context(), path, path+".moved")
		}
		select {
		case said := <-done:
			t.Logf("%s; %d reads and %d writes came through", said, reads, writes)
			if b, err := os.ReadFile(canary.Name()); err != nil || string(b) != "the host's" {
				t.Errorf("the host's file holds %q (%v)", b, err)
			}
			return
		default:
		}
	}
}

// exports takes the disk out as an archive after the session filled it with what breaks archivers.
func (w *world) exports(t *testing.T) {
	for _, what := range []string{"deep", "odd-names", "sparse"} {
		o, err := w.try("root", what)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %s", what, o.Detail)
	}
	var out limited
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	res, err := w.attacker.Export(ctx, &out)
	switch {
	case out.n > exportMost:
		t.Errorf("the archive has more than %d bytes", int64(exportMost))
	case err != nil:
		t.Logf("the export was refused: %v", err)
	default:
		t.Logf("%d bytes, %d names were left out", out.n, res.Skipped)
	}
	if out.leak {
		t.Errorf("the archive holds the other session's mark")
	}
	alive(t, w)
}

const exportMost = 1 << 30

// limited counts an archive and stops it when it is too large.
type limited struct {
	n    int64
	leak bool
}

func (l *limited) Write(p []byte) (int, error) {
	if l.n += int64(len(p)); l.n > exportMost {
		return 0, io.ErrShortWrite
	}
	l.leak = l.leak || bytes.Contains(p, []byte("mark-of-the-other"))
	return len(p), nil
}

// sharedPaths changes, replaces and removes files of the image, which both sessions see.
func (w *world) sharedPaths(t *testing.T) {
	paths := []string{"/etc/passwd", "/etc/hosts", "/bin/cat", "/usr/bin/env", "/usr/new", "/tmp/new", "/dev/shm/new", "/run/new"}
	look := func() (out []string) {
		for _, p := range paths {
			b, err := w.victim.Files().ReadAll(t.Context(), p)
			out = append(out, fmt.Sprint(p, " ", len(b), " ", crc32.ChecksumIEEE(b), " ", err != nil))
		}
		return out
	}
	before := look()
	script := "for p in " + strings.Join(paths, " ") + "; do echo other > $p.x; mv $p.x $p; echo more >> $p; chmod 4777 $p; done; rm -rf /etc/ssl /usr/share"
	out, err := w.attacker.Output(t.Context(), "sh", "-c", script)
	t.Logf("%q, %v", out, err)
	for i, is := range look() {
		if is != before[i] {
			t.Errorf("the other session sees %s, and saw %s", is, before[i])
		}
	}
	w.wellElsewhere(t)
}

// ownFiles are files of a kernel that machines of one template must not share, since each has its own.
var ownFiles = []string{"/proc/sys/kernel/random/boot_id"}

// twins draws numbers in both sandboxes, which are clones of one machine or one image.
func (w *world) twins(t *testing.T) {
	commands := [][]string{{"head", "-c", "32", "/dev/urandom"}, {"cat", "/proc/sys/kernel/random/uuid"}, {"mktemp", "-u"}}
	if w.tier == "microvm" {
		for _, f := range ownFiles {
			commands = append(commands, []string{"cat", f})
		}
		host, err := os.ReadFile(ownFiles[0])
		if got, gerr := w.attacker.Output(t.Context(), "cat", ownFiles[0]); err != nil || gerr != nil || bytes.Equal(got, host) {
			t.Errorf("the machine's kernel is the host's: %s, %v, %v", got, err, gerr)
		}
	}
	for _, c := range commands {
		var got [2][]byte
		for i, s := range []*sdk.Session{w.attacker, w.victim} {
			var err error
			if got[i], err = s.Output(t.Context(), c[0], c[1:]...); err != nil || len(got[i]) == 0 {
				t.Errorf("%v: %q, %v", c, got[i], err)
			}
		}
		if bytes.Equal(got[0], got[1]) {
			t.Errorf("%v gives %q in both", c, got[0])
		}
	}
	out, err := w.attacker.Output(t.Context(), "date", "+%s")
	var at int64
	if _, serr := fmt.Sscan(string(out), &at); err != nil || serr != nil {
		t.Fatalf("date: %q, %v, %v", out, err, serr)
	}
	if off := time.Since(time.Unix(at, 0)); off < -2*time.Second || off > time.Minute {
		t.Errorf("its clock is off by %s", off)
	}
}

func (w *world) garbles(t *testing.T) {
	o, err := w.try("root", "garble")
	t.Logf("%s (%v)", o.Detail, err)
	if out, err := w.victim.Output(t.Context(), "cat", "/root/"+w.mark); err != nil || string(out) != w.mark {
		t.Errorf("the other session: %q, %v", out, err)
	}
	w.recovers(t)
}

func (w *world) killsGuest(t *testing.T) {
	before, err := w.attacker.Output(t.Context(), "cat", "/root/race/file")
	if err != nil && !errors.As(err, new(*sdk.ExitError)) {
		t.Fatal(err)
	}
	o, err := w.try("root", "kill-1")
	t.Logf("kill of process 1 as root: %s (%v)", o.Detail, err)
	if out, err := w.victim.Output(t.Context(), "cat", "/root/"+w.mark); err != nil || string(out) != w.mark {
		t.Errorf("the other session: %q, %v", out, err)
	}
	w.recovers(t)
	if after, _ := w.attacker.Output(t.Context(), "cat", "/root/race/file"); !bytes.Equal(before, after) {
		t.Errorf("its own files changed: %q, then %q", before, after)
	}
}
