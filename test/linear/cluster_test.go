package linear

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// cluster is three scheduler processes with TLS between them, a bus in this
// process, and hosts that are fake.
type cluster struct {
	t     *testing.T
	bus   *bus.Embedded
	bin   string
	dir   string
	names []string
	// lead counts the replica that said last that it serves.
	lead atomic.Pointer[string]

	mu  sync.Mutex
	all map[string]*replica
}

// replica is one scheduler process.
type replica struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// newCluster keeps its folder dir, with the logs, when the test fails.
func newCluster(t *testing.T, dir string, hosts ...ids.Host) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: dir, all: map[string]*replica{}}
	c.bin = filepath.Join(c.dir, "scheduler")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", c.bin, "github.com/berth-dev/berth/services/scheduler/cmd/scheduler")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build scheduler: %v\n%s", err, out)
	}
	var callers []subjects.Caller
	for _, h := range hosts {
		callers = append(callers, subjects.Host(h))
	}
	ctx := within(t, time.Minute)
	var err error
	c.bus, err = bus.StartEmbedded(ctx, bus.EmbeddedConfig{Dir: filepath.Join(c.dir, "bus"), Port: -1, Callers: callers, Log: bustest.Log(t)})
	if err != nil {
		t.Fatalf("start bus: %v", err)
	}
	t.Cleanup(c.bus.Close)
	svc, err := c.connect(subjects.Service("credentials")).Serve(ctx, bus.ServiceConfig{Name: "credentials"})
	if err == nil {
		err = bus.Handle(svc, "revoke", func(context.Context, bus.Request, *credentialsv1.RevokeRequest) (*credentialsv1.RevokeReply, error) {
			return &credentialsv1.RevokeReply{}, nil
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.stop)
	c.configure()
	for _, n := range c.names {
		c.start(n)
	}
	return c
}

// configure writes configuration, login and certificate of each replica.
func (c *cluster) configure() {
	c.t.Helper()
	ca := bustest.NewCA(c.t)
	type peer struct {
		ID   string `json:"id"`
		Addr string `json:"addr"`
	}
	var peers []peer
	for i := range 3 {
		c.names = append(c.names, fmt.Sprint("n", i+1))
		peers = append(peers, peer{c.names[i], freeAddr(c.t)})
	}
	login, err := c.bus.Login(subjects.Service("scheduler"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.write("login.json", login)
	for i, n := range c.names {
		cert, key := ca.Issue(c.t, n)
		// JSON is YAML.
		c.write(n+".yaml", map[string]any{"dir": filepath.Join(c.dir, n), "replica_id": n, "bind": peers[i].Addr, "peers": peers,
			"tls_cert": cert, "tls_key": key, "tls_ca": ca.Path,
			"wake_timeout": "5s", "sleep_timeout": "5s", "delete_timeout": "5s", "retry_min": "20ms", "retry_max": "500ms", "trim_after": "200ms"})
	}
}

func (c *cluster) write(name string, v any) {
	c.t.Helper()
	raw, err := json.Marshal(v)
	if err == nil {
		err = os.WriteFile(filepath.Join(c.dir, name), raw, 0o600)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// freeAddr is outside the range from which the kernel takes ports for clients,
// so that it is still free a moment later.
func freeAddr(t *testing.T) string {
	for range 100 {
		if l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 20000+mrand.IntN(12000))); err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no free port")
	return ""
}

func (c *cluster) connect(who subjects.Caller) *bus.Conn {
	c.t.Helper()
	conn, err := c.bus.Connect(within(c.t, 10*time.Second), who)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(conn.Close)
	return conn
}

// start starts a replica; its log goes on in a file.
func (c *cluster) start(name string) {
	file, err := os.OpenFile(filepath.Join(c.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Error(err)
		return
	}
	cmd := exec.Command(c.bin, "-config", filepath.Join(c.dir, name+".yaml"), "-login", filepath.Join(c.dir, "login.json"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		c.t.Errorf("start scheduler %s: %v", name, err)
		_ = file.Close()
		return
	}
	r := &replica{cmd: cmd, done: make(chan struct{})}
	c.mu.Lock()
	c.all[name] = r
	c.mu.Unlock()
	go func() {
		defer close(r.done)
		defer file.Close()
		lines := bufio.NewScanner(io.TeeReader(out, file))
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if strings.Contains(lines.Text(), `"msg":"ready"`) {
				c.lead.Store(&name)
			}
		}
		_, _ = io.Copy(file, out)
		_ = cmd.Wait()
	}()
}

// signal sends a signal to a replica, which may have ended.
func (c *cluster) signal(name string, s syscall.Signal) {
	c.mu.Lock()
	r := c.all[name]
	c.mu.Unlock()
	_ = r.cmd.Process.Signal(s)
}

// end sends a signal and waits until the replica has ended.
func (c *cluster) end(name string, s syscall.Signal) {
	c.mu.Lock()
	r := c.all[name]
	c.mu.Unlock()
	_ = r.cmd.Process.Signal(s)
	select {
	case <-r.done:
	case <-time.After(20 * time.Second):
		c.t.Errorf("%s has not ended 20 s after %s", name, s)
		_ = r.cmd.Process.Signal(syscall.SIGKILL)
		<-r.done
	}
}

// leader is the replica that began to serve last.
func (c *cluster) leader() string {
	if p := c.lead.Load(); p != nil {
		return *p
	}
	return c.names[0]
}

func (c *cluster) stop() {
	c.mu.Lock()
	all := c.all
	c.all = map[string]*replica{}
	c.mu.Unlock()
	for _, r := range all {
		_ = r.cmd.Process.Signal(syscall.SIGKILL)
		<-r.done
	}
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}
