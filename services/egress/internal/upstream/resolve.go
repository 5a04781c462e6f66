package upstream

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/berth-dev/berth/services/egress/authority"
)

const (
	cacheSize   = 8192
	minLife     = 5 * time.Second
	maxLife     = 5 * time.Minute
	noneLife    = 5 * time.Second
	attemptTime = 2 * time.Second
	maxAddrs    = 16 // of one name and family
	maxChain    = 16 // aliases in an answer
	hostConfig  = "/etc/resolv.conf"
)

var errNoName = errors.New("there is no such name")

// resolver looks names up, each as it is written: no search domains, no local files.
type resolver struct {
	servers []netip.AddrPort
	static  map[authority.Name][]netip.Addr

	mu    sync.Mutex
	cache map[authority.Name]*entry

	confMu   sync.Mutex
	confAt   time.Time
	confMod  time.Time
	fromHost []netip.AddrPort
}

// entry is one name in the cache. Who finds it being asked for waits on done.
type entry struct {
	done  chan struct{}
	addrs []netip.Addr
	err   error
	until time.Time
}

func newResolver(servers []netip.AddrPort, static map[authority.Name][]netip.Addr) *resolver {
	return &resolver{servers: servers, static: static, cache: map[authority.Name]*entry{}}
}

// lookup returns the addresses of a name, at least one.
func (r *resolver) lookup(ctx context.Context, name authority.Name) ([]netip.Addr, error) {
	if list, ok := r.static[name]; ok {
		return list, nil
	}
	r.mu.Lock()
	e := r.cache[name]
	if e == nil || e.over() {
		e = &entry{done: make(chan struct{})}
		r.makeRoom()
		r.cache[name] = e
		go r.fill(name, e)
	}
	r.mu.Unlock()
	select {
	case <-e.done:
		return e.addrs, e.err
	case <-ctx.Done():
		return nil, errors.New("no DNS server answered in time")
	}
}

// over reports whether an entry has been answered and is old.
func (e *entry) over() bool {
	select {
	case <-e.done:
		return time.Now().After(e.until)
	default:
		return false
	}
}

// makeRoom drops what is old, and then anything until an eighth is free; the lock is held.
func (r *resolver) makeRoom() {
	if len(r.cache) < cacheSize {
		return
	}
	for name, e := range r.cache {
		if e.over() {
			delete(r.cache, name)
		}
	}
	for name := range r.cache {
		if len(r.cache) < cacheSize*7/8 {
			return
		}
		delete(r.cache, name)
	}
}

// fill asks both families at once, for the cache and for all who wait.
func (r *resolver) fill(name authority.Name, e *entry) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*attemptTime)
	defer cancel()
	type result struct {
		addrs []netip.Addr
		life  time.Duration
		err   error
	}
	results := make(chan result, 2)
	for _, kind := range []uint16{dns.TypeAAAA, dns.TypeA} {
		go func() {
			addrs, life, err := r.ask(ctx, name, kind)
			results <- result{addrs, life, err}
		}()
	}
	life := maxLife
	var failed error
	for range 2 {
		res := <-results
		e.addrs = append(e.addrs, res.addrs...)
		if res.err != nil {
			failed = res.err
		} else {
			life = min(life, res.life)
		}
	}
	switch {
	case len(e.addrs) > 0:
	case failed != nil: // it may be better at once
		e.err, life = failed, 0
	default:
		e.err, life = errNoName, noneLife
	}
	e.until = time.Now().Add(life)
	close(e.done)
}

// ask asks one server after the other for one family. No address is no error.
func (r *resolver) ask(ctx context.Context, name authority.Name, kind uint16) ([]netip.Addr, time.Duration, error) {
	servers, err := r.upstreams()
	if err != nil {
		return nil, 0, err
	}
	q := new(dns.Msg).SetQuestion(dns.Fqdn(string(name)), kind)
	q.SetEdns0(1232, false)
	last := errors.New("no DNS server answered")
	for try := range 2 {
		for _, at := range servers {
			if ctx.Err() != nil {
				return nil, 0, last
			}
			m, err := exchange(ctx, q, at, attemptTime*time.Duration(1+try)/2)
			if err != nil {
				continue
			}
			switch m.Rcode {
			case dns.RcodeSuccess:
				addrs, life := addressesOf(m, q.Question[0])
				return addrs, life, nil
			case dns.RcodeNameError:
				return nil, noneLife, nil
			}
			last = fmt.Errorf("the DNS server says %s", dns.RcodeToString[m.Rcode])
		}
	}
	return nil, 0, last
}

// exchange asks one server, again over TCP if the answer was cut off.
func exchange(ctx context.Context, q *dns.Msg, at netip.AddrPort, wait time.Duration) (*dns.Msg, error) {
	q = q.Copy()
	for _, network := range []string{"udp", "tcp"} {
		q.Id = dns.Id()
		c := dns.Client{Net: network, Timeout: wait, UDPSize: 1232}
		m, _, err := c.ExchangeContext(ctx, q, at.String())
		if err != nil {
			return nil, err
		}
		if !m.Response || len(m.Question) != 1 || !strings.EqualFold(m.Question[0].Name, q.Question[0].Name) ||
			m.Question[0].Qtype != q.Question[0].Qtype || m.Question[0].Qclass != q.Question[0].Qclass {
			return nil, errors.New("the answer is to another question")
		}
		if !m.Truncated {
			return m, nil
		}
	}
	return nil, errors.New("the answer is cut off")
}

// addressesOf follows the aliases from the question and takes the addresses at their end, and nothing else
// that the answer may hold.
func addressesOf(m *dns.Msg, q dns.Question) ([]netip.Addr, time.Duration) {
	name, life := strings.ToLower(q.Name), maxLife
	for range maxChain {
		var next string
		for _, rr := range m.Answer {
			if c, ok := rr.(*dns.CNAME); ok && strings.EqualFold(c.Hdr.Name, name) {
				next, life = strings.ToLower(c.Target), min(life, seconds(c.Hdr.Ttl))
				break
			}
		}
		if next == "" {
			break
		}
		name = next
	}
	var out []netip.Addr
	for _, rr := range m.Answer {
		var a netip.Addr
		var ok bool
		switch x := rr.(type) {
		case *dns.A:
			a, ok = netip.AddrFromSlice(x.A.To4())
		case *dns.AAAA:
			a, ok = netip.AddrFromSlice(x.AAAA.To16())
		}
		if !ok || rr.Header().Rrtype != q.Qtype || !strings.EqualFold(rr.Header().Name, name) || len(out) == maxAddrs {
			continue
		}
		out, life = append(out, a), min(life, seconds(rr.Header().Ttl))
	}
	if len(out) == 0 {
		life = noneLife
	}
	return out, max(life, minLife)
}

func seconds(ttl uint32) time.Duration { return time.Duration(ttl) * time.Second }

// upstreams are the servers to ask.
func (r *resolver) upstreams() ([]netip.AddrPort, error) {
	if len(r.servers) > 0 {
		return r.servers, nil
	}
	r.confMu.Lock()
	defer r.confMu.Unlock()
	if len(r.fromHost) > 0 && time.Since(r.confAt) < ownEvery {
		return r.fromHost, nil
	}
	info, err := os.Stat(hostConfig)
	if err != nil {
		return nil, errors.New("the host has no DNS servers")
	}
	if len(r.fromHost) == 0 || info.ModTime() != r.confMod {
		if r.fromHost, err = serversOf(hostConfig); err != nil {
			return nil, err
		}
	}
	r.confAt, r.confMod = time.Now(), info.ModTime()
	return r.fromHost, nil
}

// serversOf reads the servers of a resolv.conf.
func serversOf(file string) ([]netip.AddrPort, error) {
	conf, err := dns.ClientConfigFromFile(file)
	if err != nil {
		return nil, errors.New("the host's DNS servers cannot be read")
	}
	port, err := strconv.ParseUint(conf.Port, 10, 16)
	if err != nil {
		port = 53
	}
	var out []netip.AddrPort
	for _, s := range conf.Servers {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, netip.AddrPortFrom(a, uint16(port)))
		}
	}
	if len(out) == 0 {
		return nil, errors.New("the host has no DNS servers")
	}
	return out, nil
}
