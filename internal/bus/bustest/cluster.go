package bustest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Cluster is three nodes in processes of their own, which tests may kill,
// pause and start again. Every conn knows all three.
type Cluster struct {
	Dir   string // keys and client files
	URL   string
	nodes []*node
	t     testing.TB
}

type node struct {
	spec nodeSpec
	cmd  *exec.Cmd
}

type nodeSpec struct {
	Dir, Store, Name, URL, Cert, Key, CA string
	Port, ClusterPort                    int
	Routes                               []string
	Callers                              []string
	Replicas                             int
}

const childEnv = "BERTH_TEST_NODE"

// Child is called first by TestMain of a package that starts a Cluster. In a
// process that is a node it never returns.
func Child() {
	raw := os.Getenv(childEnv)
	if raw == "" {
		return
	}
	shortenElections()
	var s nodeSpec
	err := json.Unmarshal([]byte(raw), &s)
	if err == nil {
		err = s.run()
	}
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	select {}
}

func (s nodeSpec) run() error {
	conf, err := bus.MutualTLS(s.Cert, s.Key, s.CA)
	if err != nil {
		return err
	}
	cfg := bus.EmbeddedConfig{Dir: s.Dir, Store: s.Store, Port: s.Port, Name: s.Name, URL: s.URL, Log: logger,
		Cluster: &bus.ClusterConfig{Port: s.ClusterPort, Routes: s.Routes, TLS: conf}}
	for _, name := range s.Callers {
		c, err := subjects.ParseName(name)
		if err != nil {
			return err
		}
		cfg.Callers = append(cfg.Callers, c)
	}
	if s.Replicas > 0 {
		d := bus.Declared(s.Replicas)
		d.Clustered = true
		cfg.Declaration = &d
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute) // for three nodes on a busy machine
	defer cancel()
	_, err = bus.StartEmbedded(ctx, cfg)
	return err
}

// StartCluster starts three nodes with the declared streams, three replicas
// of each. The services, the operator and the keeper may log in, and the
// callers given.
func StartCluster(t testing.TB, callers ...subjects.Caller) *Cluster {
	t.Helper()
	return StartClusterOf(t, 0, callers...)
}

// StartClusterOf is StartCluster with a number of replicas; 0 is the default.
func StartClusterOf(t testing.TB, replicas int, callers ...subjects.Caller) *Cluster {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: three nodes and their elections take ten seconds and more")
	}
	c := &Cluster{Dir: t.TempDir(), t: t}
	ports := testport.Reserve(t, 6)
	names := []string{}
	for _, x := range callers {
		names = append(names, x.Name())
	}
	var urls, routes []string
	for i := range 3 {
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", ports[i]))
		routes = append(routes, fmt.Sprintf("127.0.0.1:%d", ports[i+3]))
	}
	c.URL = strings.Join(urls, ",")
	everybody := append([]subjects.Caller{subjects.Keeper(), subjects.Operator()}, callers...)
	for _, s := range subjects.Services {
		everybody = append(everybody, subjects.Service(s))
	}
	if _, err := bus.EnsureKeys(c.Dir, c.URL, everybody); err != nil {
		t.Fatal(err)
	}
	pki := NewCA(t)
	for i := range 3 {
		cert, key := pki.Issue(t, fmt.Sprintf("n%d", i+1))
		c.nodes = append(c.nodes, &node{spec: nodeSpec{
			Dir: c.Dir, Store: filepath.Join(c.Dir, fmt.Sprintf("store-%d", i+1)), Name: fmt.Sprintf("n%d", i+1), URL: c.URL,
			Cert: cert, Key: key, CA: pki.Path, Port: ports[i], ClusterPort: ports[i+3], Routes: routes, Callers: names, Replicas: replicas}})
	}
	t.Cleanup(func() { c.Kill(0, 1, 2) })
	c.Restart(0, 1, 2)
	return c
}

// Restart starts nodes that were killed and waits until they are ready.
func (c *Cluster) Restart(nodes ...int) {
	c.t.Helper()
	ready := make(chan string, len(nodes))
	for _, i := range nodes {
		if err := c.nodes[i].start(ready); err != nil {
			c.t.Fatal(err)
		}
	}
	for range nodes {
		if said := <-ready; said != "ready" {
			c.t.Fatalf("a node says %q", said)
		}
	}
}

func (n *node) start(ready chan<- string) error {
	raw, err := json.Marshal(n.spec)
	if err != nil {
		return err
	}
	n.cmd = exec.Command(os.Args[0])
	n.cmd.Env = append(os.Environ(), childEnv+"="+string(raw))
	n.cmd.Stderr = os.Stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := n.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := n.cmd.Start(); err != nil {
		return err
	}
	go func() {
		sc := bufio.NewScanner(out)
		sc.Scan()
		ready <- sc.Text()
	}()
	return nil
}

// Kill ends nodes with SIGKILL.
func (c *Cluster) Kill(nodes ...int) {
	for _, i := range nodes {
		if cmd := c.nodes[i].cmd; cmd != nil && cmd.Process != nil {
			_ = cmd.Process.Kill()
		}
	}
	for _, i := range nodes {
		if cmd := c.nodes[i].cmd; cmd != nil && cmd.Process != nil {
			_ = cmd.Wait()
		}
		c.nodes[i].cmd = nil
	}
}

// Pause stops a node without ending its connections, as a cut link does.
func (c *Cluster) Pause(node int) { _ = c.nodes[node].cmd.Process.Signal(syscall.SIGSTOP) }

// Resume lets a paused node go on.
func (c *Cluster) Resume(node int) { _ = c.nodes[node].cmd.Process.Signal(syscall.SIGCONT) }

// Store is the folder of a node's JetStream.
func (c *Cluster) Store(node int) string { return c.nodes[node].spec.Store }

// URLOf is where clients of one node connect.
func (c *Cluster) URLOf(node int) string { return strings.Split(c.URL, ",")[node] }

// Index is the node of a server's name, as JetStream tells its leaders.
func (c *Cluster) Index(name string) int {
	c.t.Helper()
	for i, n := range c.nodes {
		if n.spec.Name == name {
			return i
		}
	}
	c.t.Fatalf("there is no node %q", name)
	return 0
}

// Replicated waits until every replica of a stream has all of its messages and
// returns the node that leads the stream.
func (c *Cluster) Replicated(stream string) (leader int) {
	c.t.Helper()
	ctx, js := Context(c.t), c.Connect(subjects.Keeper()).JetStream()
	behind := func(p *jetstream.PeerInfo) bool { return !p.Current || p.Lag > 0 }
	for {
		s, err := js.Stream(ctx, stream)
		if err == nil {
			if in := s.CachedInfo().Cluster; in != nil && in.Leader != "" && len(in.Replicas) > 0 && !slices.ContainsFunc(in.Replicas, behind) {
				return c.Index(in.Leader)
			}
		}
		select {
		case <-ctx.Done():
			c.t.Fatalf("the replicas of %s are behind: %v", stream, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Login is the login of a caller, with the nodes given first or all three.
func (c *Cluster) Login(caller subjects.Caller, nodes ...int) bus.Login {
	c.t.Helper()
	l, err := bus.ReadLogin(bus.LoginPath(c.Dir, caller))
	if err != nil {
		c.t.Fatal(err)
	}
	if len(nodes) > 0 {
		var urls []string
		for _, i := range nodes {
			urls = append(urls, c.URLOf(i))
		}
		l.URL = strings.Join(urls, ",")
	}
	return l
}

// Connect logs a caller in: at the first of the nodes given that is there, or
// at any of the three.
func (c *Cluster) Connect(caller subjects.Caller, nodes ...int) *bus.Conn {
	c.t.Helper()
	conn, err := bus.Connect(Context(c.t), c.Login(caller, nodes...), bus.WithLogger(logger), bus.WithNATS(func(o *nats.Options) error {
		o.NoRandomize = len(nodes) > 0
		return nil
	}))
	if err != nil {
		c.t.Fatalf("connect %s: %v", caller, err)
	}
	c.t.Cleanup(conn.Close)
	return conn
}
