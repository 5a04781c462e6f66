package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/services/credentials"
	"github.com/berth-dev/berth/services/hostagent"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/lifecycle"
	"github.com/berth-dev/berth/services/pool"
	"github.com/berth-dev/berth/services/scheduler"
	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/stack"
	"gopkg.in/yaml.v3"
)

// Two replicas are worse than one: a majority of two is both.
func TestShapesThatDecideNothingAreRefused(t *testing.T) {
	for _, c := range []struct {
		Shape
		ok bool
	}{
		{Shape{1, 1, 1}, true}, {Shape{3, 3, 3}, true}, {Shape{2, 5, 1}, true}, {Shape{maxHosts, 1, 5}, true},
		{Shape{3, 2, 3}, false}, {Shape{3, 3, 4}, false}, {Shape{0, 1, 1}, false}, {Shape{1, -1, 1}, false}, {Shape{maxHosts + 1, 1, 1}, false},
	} {
		err := c.Check()
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.Shape, err)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: more than one sentence: %v", c.Shape, err)
		}
	}
}

// A state folder that changes its shape would lose votes or streams.
func TestAStateFolderKeepsItsShape(t *testing.T) {
	dir := t.TempDir()
	if _, ok, err := Made(dir); ok || err != nil {
		t.Fatal(ok, err)
	}
	m, err := Shape{2, 3, 1}.fits(dir)
	if err != nil {
		t.Fatal(err)
	}
	m.Network = "10.77.9.0/24"
	if err := m.write(dir); err != nil {
		t.Fatal(err)
	}
	if again, err := (Shape{4, 3, 1}).fits(dir); err != nil || again.Network != m.Network || again.Hosts != 4 {
		t.Errorf("more hosts: %+v %v", again, err)
	}
	for _, s := range []Shape{{1, 3, 1}, {2, 1, 1}, {2, 3, 3}} {
		if _, err := s.fits(dir); err == nil || !strings.Contains(err.Error(), "--hosts 2 --schedulers 3 --nats 1") {
			t.Errorf("%s: %v", s, err)
		}
	}
	one := t.TempDir()
	if err := os.Mkdir(filepath.Join(one, "scheduler"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := (Shape{3, 3, 3}).fits(one); err == nil || !strings.Contains(err.Error(), "one process") {
		t.Errorf("the folder of one process: %v", err)
	}
}

// What the supervisor writes is what a member reads, with nothing lost on the way.
func TestConfigurationsComeBackAsTheyWere(t *testing.T) {
	cfg := stack.NewConfig()
	cfg.Host.Labels = map[string]string{"rack": "r1"}
	cfg.Host.Capacity = hostagent.Capacity{CPUMillis: 1, MemoryBytes: 1 << 40, PIDs: 2, DiskBytes: 1 << 41}
	cfg.Scheduler.Peers = []scheduler.Peer{{ID: "scheduler-1", Addr: "10.77.1.21:7222"}}
	cfg.Scheduler.Dir, cfg.Credentials.KeyDir, cfg.Identity.KeyDir = "/a", "/b", "/c"
	cfg.Identity.Issuers = []identity.Issuer{{Issuer: "http://127.0.0.1:1/acme", Audience: "berth", Tenant: "acme", Plan: "default"}}
	cfg.Pool.Templates = map[string]pool.Template{"default": {Image: "default", Tier: "gvisor", Limits: pool.Limits{CPUMillis: 1, MemoryBytes: 1 << 40}}}
	node := BusNode{Dir: "/d", Store: "/e", Name: "nats-1", Host: "10.77.1.11", Port: 4222, URL: "a,b", Callers: []string{"host-host-1"},
		Replicas: 3, StoreBytes: 1 << 40, Routes: []string{"x:1"}, RoutePort: 6222, TLSCert: "c", TLSKey: "k", TLSCA: "a"}
	for name, c := range map[string]struct{ wrote, read any }{
		"hostagent":   {&cfg.Host, &hostagent.Config{}},
		"scheduler":   {&cfg.Scheduler, &scheduler.Config{}},
		"lifecycle":   {&cfg.Lifecycle, &lifecycle.Config{}},
		"credentials": {&cfg.Credentials, &credentials.Config{}},
		"pool":        {&cfg.Pool, &pool.Config{}},
		"identity":    {&cfg.Identity, &identity.Config{}},
		"nats":        {&node, &BusNode{}},
	} {
		raw, err := yaml.Marshal(c.wrote)
		if err != nil {
			t.Fatal(err)
		}
		if err := svc.ParseConfig(raw, c.read); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if again, err := yaml.Marshal(c.read); err != nil || !bytes.Equal(again, raw) {
			t.Errorf("%s: %v\n%s\nbecame\n%s", name, err, raw, again)
		}
	}
}

func TestStoresOutsideAreRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: that is refused first")
	}
	for _, store := range []string{"s3://bucket", "gs://bucket"} {
		c := Config{Stack: stack.NewConfig(), Shape: Shape{3, 3, 3}}
		c.Stack.Dir, c.Stack.Host.Disk.Store = t.TempDir(), store
		if err := c.check(); err == nil || !strings.Contains(err.Error(), "reach nothing outside") {
			t.Errorf("%s: %v", store, err)
		}
	}
}

func TestNamesThatMeanNobodyAreRefused(t *testing.T) {
	all := []string{"host-1", "host-2", "nats-1", "root"}
	for name, want := range map[string]string{"*": "host-1 host-2 nats-1 root", "": "host-1 host-2 nats-1 root", "host-*": "host-1 host-2", "root": "root"} {
		if got, err := matching(name, all, "link"); err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q is %v (%v)", name, got, err)
		}
	}
	for _, name := range []string{"host", "host-3", "x*", "**"} {
		if got, err := matching(name, all, "link"); err == nil {
			t.Errorf("%q is %v", name, got)
		}
	}
}

// A restart of a member that cannot start is silent for minutes.
func TestARestartThatFailsSaysWhyAtOnce(t *testing.T) {
	m := (&member{name: "nats-1", changed: func() {}}).ready()
	go func() { <-m.poke; m.fail(errors.New("the port is taken")) }()
	err := m.act(t.Context(), control.Restart)
	if err == nil || !strings.Contains(err.Error(), "nats-1") || !strings.Contains(err.Error(), "the port is taken") {
		t.Errorf("%v", err)
	}
}

// A request that cannot be done changes nothing.
func TestARefusedCommandChangesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: network namespaces cannot be made")
	}
	n, err := openNetwork(t.TempDir(), "", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	for i, name := range []string{"host-1", "host-2"} {
		if _, err := n.space(name, 101+i); err != nil {
			t.Fatal(err)
		}
	}
	s := &supervisor{net: n}
	for _, body := range []string{"", "{", `{"from":"host-1","to":"nobody","rule":{"cut":true}}`, `{"from":"host-1","to":"host-1","rule":{"cut":true}}`,
		`{"from":"host-1","to":"host-2","rule":{"loss":200}}`, `{"from":"host-1","to":"host-2","rule":{"cut":true},"x":1}`} {
		if _, err := s.setLinks(context.Background(), []byte(body)); err == nil {
			t.Errorf("%s was taken", body)
		}
	}
	if got := s.links().Links; len(got) != 0 {
		t.Errorf("links are %v", got)
	}
	if _, err := s.setLinks(context.Background(), []byte(`{"from":"host-*","to":"","rule":{"cut":true}}`)); err != nil {
		t.Error(err)
	}
	if got := s.links().Links; len(got) != 6 {
		raw, _ := json.Marshal(got)
		t.Errorf("links are %s", raw)
	}
}

// Two clusters of one machine must not have the same addresses.
func TestTwoClustersHaveNetworksOfTheirOwn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: network namespaces cannot be made")
	}
	dir := t.TempDir()
	a, err := openNetwork(dir, "", 1)
	if err != nil {
		t.Fatal(err)
	}
	b, err := openNetwork(dir, "", 1)
	if err != nil {
		t.Fatal(err)
	}
	if a.prefix == b.prefix {
		t.Errorf("both have %s", a.prefix)
	}
	if _, err := openNetwork(dir, a.prefix.String(), 1); err == nil || !strings.Contains(err.Error(), "cannot be used") {
		t.Errorf("a network in use: %v", err)
	}
	had := a.prefix
	for _, n := range []*network{a, b} {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	}
	again, err := openNetwork(dir, had.String(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if again.prefix != had || !had.Contains(again.at(hostFrom+maxHosts).Addr()) || again.at(1).Addr() != netip.MustParseAddr(strings.TrimSuffix(had.Addr().String(), "0")+"1") {
		t.Errorf("the network is %s", again.prefix)
	}
	if err := again.close(); err != nil {
		t.Error(err)
	}
}
