package identity_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity"
)

// identityEnv has the test binary be one identity.
const identityEnv = "BERTH_TEST_IDENTITY"

type identitySpec struct {
	Login  bus.Login
	Config identity.Config
}

// identityChild never returns in a process that is an identity.
func identityChild() {
	raw := os.Getenv(identityEnv)
	if raw == "" {
		return
	}
	var s identitySpec
	ctx := context.Background()
	err := json.Unmarshal([]byte(raw), &s)
	var conn *bus.Conn
	if err == nil {
		conn, err = bus.Connect(ctx, s.Login, bus.WithLogger(bustest.Log(nil)))
	}
	if err == nil {
		err = identity.Run(ctx, s.Config, conn, bustest.Log(nil), func() { fmt.Println("ready") })
	}
	fmt.Println("ended:", err)
	os.Exit(1)
}

// killed is a world whose identity is a process that tests kill.
type killed struct {
	*world
	t     *testing.T
	spec  identitySpec
	child *exec.Cmd
}

func newKilledWorld(t *testing.T) *killed {
	t.Helper()
	e := bustest.Start(t, frontends...)
	w := newWorldWithoutIdentity(t, func(c subjects.Caller) *bus.Conn { return bustest.Connect(t, e, c) })
	login, err := e.Login(subjects.Service("identity"))
	must(t, err)
	k := &killed{world: w, t: t, spec: identitySpec{Login: login, Config: w.cfg}}
	k.start()
	return k
}

// start starts identity and waits until it serves.
func (k *killed) start() {
	k.t.Helper()
	raw, err := json.Marshal(k.spec)
	must(k.t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), identityEnv+"="+string(raw))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	must(k.t, err)
	must(k.t, cmd.Start())
	k.child = cmd
	k.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); strings.TrimSpace(line) != "ready" {
		k.t.Fatalf("identity did not start: %q %v", line, err)
	}
}

// kill ends identity with SIGKILL, and waits until it is gone.
func (k *killed) kill() {
	_ = k.child.Process.Signal(syscall.SIGKILL)
	_, _ = k.child.Process.Wait()
}

// withoutAudit removes the stream of audit records, so that nothing can be
// written to it, until the function that it returns is called.
func (k *killed) withoutAudit() (back func()) {
	k.t.Helper()
	js := k.connect(subjects.Keeper()).JetStream()
	s, err := js.Stream(bustest.Context(k.t), "BERTH_AUDIT")
	must(k.t, err)
	cfg := s.CachedInfo().Config
	must(k.t, js.DeleteStream(bustest.Context(k.t), "BERTH_AUDIT"))
	return func() {
		k.t.Helper()
		_, err := js.CreateStream(bustest.Context(k.t), cfg)
		must(k.t, err)
	}
}

// admissions counts the records of opens that were admitted, by request id. It
// opens another session first and waits for its record: what came before it is
// there too.
func (k *killed) admissions() map[string]int {
	k.t.Helper()
	last := k.world.request(k.t, "open", &identityv1.OpenRequest{SessionName: "last"})
	opened(k.t, k.direct(k.t, k.front, last))
	c, err := k.operator.JetStream().OrderedConsumer(bustest.Context(k.t), "BERTH_AUDIT", jetstream.OrderedConsumerConfig{FilterSubjects: []string{"berth.v1.audit.identity.>"}})
	must(k.t, err)
	got := map[string]int{}
	for got[last.env.GetRequestId()] == 0 {
		m, err := c.Next(jetstream.FetchMaxWait(20 * time.Second))
		must(k.t, err)
		var a identityv1.Audit
		must(k.t, bus.Decode(m.Data(), bus.Protobuf, &a))
		if a.GetVerb() == "open" && a.GetAdmitted() {
			got[a.GetRequestId()]++
		}
	}
	return got
}

// send sends an open by an API and does not wait for the answer.
func (k *killed) send(api string, r *request) {
	k.t.Helper()
	body := r.encode(k.t, k.world)
	if api == "queued" {
		k.publish(k.t, k.front, "open", body, nil)
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = k.front.CallRaw(ctx, subjects.RPC("identity", "open", k.front.Self()), body, bus.Protobuf)
	}()
}

// hasten has the queue deliver again after a second instead of half a minute.
func (k *killed) hasten() {
	k.t.Helper()
	js := k.connect(subjects.Keeper()).JetStream()
	c, err := js.Consumer(bustest.Context(k.t), "BERTH_REQUESTS", "identity-requests")
	must(k.t, err)
	cfg := c.CachedInfo().Config
	cfg.AckWait, cfg.BackOff = time.Second, nil
	_, err = js.UpdateConsumer(bustest.Context(k.t), "BERTH_REQUESTS", cfg)
	must(k.t, err)
}

// TestAdmissionIsRecordedOnceAlthoughIdentityDies kills identity while the
// session wakes and before the grant is made, with the stream of records there
// or away. The direct API delivers nothing again; its client may be gone too, or
// repeat the request. The queued API delivers to an identity on this machine, or
// on another one that has no journal of the first.
func TestAdmissionIsRecordedOnceAlthoughIdentityDies(t *testing.T) {
	for _, c := range []death{
		{"direct", "wake", false, false}, {"direct", "wake", true, false}, {"direct", "mint", false, false}, {"direct", "mint", true, false},
		{"queued", "wake", false, false}, {"queued", "wake", true, false}, {"queued", "mint", false, false}, {"queued", "mint", true, false},
		{"queued", "wake", false, true}, {"queued", "wake", true, true},
	} {
		t.Run(fmt.Sprintf("%s/%s/stream away %v/journal lost %v", c.api, c.step, c.away, c.lost), c.test)
	}
}

// death is where identity dies: at a step of a request of an API, with the
// stream of records away or not. lost: with its journal.
type death struct {
	api, step  string
	away, lost bool
}

func (c death) test(t *testing.T) {
	k := newKilledWorld(t)
	back := func() {}
	dead := make(chan struct{})
	die := func() { k.kill(); close(dead) }
	r := k.world.request(t, "open", &identityv1.OpenRequest{})
	if c.away {
		back = k.withoutAudit()
	}
	k.mu.Lock()
	if c.step == "mint" {
		k.onMint = die
	} else {
		k.before = die
	}
	k.mu.Unlock()
	k.send(c.api, r)
	select {
	case <-dead:
	case <-time.After(20 * time.Second):
		t.Fatal("the request did not reach the step within 20 s")
	}
	back()
	k.seen()
	if c.lost {
		k.spec.Config.AuditDir = t.TempDir()
	}
	if c.api == "queued" {
		k.hasten()
	}
	k.start()
	if c.api == "queued" {
		until(t, "the request is delivered again", func() bool { return len(k.seen()) > 0 })
	}
	if n := k.admissions()[r.env.GetRequestId()]; n != 1 {
		t.Fatalf("%d records of the admission", n)
	}
	if c.api == "direct" { // and the client repeats it
		opened(t, k.direct(t, k.front, r))
		if n := k.admissions()[r.env.GetRequestId()]; n != 1 {
			t.Errorf("%d records of the admission after the client repeated it", n)
		}
	}
}

// TestADirectOpenDoesNotWaitForTheAuditStream: it is answered, and recorded
// once the stream is back, also by the next process.
func TestADirectOpenDoesNotWaitForTheAuditStream(t *testing.T) {
	k := newKilledWorld(t)
	back := k.withoutAudit()
	r := k.world.request(t, "open", &identityv1.OpenRequest{})
	began := time.Now()
	opened(t, k.direct(t, k.front, r))
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("the open took %s", took)
	}
	k.kill()
	back()
	k.start()
	if n := k.admissions()[r.env.GetRequestId()]; n != 1 {
		t.Errorf("%d records of the admission", n)
	}
}
