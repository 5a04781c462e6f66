package cluster

import (
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"gopkg.in/yaml.v3"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/services/scheduler"
	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
)

// Ports are the same in every namespace.
const (
	natsPort  = 4222
	routePort = 6222
	raftPort  = 7222
)

// planner makes members: their folders, certificates, configurations and namespaces.
type planner struct {
	cfg     Config
	net     *network
	ca      *certs.CA
	leaves  map[string]certs.Leaf // by file
	log     *slog.Logger
	changed func()
	url     string // of the bus
	callout bus.CalloutConfig
}

func (p *planner) dir(parts ...string) string {
	return filepath.Join(append([]string{p.cfg.Stack.Dir}, parts...)...)
}

func nth(kind string, i int) string { return kind + "-" + strconv.Itoa(i) }

func (p *planner) hosts() (out []string) {
	for i := range p.cfg.Hosts {
		out = append(out, nth("host", i+1))
	}
	return out
}

// folders makes what every member needs to be there, and logins, before any of them starts.
func (p *planner) folders() (err error) {
	for _, d := range []string{"log", "run", "bus"} {
		if err := os.MkdirAll(p.dir(d), 0o700); err != nil {
			return fmt.Errorf("make the state folder: %w", err)
		}
	}
	if p.ca, err = certs.OpenCA(certs.Folder(p.cfg.Stack.Dir), time.Now()); err != nil {
		return err
	}
	var urls []string
	for i := range p.cfg.NATS {
		urls = append(urls, "tls://"+p.addrPort(natsFrom+i+1, natsPort))
	}
	p.url = strings.Join(urls, ",")
	callers, err := p.cfg.Stack.Callers(p.hosts()...)
	if err != nil {
		return err
	}
	if _, err = bus.EnsureKeys(p.cfg.Stack.Dir, p.url, append(everybody(), callers...)); err != nil {
		return err
	}
	if p.callout, err = bus.EnsureCallout(p.cfg.Stack.Dir); err != nil {
		return err
	}
	return identity.MakeKeys(p.cfg.Stack.Keys())
}

func (p *planner) addrPort(last, port int) string {
	return netip.AddrPortFrom(p.net.at(last).Addr(), uint16(port)).String()
}

// wired is a member in a namespace of its own.
func (p *planner) wired(name, service string, last int, config any, login subjects.Caller) (*member, error) {
	ns, err := p.net.space(name, last)
	if err != nil {
		return nil, err
	}
	return p.member(name, service, ns, p.net.at(last).Addr(), config, login)
}

// beside is a member in the machine's own namespace.
func (p *planner) beside(service string, config any, login subjects.Caller) (*member, error) {
	return p.member(service, service, p.net.root, p.net.at(1).Addr(), config, login)
}

func (p *planner) member(name, service string, ns *wire.Namespace, at netip.Addr, config any, login subjects.Caller) (*member, error) {
	raw, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("write the configuration of %s: %w", name, err)
	}
	file := p.dir("run", name+".yaml")
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		return nil, fmt.Errorf("write the configuration of %s: %w", name, err)
	}
	m := &member{name: name, service: service, ns: ns, logFile: p.dir("log", name+".log"), log: p.log, changed: p.changed,
		args: []string{service, "--name", name, "--config", file, "--ready-fd", strconv.Itoa(readyFD)}}
	if !login.IsZero() {
		m.args = append(m.args, "--login", bus.LoginPath(p.cfg.Stack.Dir, login))
	}
	if p.cfg.LogLevel != "" {
		m.args = append(m.args, "--log-level", p.cfg.LogLevel)
	}
	if p.cfg.Spans != "" {
		m.args = append(m.args, "--spans", p.cfg.Spans)
	}
	if p.cfg.Stack.MetricsListen != "" {
		m.args = append(m.args, "--metrics", "unix:"+p.metricsSocket(name))
	}
	m.info = control.Member{Name: name, Service: service, Address: at.String(), Log: m.logFile, Netns: ns.Inode()}
	return m.ready(), nil
}

func (p *planner) metricsSocket(name string) string { return p.dir("run", name+".sock") }

func (p *planner) nats() (out []*member, err error) {
	store, err := p.storeBytes()
	if err != nil {
		return nil, err
	}
	callers, err := p.cfg.Stack.Callers(p.hosts()...)
	if err != nil {
		return nil, err
	}
	node := BusNode{Dir: p.cfg.Stack.Dir, Callout: p.callout, Port: natsPort, URL: p.url, Replicas: min(p.cfg.NATS, 3), StoreBytes: store}
	for _, c := range callers {
		node.Callers = append(node.Callers, c.Name())
	}
	if p.cfg.NATS > 1 {
		node.RoutePort = routePort
		for i := range p.cfg.NATS {
			node.Routes = append(node.Routes, p.addrPort(natsFrom+i+1, routePort))
		}
	}
	for i := range p.cfg.NATS {
		name, last := nth("nats", i+1), natsFrom+i+1
		n := node
		n.Name, n.Store, n.Host = name, p.dir("bus", name), p.net.at(last).Addr().String()
		if n.TLSCert, err = p.certificate(bus.ServerLeaf(name, n.Host)); err != nil {
			return nil, err
		}
		n.TLSKey, n.TLSCA = n.TLSCert, p.ca.BundleFile()
		m, err := p.wired(name, "nats", last, n, subjects.Caller{})
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

func (p *planner) schedulers() (out []*member, err error) {
	var peers []scheduler.Peer
	for i := range p.cfg.Schedulers {
		peers = append(peers, scheduler.Peer{ID: nth("scheduler", i+1), Addr: p.addrPort(schedulerFrom+i+1, raftPort)})
	}
	for i, peer := range peers {
		last := schedulerFrom + i + 1
		cert, err := p.certificate(certs.Leaf{Role: certs.RoleScheduler, Name: peer.ID, IPs: []netip.Addr{p.net.at(last).Addr()}})
		if err != nil {
			return nil, err
		}
		cfg := p.cfg.Stack.Scheduler
		cfg.Dir, cfg.ReplicaID, cfg.Bind, cfg.Peers = p.dir("scheduler", peer.ID), peer.ID, peer.Addr, peers
		cfg.TLSCert, cfg.TLSKey, cfg.TLSCA = cert, cert, p.ca.BundleFile()
		m, err := p.wired(peer.ID, "scheduler", last, cfg, subjects.Service("scheduler"))
		if err != nil {
			return nil, err
		}
		m.info.Dir = cfg.Dir
		out = append(out, m)
	}
	return out, nil
}

func (p *planner) hostMembers() (out []*member, err error) {
	share, err := p.share()
	if err != nil {
		return nil, err
	}
	for i, name := range p.hosts() {
		cfg := p.host(i+1, share)
		if err := hostagent.Preflight(cfg); err != nil {
			return nil, err
		}
		m, err := p.wired(name, "hostagent", hostFrom+i+1, cfg, subjects.Host(ids.Host(name)))
		if err != nil {
			return nil, err
		}
		m.info.Dir, m.info.Marks = cfg.Dir, cfg.Marks()
		out = append(out, m)
	}
	return out, nil
}

// gates are the gates of the hosts, each in its host's namespace: what is let out leaves as the host's own.
func (p *planner) gates() (out []*member, err error) {
	if !p.cfg.Stack.Gated() {
		return nil, nil
	}
	for i, name := range p.hosts() {
		host := p.host(i+1, hostagent.Capacity{})
		login := subjects.Gate(ids.Host(name))
		m, err := p.member(nth("gate", i+1), "gate", p.net.spaces[name], p.net.at(hostFrom+i+1).Addr(), p.cfg.Stack.GateOf(host), login)
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// host is the configuration of the i-th host. In zone and labels {n} stands for its number.
func (p *planner) host(i int, share hostagent.Capacity) hostagent.Config {
	cfg := p.cfg.Stack.Host
	number := strings.NewReplacer("{n}", strconv.Itoa(i))
	cfg.Host, cfg.Zone, cfg.Labels = nth("host", i), number.Replace(cfg.Zone), maps.Clone(cfg.Labels)
	for k, v := range cfg.Labels {
		cfg.Labels[k] = number.Replace(v)
	}
	if p.cfg.Hosts > 1 {
		cfg.Fence = "stop" // another host takes the sessions
	}
	cfg.Dir = p.dir("host", cfg.Host)
	cfg.Capacity = share
	if cfg.ImageStore != "" {
		cfg.ImageStore += "-" + strconv.Itoa(i)
	}
	if cfg.Driver == "null" {
		return cfg
	}
	// One machine's disk is behind them all.
	cfg.Disk.Reserve /= uint64(p.cfg.Hosts)
	cfg.Disk.Ready = (cfg.Disk.Ready + p.cfg.Hosts - 1) / p.cfg.Hosts
	return cfg
}

// share is what one host has of the machine; what is configured is each host's.
func (p *planner) share() (hostagent.Capacity, error) {
	c, n := p.cfg.Stack.Host.Capacity, uint64(p.cfg.Hosts)
	var mem unix.Sysinfo_t
	if err := unix.Sysinfo(&mem); err != nil {
		return c, fmt.Errorf("measure this machine's memory: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(p.cfg.Stack.Dir, &st); err != nil {
		return c, fmt.Errorf("measure the free space of the state folder: %w", err)
	}
	if c.CPUMillis == 0 {
		c.CPUMillis = uint32(runtime.NumCPU()*1000) / uint32(n)
	}
	if c.MemoryBytes == 0 {
		c.MemoryBytes = uint64(mem.Totalram) * uint64(mem.Unit) / 10 * 8 / n
	}
	if c.PIDs == 0 {
		c.PIDs = 32768 / uint32(n)
	}
	if c.DiskBytes == 0 {
		c.DiskBytes = st.Bavail * uint64(st.Bsize) / n
	}
	return c, nil
}

// storeBytes is what each replica of the store of disks may take, in steps, so that the streams are
// not changed at every start.
func (p *planner) storeBytes() (int64, error) {
	const step = 1 << 30
	d, err := p.cfg.Stack.Declaration(p.cfg.NATS)
	if err != nil {
		return 0, err
	}
	var least int64 = 1 << 62
	for _, o := range d.ObjectStores {
		least = min(least, o.MaxBytes)
	}
	return max(least/step, 1) * step, nil
}

// besides are the members in the machine's own namespace. Of each there is one, but for pool and
// identity.
func (p *planner) besides() (out []*member, err error) {
	tenants, err := p.cfg.Stack.DevIssuers()
	if err != nil {
		return nil, err
	}
	who, err := p.identity()
	if err != nil {
		return nil, err
	}
	for _, b := range []struct {
		service string
		config  any
		login   subjects.Caller
	}{
		{"devissuer", devissuer.Config{Dir: p.cfg.Stack.Keys(), Tenants: tenants}, subjects.Caller{}},
		{"credentials", p.cfg.Stack.Credentials, subjects.Service("credentials")},
		{"egress", p.cfg.Stack.Egress, subjects.Service("egress")},
		{"lifecycle", p.cfg.Stack.Lifecycle, subjects.Service("lifecycle")},
		{"identity", who, subjects.Service("identity")},
	} {
		m, err := p.beside(b.service, b.config, b.login)
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	if p.cfg.Schedulers > 1 { // nobody new is let in to the bus while no identity runs
		m, err := p.member(nth("identity", 2), "identity", p.net.root, p.net.at(1).Addr(), who, subjects.Service("identity"))
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	for i := range p.pools() {
		name := nth("pool", i+1)
		m, err := p.member(name, "pool", p.net.root, p.net.at(1).Addr(), p.cfg.Stack.Pool, subjects.Service("pool"))
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// identity is the configuration of each identity.
func (p *planner) identity() (identity.Config, error) {
	stack := p.cfg.Stack
	err := stack.BusLogins(p.hosts()...)
	stack.Identity.Callout.Login = bus.LoginPath(stack.Dir, subjects.Callout())
	stack.Identity.Callout.Warden = bus.LoginPath(stack.Dir, subjects.Warden())
	return stack.Identity, err
}

// pools is how many there are of pool: where schedulers can be lost, one stands by. More would not
// outlive more, because the store on the bus says who leads, not a majority of them.
func (p *planner) pools() int { return min(p.cfg.Schedulers, 2) }

// issuer is where the development issuer listens; it chooses the address if it has none.
func (p *planner) issuer() (string, error) {
	at, err := devissuer.Address(p.cfg.Stack.Keys())
	if err != nil {
		return "", err
	}
	host, _, err := net.SplitHostPort(at)
	if err != nil || !net.ParseIP(host).IsLoopback() {
		return "", fmt.Errorf("the development issuer's address %q is none of this machine's own", at)
	}
	return "http://" + at, nil
}
