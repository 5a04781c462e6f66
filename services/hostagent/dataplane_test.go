package hostagent

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// TestOpeningsThatMustBeRefused: everything about an opening that can be forged, stolen or reused.
func TestOpeningsThatMustBeRefused(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	bob := ref("bob", 7, 8)
	r.mustWake(bob, nil)
	c := r.client(one)
	op := execOp("x1", "true")
	refused := func(name, want string, o opening, from *client) {
		t.Helper()
		_, err := from.send(o)
		if kindIn(err) != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
	remint := func(change func(*grant.Claims)) *client {
		d := *c
		d.grant = r.creds.mint(t, one, c.me, c.proof.Public().(ed25519.PublicKey), change)
		return &d
	}
	refused("another generation", "stale_epoch", remint(func(g *grant.Claims) { g.Generation.Index++ }).prepare(op, nil), c)
	refused("another epoch", "stale_epoch", remint(func(g *grant.Claims) { g.Epoch.Index-- }).prepare(op, nil), c)
	refused("a newer epoch", "stale_epoch", remint(func(g *grant.Claims) { g.Epoch.Index++ }).prepare(op, nil), c)
	refused("another host", "stale_epoch", remint(func(g *grant.Claims) { g.Host = "h2" }).prepare(op, nil), c)
	refused("another session", "denied", remint(func(g *grant.Claims) { g.Session = key("bob") }).prepare(op, nil), c)
	refused("another tenant's grant", "denied", remint(func(g *grant.Claims) { g.Tenant = "evil" }).prepare(op, nil), c)
	refused("expired", "expired", remint(func(g *grant.Claims) { g.IssuedAt -= 2000; g.AuthTime -= 2000; g.Expires = g.IssuedAt + 900 }).prepare(op, nil), c)

	_, other, _ := ed25519.GenerateKey(rand.Reader)
	thief := *c
	thief.proof = other
	refused("a stolen grant without its proof key", "unauthenticated", thief.prepare(op, nil), c)
	refused("another operation than was signed", "unauthenticated", c.prepare(op, func(o *boxv1.Opening) {
		o.Operation = append([]byte(nil), thief.prepareRaw(execOp("x1", "rm", "-rf", "/"))...)
	}), c)
	refused("another deliver subject than was signed", "unauthenticated", c.prepare(op, func(o *boxv1.Opening) {
		o.Deliver = subjects.BoxFrames(c.me, ids.NewStreamID())
	}), c)
	refused("older than two minutes", "unauthenticated", c.prepare(op, func(o *boxv1.Opening) { o.Time = timestamppb.New(time.Now().Add(-3 * time.Minute)) }), c)
	refused("no operation", "unimplemented", c.prepare(&boxv1.Operation{}, nil), c)
	refused("too much credit", "invalid", c.prepare(op, func(o *boxv1.Opening) { o.Credit = 1<<20 + 1 }), c)
	refused("not sealed to this host", "unauthenticated", opening{raw: []byte("\x0a\x05hello"), reply: c.prepare(op, nil).reply}, c)
	refused("not a request", "invalid", opening{raw: []byte("\xff\xff"), reply: c.prepare(op, nil).reply}, c)

	// A frontend that got hold of grant and proof key has another inbox.
	foreign := *c
	foreign.me = subjects.Frontend("acme", "other")
	refused("frames into another frontend's inbox", "denied", foreign.prepare(op, nil), c)
	spy := r.clientAs(subjects.Frontend("acme", "other"), one)
	spy.grant, spy.proof = c.grant, c.proof
	refused("an answer into another frontend's inbox", "denied", c.prepare(op, nil), spy)

	s := c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_ListExecs{ListExecs: &boxv1.ListExecs{}}})
	if n := len(s.reply.GetResult().GetExecs()); n != 0 {
		t.Errorf("%d execs were started", n)
	}
}

// TestAReplayedOpeningIsRefused: the very same bytes open one stream, whoever sends them again.
func TestAReplayedOpeningIsRefused(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	once := c.prepare(execOp("x1", "true"), nil)
	if _, err := c.send(once); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := c.send(once); kindIn(err) != "unauthenticated" {
			t.Errorf("a replayed opening: %v", err)
		}
	}
}

// TestRevokedGrantsOpenNothing: with the first key set that says so, at the latest.
func TestRevokedGrantsOpenNothing(t *testing.T) {
	r := newRig(t, newProcs(t))
	one := ref("ann", 5, 6)
	r.creds.revoked = append(r.creds.revoked, &credentialsv1.RevokedGeneration{
		Tenant: "acme", Session: one.GetSession(), Generation: one.GetGeneration(), Until: timestamppb.New(time.Now().Add(time.Hour))})
	r.start()
	r.mustWake(one, nil)
	if _, err := r.client(one).open(execOp("x1", "true")); kindIn(err) != "superseded" {
		t.Errorf("a revoked grant: %v", err)
	}
}

func (c *client) prepareRaw(op *boxv1.Operation) []byte {
	var raw []byte
	c.prepare(op, func(o *boxv1.Opening) { raw = o.GetOperation() })
	return raw
}

func TestBadOperationsChangeNothing(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	for name, op := range map[string]*boxv1.Operation{
		"no key":      execOp("", "true"),
		"bad key":     execOp("A B", "true"),
		"no program":  execOp("x1"),
		"NUL":         execOp("x1", "a\x00b"),
		"huge":        execOp("x1", strings.Repeat("a", 100<<10)),
		"bad env":     {Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x1", Argv: []string{"true"}, Env: map[string]string{"A=B": "c"}}}},
		"empty path":  {Op: &boxv1.Operation_Stat{Stat: &boxv1.Stat{}}},
		"long path":   {Op: &boxv1.Operation_ReadFile{ReadFile: &boxv1.ReadFile{Path: strings.Repeat("a", 5000)}}},
		"absurd size": {Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x1", Argv: []string{"true"}, Pty: &boxv1.Resize{Rows: 1 << 20}}}},
	} {
		if _, err := c.open(op); kindIn(err) != "invalid" && kindIn(err) != "too_large" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.open(execOp("x9", "/no/such/program")); kindIn(err) != "not_found" {
		t.Errorf("a missing program: %v", err)
	}
	s := c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_ListExecs{ListExecs: &boxv1.ListExecs{}}})
	if n := len(s.reply.GetResult().GetExecs()); n != 0 {
		t.Errorf("%d execs were started", n)
	}
}

// TestStartIsIdempotentByItsKey: the same key never starts a second process.
func TestStartIsIdempotentByItsKey(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	file := t.TempDir() + "/count"
	cmd := execOp("x1", "sh", "-c", "echo run >> "+file+"; echo done")
	first := c.mustOpen(cmd)
	if o, err := first.drain(); err != nil || string(o.stdout) != "done\n" {
		t.Fatalf("%q %v", o.stdout, err)
	}
	again := c.mustOpen(cmd)
	if len(again.reply.GetResult().GetExecs()) != 1 {
		t.Error("the answer does not say that the exec was started before")
	}
	if o, err := again.drain(); err != nil || o.exit.GetCode() != 0 {
		t.Errorf("a repeated start: %v %v", o.exit, err)
	}
	if o := c.exec("x2", "cat", file); string(o.stdout) != "run\n" {
		t.Errorf("it ran %q", o.stdout)
	}
	if _, err := c.open(execOp("x1", "false")); kindIn(err) != "replay_mismatch" {
		t.Errorf("the key with another command: %v", err)
	}
}

// TestBulkOutputIsWhole: no output is cut off, invented or out of order, with credit for less.
func TestBulkOutputIsWhole(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	o := c.exec("x1", "seq", "1", "1500000")
	if o.exit.GetCode() != 0 || uint64(len(o.stdout)) != o.exit.GetStdoutBytes() || !bytes.HasSuffix(o.stdout, []byte("\n1500000\n")) {
		t.Errorf("%d bytes of %d, exit %v", len(o.stdout), o.exit.GetStdoutBytes(), o.exit)
	}
	want := 0
	for i := 1; i <= 1500000; i++ {
		want += len(fmt.Sprint(i)) + 1
	}
	if len(o.stdout) != want {
		t.Errorf("%d bytes, want %d", len(o.stdout), want)
	}
}

// TestOutputIsResumedByOffset: a dropped stream loses nothing; the exec goes on meanwhile.
func TestOutputIsResumedByOffset(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	s := c.mustOpen(execOp("x1", "sh", "-c", "echo one; sleep 0.3; echo two; exit 7"))
	f, err := s.recv(5 * time.Second)
	if err != nil || string(f.GetData().GetData()) != "one\n" {
		t.Fatalf("first frame %v %v", f, err)
	}
	s.send(&boxv1.Frame{Body: &boxv1.Frame_Cancel{Cancel: &boxv1.Cancel{}}})
	o, err := c.mustOpen(attachOp("x1", 4)).drain()
	if err != nil || string(o.stdout) != "two\n" || o.exit.GetCode() != 7 {
		t.Errorf("after the attach: %q %v %v", o.stdout, o.exit, err)
	}
	o, err = c.mustOpen(attachOp("x1", 2)).drain()
	if err != nil || o.exit.GetCode() != 7 {
		t.Errorf("attached to what has ended: %q %v %v", o.stdout, o.exit, err)
	}
	if _, err := c.open(attachOp("x2", 0)); kindIn(err) != "not_found" {
		t.Errorf("an exec that never was: %v", err)
	}
}

// TestALostFrameEndsTheStream: a gap in either direction is never passed over.
func TestALostFrameEndsTheStream(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	s := c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x1", Argv: []string{"cat"}, Stdin: true}}})
	s.in += 5
	s.send(&boxv1.Frame{Body: &boxv1.Frame_Ping{Ping: &boxv1.Ping{}}})
	if _, err := s.drain(); kindIn(err) != "unavailable" {
		t.Errorf("a gap: %v", err)
	}
	s = c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x2", Argv: []string{"sleep", "60"}, Stdin: true}}})
	for i := range 40 { // 1 MiB of credit, and 1 MiB that the guest takes
		s.send(dataFrame(uint64(i)<<16, make([]byte, 64<<10)))
	}
	if _, err := s.drain(); kindIn(err) != "exhausted" {
		t.Errorf("more than the credit: %v", err)
	}
}

// TestABrokenStreamLosesNoOutput: a stream breaks while the exec has more output than the guest's ring holds. The exec
// waits for the client, which attaches again and has all of it, also of what was on its way when the stream broke.
func TestABrokenStreamLosesNoOutput(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	const size = 8 << 20
	for name, arrives := range map[string]bool{"at once": false, "with frames on their way": true} {
		key := fmt.Sprint("x", arrives)
		s := c.mustOpen(execOp(key, "head", "-c", fmt.Sprint(size), "/dev/zero"))
		for arrives {
			if _, err := s.recv(300 * time.Millisecond); err != nil { // all of the credit is used up
				break
			}
		}
		s.in += 5 // as if messages of the client were lost
		s.send(&boxv1.Frame{Body: &boxv1.Frame_Ping{Ping: &boxv1.Ping{}}})
		for broken := false; !broken; {
			f, err := s.recv(5 * time.Second)
			if err != nil {
				t.Fatal(err)
			}
			broken = f.GetFailure() != nil
		}
		time.Sleep(300 * time.Millisecond) // without a reader the exec would end meanwhile
		o, err := c.mustOpen(attachOp(key, 0)).drain()
		if err != nil || len(o.gaps) > 0 || len(o.stdout) != size {
			t.Errorf("%s: %d bytes, gaps %v, %v", name, len(o.stdout), o.gaps, err)
		}
	}
}

func dataFrame(offset uint64, p []byte) *boxv1.Frame {
	return &boxv1.Frame{Body: &boxv1.Frame_Data{Data: &boxv1.Data{Channel: boxv1.Channel_CHANNEL_STDIN, Offset: offset, Data: p}}}
}

func TestStdinSignalAndTerminal(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	s := c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x1", Argv: []string{"sort"}, Stdin: true}}})
	s.send(dataFrame(0, []byte("b\n")))
	s.send(dataFrame(2, []byte("a\n")))
	s.send(&boxv1.Frame{Body: &boxv1.Frame_CloseInput{CloseInput: &boxv1.CloseInput{Total: 4}}})
	o, err := s.drain()
	if err != nil || string(o.stdout) != "a\nb\n" || o.acked != 4 {
		t.Errorf("stdin: %q acked %d %v", o.stdout, o.acked, err)
	}
	// A signal is not stuck behind input that nobody reads.
	s = c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x2", Argv: []string{"sleep", "60"}, Stdin: true}}})
	for i := range 10 {
		s.send(dataFrame(uint64(i)*65536, make([]byte, 65536)))
	}
	s.send(&boxv1.Frame{Body: &boxv1.Frame_Signal{Signal: &boxv1.Signal{Name: "SIGTERM"}}})
	if o, err = s.drain(); err != nil || o.exit.GetSignal() != "SIGTERM" {
		t.Errorf("signal: %v %v", o.exit, err)
	}
	s = c.mustOpen(execOp("x3", "sleep", "60"))
	s.send(&boxv1.Frame{Body: &boxv1.Frame_Cancel{Cancel: &boxv1.Cancel{Kill: true}}})
	if o, err = s.drain(); err != nil || o.exit.GetSignal() != "SIGKILL" {
		t.Errorf("kill: %v %v", o.exit, err)
	}
	s = c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{
		Key: "x4", Argv: []string{"sh", "-c", "sleep 0.2; stty size"}, Pty: &boxv1.Resize{Rows: 20, Cols: 60}}}})
	s.send(&boxv1.Frame{Body: &boxv1.Frame_Resize{Resize: &boxv1.Resize{Rows: 33, Cols: 99}}})
	if o, err = s.drain(); err != nil || strings.TrimSpace(string(o.stdout)) != "33 99" {
		t.Errorf("terminal: %q %v", o.stdout, err)
	}
	s = c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x5", Argv: []string{"sleep", "60"}, Timeout: durationMS(200)}}})
	if o, err = s.drain(); err != nil || !o.exit.GetTimedOut() {
		t.Errorf("time-out: %v %v", o.exit, err)
	}
}
