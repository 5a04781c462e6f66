package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Switch carries packets between namespaces.
type Switch struct {
	seed uint64

	mu    sync.Mutex
	ports map[string]*port
	links map[pair]*link // those that have a rule

	table atomic.Pointer[table] // what the readers see
	queue delayed
	done  sync.WaitGroup
}

type pair struct{ from, to string }

// table is never changed, only replaced.
type table struct {
	ports map[netip.Addr]*port
	links map[pair]*link
}

// port is one namespace's end.
type port struct {
	name   string
	addr   netip.Addr
	file   *os.File
	counts counts
}

type counts struct{ packets, bytes, dropped, refused atomic.Uint64 }

// Counts are totals of what came from one namespace.
type Counts struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
	Dropped uint64 `json:"dropped"` // by a rule, or because a queue was full
	Refused uint64 `json:"refused"` // no IPv4, another's source address, or no such destination
}

// NewSwitch makes a switch without ports; seed decides what the rules do to which packet.
func NewSwitch(seed uint64) *Switch {
	s := &Switch{seed: seed, ports: map[string]*port{}, links: map[pair]*link{}}
	s.table.Store(&table{})
	s.queue.start(&s.done)
	return s
}

// Join makes a device of that name in the namespace, with an address, and connects it. name is the
// port's.
func (s *Switch) Join(name string, n *Namespace, device string, at netip.Prefix) error {
	if !at.Addr().Is4() {
		return fmt.Errorf("join %s to the switch: %s is no IPv4 address", name, at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.ports {
		if p.name == name || p.addr == at.Addr() {
			return fmt.Errorf("join %s to the switch: %s has %s already", name, p.name, p.addr)
		}
	}
	f, err := n.device(device, at)
	if err != nil {
		return err
	}
	p := &port{name: name, addr: at.Addr(), file: f}
	s.ports[name] = p
	s.publish()
	s.done.Go(func() { s.carry(p) })
	return nil
}

// publish shows the readers what holds now. mu is held.
func (s *Switch) publish() {
	t := &table{ports: make(map[netip.Addr]*port, len(s.ports)), links: make(map[pair]*link, len(s.links))}
	for _, p := range s.ports {
		t.ports[p.addr] = p
	}
	for k, l := range s.links {
		t.links[k] = l
	}
	s.table.Store(t)
}

// Names are the ports, sorted.
func (s *Switch) Names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]string, 0, len(s.ports))
	for name := range s.ports {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// Set gives the packets that go from one port to another a rule; the zero rule heals. The n-th packet
// is counted from the first rule of the link on, until it is healed.
func (s *Switch) Set(from, to string, r Rule) error {
	if err := r.Check(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range []string{from, to} {
		if s.ports[name] == nil {
			return fmt.Errorf("the switch has no port %q", name)
		}
	}
	if from == to {
		return fmt.Errorf("%s reaches itself without the switch", from)
	}
	k := pair{from, to}
	l := s.links[k]
	if r == (Rule{}) {
		delete(s.links, k)
		s.publish()
		return nil
	}
	if l == nil {
		l = newLink(s.seed, from, to)
		s.links[k] = l
		defer s.publish()
	}
	l.mu.Lock()
	l.rule = r
	l.mu.Unlock()
	return nil
}

// Rule is what holds from one port to another.
func (s *Switch) Rule(from, to string) Rule {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.links[pair{from, to}]
	if l == nil {
		return Rule{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rule
}

// Counts of a port.
func (s *Switch) Counts(name string) Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.ports[name]
	if p == nil {
		return Counts{}
	}
	return Counts{p.counts.packets.Load(), p.counts.bytes.Load(), p.counts.dropped.Load(), p.counts.refused.Load()}
}

// Close removes every device and waits until nothing is carried any more.
func (s *Switch) Close() error {
	s.mu.Lock()
	var errs []error
	for _, p := range s.ports {
		errs = append(errs, p.file.Close())
	}
	s.mu.Unlock()
	s.queue.stop()
	s.done.Wait()
	return errors.Join(errs...)
}

// carry brings the packets of one port to where they go, until its device is closed.
func (s *Switch) carry(p *port) {
	buf := make([]byte, 1<<16)
	for {
		n, err := p.file.Read(buf)
		if err != nil {
			return // closed
		}
		s.forward(p, buf[:n])
	}
}

// forward is called with a packet that is only lent.
func (s *Switch) forward(from *port, packet []byte) {
	src, dst, ok := addresses(packet)
	t := s.table.Load()
	to := t.ports[dst]
	if !ok || src != from.addr || to == nil {
		from.counts.refused.Add(1)
		return
	}
	from.counts.packets.Add(1)
	from.counts.bytes.Add(uint64(len(packet)))
	l := t.links[pair{from.name, to.name}]
	if l == nil {
		to.send(packet)
		return
	}
	s.rule(l, from, to, packet)
}

// rule lets a link's rule happen to a packet. Also what needs no delay goes through the queue: it
// must not overtake what waits there.
func (s *Switch) rule(l *link, from, to *port, packet []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.next()
	copies := 1
	if f.twice {
		copies = 2
	}
	if f.drop || l.queued+copies*len(packet) > maxQueued {
		from.counts.dropped.Add(1)
		return
	}
	own := slices.Clone(packet)
	at := l.due(f, time.Now())
	for range copies {
		l.queued += len(own)
		s.queue.push(at, func() {
			to.send(own)
			l.mu.Lock()
			l.queued -= len(own)
			l.mu.Unlock()
		})
	}
}

// send gives the packet to the kernel. What it does not take is lost, as on any network.
func (p *port) send(packet []byte) { _, _ = p.file.Write(packet) }

// addresses reads a packet's source and destination; ok is false when it is no whole IPv4 packet.
func addresses(b []byte) (src, dst netip.Addr, ok bool) {
	const header = 20
	if len(b) < header || b[0]>>4 != 4 || int(binary.BigEndian.Uint16(b[2:])) != len(b) {
		return src, dst, false
	}
	return netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), true
}
