package session

import (
	"container/list"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/berth-dev/berth/services/egress/authority"
)

// The addresses that stand for names. They are the host's to choose: services/hostagent routes them to the
// gate, from every sandbox.
var (
	Names4 = netip.MustParsePrefix("198.18.0.0/15")
	Names6 = netip.MustParsePrefix("fd62:6572:7468:f::/64")
)

const (
	maxNames = 4096
	space4   = 1 << 17
)

// names are the synthetic addresses of one session. A name has the same addresses whenever the session asks,
// as far as they are free, so that a client that remembers one for long reaches no other host by it.
type names struct {
	salt string

	mu     sync.Mutex
	byName map[authority.Name]*list.Element
	four   map[uint32]*named
	six    map[uint64]*named
	order  list.List // of *named, the one used last in front
}

// named is one name.
type named struct {
	name authority.Name
	four uint32
	six  uint64
	held int // connections to it
}

// assign finds or makes the addresses of a name.
func (n *names) assign(name authority.Name) (four, six netip.Addr, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e, ok := n.byName[name]; ok {
		n.order.MoveToFront(e)
		x := e.Value.(*named)
		return addr4(x.four), addr6(x.six), true
	}
	if n.byName == nil {
		n.byName, n.four, n.six = map[authority.Name]*list.Element{}, map[uint32]*named{}, map[uint64]*named{}
	}
	if len(n.byName) >= maxNames && !n.evict() {
		return netip.Addr{}, netip.Addr{}, false
	}
	sum := sha256.Sum256([]byte("berth name\n" + n.salt + "\n" + string(name)))
	x := &named{name: name, four: binary.BigEndian.Uint32(sum[:4]) % space4, six: binary.BigEndian.Uint64(sum[8:16])}
	for x.four == 0 || x.four == space4-1 || n.four[x.four] != nil {
		x.four = (x.four + 1) % space4
	}
	for x.six == 0 || n.six[x.six] != nil {
		x.six++
	}
	n.byName[name], n.four[x.four], n.six[x.six] = n.order.PushFront(x), x, x
	return addr4(x.four), addr6(x.six), true
}

// evict forgets the name that was not used for longest and has no connection; the lock is held.
func (n *names) evict() bool {
	for e := n.order.Back(); e != nil; e = e.Prev() {
		if x := e.Value.(*named); x.held == 0 {
			n.order.Remove(e)
			delete(n.byName, x.name)
			delete(n.four, x.four)
			delete(n.six, x.six)
			return true
		}
	}
	return false
}

// of is the name of an address.
func (n *names) of(a netip.Addr) (authority.Name, bool) {
	a = a.Unmap()
	n.mu.Lock()
	defer n.mu.Unlock()
	var x *named
	switch {
	case Names4.Contains(a):
		b := a.As4()
		x = n.four[binary.BigEndian.Uint32(b[:])&(space4-1)]
	case Names6.Contains(a):
		b := a.As16()
		x = n.six[binary.BigEndian.Uint64(b[8:])]
	}
	if x == nil {
		return "", false
	}
	n.order.MoveToFront(n.byName[x.name])
	return x.name, true
}

// hold counts the connections to a name, if it has addresses.
func (n *names) hold(name authority.Name, by int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e, ok := n.byName[name]; ok {
		x := e.Value.(*named)
		x.held = max(0, x.held+by)
	}
}

func addr4(n uint32) netip.Addr {
	b := Names4.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])|n)
	return netip.AddrFrom4(b)
}

func addr6(n uint64) netip.Addr {
	b := Names6.Addr().As16()
	binary.BigEndian.PutUint64(b[8:], n)
	return netip.AddrFrom16(b)
}
