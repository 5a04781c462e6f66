package bus_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// With BERTH_TEST_BUS=<dir>:<port> this binary is a bus server of its own, so
// that tests can kill it.
func TestMain(m *testing.M) {
	bustest.Child()
	spec := os.Getenv("BERTH_TEST_BUS")
	if spec == "" {
		os.Exit(m.Run())
	}
	dir, port, _ := net.SplitHostPort(spec)
	n, err := strconv.Atoi(port)
	if err == nil {
		_, err = bus.StartEmbedded(context.Background(), bus.EmbeddedConfig{Dir: dir, Port: n, Callers: []subjects.Caller{acmeWeb}})
	}
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	select {}
}

// busProcess is a bus in a process of its own.
type busProcess struct {
	t    *testing.T
	dir  string
	port int
	cmd  *exec.Cmd
}

func startProcess(t *testing.T) *busProcess {
	p := &busProcess{t: t, dir: t.TempDir(), port: testport.Reserve(t, 1)[0]}
	t.Cleanup(p.kill)
	p.start()
	return p
}

func (p *busProcess) start() {
	p.t.Helper()
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("BERTH_TEST_BUS=%s", net.JoinHostPort(p.dir, strconv.Itoa(p.port))))
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	if sc := bufio.NewScanner(out); !sc.Scan() || sc.Text() != "ready" {
		p.t.Fatalf("the bus says %q", sc.Text())
	}
}

func (p *busProcess) kill() {
	_ = p.cmd.Process.Kill() // SIGKILL
	_ = p.cmd.Wait()
}

func (p *busProcess) connect(c subjects.Caller) *bus.Conn {
	p.t.Helper()
	l, err := bus.ReadLogin(bus.LoginPath(p.dir, c))
	if err != nil {
		p.t.Fatal(err)
	}
	conn, err := bus.Connect(bustest.Context(p.t), l, bus.WithLogger(bustest.Log(p.t)))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(conn.Close)
	return conn
}

// publishUntil publishes requests until quit is closed and tells which were
// acknowledged.
func publishUntil(ctx context.Context, quit <-chan struct{}, fe *bus.Conn, acked func(id string)) {
	for i := 0; ; i++ {
		select {
		case <-quit:
			return
		default:
		}
		short, cancel := context.WithTimeout(ctx, time.Second)
		id := fmt.Sprint(i)
		_, err := fe.Publish(short, subjects.Request("acme", "web", "open"), wrapperspb.String(id))
		cancel()
		if err == nil {
			acked(id)
		} else {
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// Every message that was acknowledged to its publisher is handled, whatever
// happens to the server; a publisher that got no acknowledgement knows that.
func TestNoAcknowledgedMessageIsLostWhenTheServerIsKilled(t *testing.T) {
	p := startProcess(t)
	fe, idn := p.connect(acmeWeb), p.connect(subjects.Service("identity"))
	ctx := bustest.Context(t)
	var mu sync.Mutex
	handled, acked := map[string]int{}, map[string]bool{}
	spec := bus.Spec("identity-requests", 4)
	spec.Heartbeat = time.Second
	if _, err := idn.Consume(ctx, spec, func(_ context.Context, m *bus.Msg) error {
		mu.Lock()
		defer mu.Unlock()
		handled[body(m)]++
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		publishUntil(ctx, quit, fe, func(id string) { mu.Lock(); acked[id] = true; mu.Unlock() })
	}()
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(acked) }
	for range 3 {
		before := count()
		eventually(t, "100 more are acknowledged", func() bool { return count() > before+100 })
		p.kill()
		p.start()
	}
	before := count()
	eventually(t, "publishing goes on", func() bool { return count() > before+100 })
	close(quit)
	<-done
	eventually(t, "every acknowledged message is handled", func() bool {
		mu.Lock()
		defer mu.Unlock()
		for id := range acked {
			if handled[id] == 0 {
				return false
			}
		}
		return true
	})
	mu.Lock()
	again := 0
	for _, n := range handled {
		again += n - 1
	}
	t.Logf("%d acknowledged, %d handled, %d more than once, 3 kills", len(acked), len(handled), again)
	mu.Unlock()
}

// RPC heals as well, and a service goes on serving after the server came back.
func TestServicesServeAgainAfterTheServerWasKilled(t *testing.T) {
	p := startProcess(t)
	sched, life := p.connect(subjects.Service("scheduler")), p.connect(subjects.Service("lifecycle"))
	ctx := bustest.Context(t)
	svc, err := sched.Serve(ctx, bus.ServiceConfig{Name: "scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	err = bus.Handle(svc, "wake", func(_ context.Context, _ bus.Request, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
		return in, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	p.kill()
	p.start()
	eventually(t, "a call goes well", func() bool {
		short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		defer cancel()
		_, err := bus.Invoke[*wrapperspb.StringValue](short, life, "scheduler", "wake", wrapperspb.String("x"))
		return err == nil
	})
}
