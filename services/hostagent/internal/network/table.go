package network

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// The sets of the table. Their numbers are of one transaction only.
type setName struct {
	name string
	id   uint32
}

var (
	setBound4 = setName{"bound4", 1}
	setBound6 = setName{"bound6", 2}
	setLease  = setName{"lease", 3}
)

// elementsAtOnce bounds one netlink message, whose list is at most 64 KiB.
const elementsAtOnce = 400

// answersBuffer has room for what the kernel says to the longest transaction.
const answersBuffer = 4 << 20

// permits is who may send: the bound slots, and until when, on the clock that runs on in suspend. renewed
// says that the lease is to be written.
type permits struct {
	bound   map[slot]bool
	until   time.Duration
	renewed bool
}

// sinceBoot is CLOCK_BOOTTIME.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// table writes the router's nft table. It knows what is in the sets, so that it can restore all of it.
// Changes that wait while one is written go together in the next transaction.
type table struct {
	ns *os.File // nil when the router is closed

	mu   sync.Mutex
	next *batch

	write sync.Mutex // what follows, and the kernel's table
	have  permits
}

type batch struct {
	ops  []func(*permits)
	done chan struct{}
	err  error
}

// change does op and returns when the kernel has it.
func (t *table) change(op func(*permits)) error {
	t.mu.Lock()
	b, first := t.next, t.next == nil
	if first {
		b = &batch{done: make(chan struct{})}
		t.next = b
	}
	b.ops = append(b.ops, op)
	t.mu.Unlock()
	if !first {
		<-b.done
		return b.err
	}
	t.write.Lock()
	defer t.write.Unlock()
	t.mu.Lock()
	t.next = nil
	t.mu.Unlock()
	b.err = t.commit(b.ops)
	close(b.done)
	return b.err
}

// commit writes the difference that ops make. If the kernel refuses, somebody else changed the table, and
// all of it is written anew.
func (t *table) commit(ops []func(*permits)) error {
	want := permits{bound: maps.Clone(t.have.bound), until: t.have.until}
	for _, op := range ops {
		op(&want)
	}
	err := t.transact(func(c *nftables.Conn) error {
		if err := elements(c, c.SetDeleteElements, without(t.have.bound, want.bound)); err != nil {
			return err
		}
		if err := elements(c, c.SetAddElements, without(want.bound, t.have.bound)); err != nil {
			return err
		}
		if want.renewed {
			return lease(c, want.until)
		}
		return nil
	})
	if err != nil {
		if again := t.transact(func(c *nftables.Conn) error { return build(c, want, chains()) }); again != nil {
			return fmt.Errorf("change the router's table: %w", errors.Join(err, again))
		}
	}
	want.renewed = false
	t.have = want
	return nil
}

// without are the slots of one that the other has not.
func without(one, other map[slot]bool) []slot {
	var all []slot
	for s := range one {
		if !other[s] {
			all = append(all, s)
		}
	}
	return all
}

// transact runs f and sends what it said as one transaction.
func (t *table) transact(f func(*nftables.Conn) error) error {
	c, err := t.conn()
	if err != nil {
		return err
	}
	if err := f(c); err != nil {
		return err
	}
	return c.Flush()
}

// conn is for one transaction or one reading: an error leaves answers behind in it.
func (t *table) conn() (*nftables.Conn, error) {
	if t.ns == nil {
		return nil, fmt.Errorf("the router: %w", os.ErrClosed)
	}
	return nftables.New(nftables.WithNetNSFd(int(t.ns.Fd())), nftables.WithSockOptions(func(c *netlink.Conn) error {
		return c.SetReadBuffer(answersBuffer)
	}))
}

func inet() *nftables.Table {
	return &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
}

func sets() (bound4, bound6, leaseSet *nftables.Set) {
	key := func(a nftables.SetDatatype) nftables.SetDatatype {
		return nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr, a)
	}
	bound4 = &nftables.Set{Table: inet(), Name: setBound4.name, ID: setBound4.id, Concatenation: true, KeyType: key(nftables.TypeIPAddr)}
	bound6 = &nftables.Set{Table: inet(), Name: setBound6.name, ID: setBound6.id, Concatenation: true, KeyType: key(nftables.TypeIP6Addr)}
	leaseSet = &nftables.Set{Table: inet(), Name: setLease.name, ID: setLease.id, HasTimeout: true, KeyType: nftables.TypeNFProto}
	return bound4, bound6, leaseSet
}

// key is the element of a slot: the name of the host's end, the hardware address and the address, each padded
// to four bytes.
func (s slot) key(address []byte) []byte {
	k := name(s.name())
	k = append(k, s.mac()...)
	k = append(k, 0, 0)
	return append(k, address...)
}

// elements does one thing to the elements of slots in both sets.
func elements(c *nftables.Conn, do func(*nftables.Set, []nftables.SetElement) error, slots []slot) error {
	bound4, bound6, _ := sets()
	for len(slots) > 0 {
		n := min(len(slots), elementsAtOnce)
		var four, six []nftables.SetElement
		for _, s := range slots[:n] {
			four = append(four, nftables.SetElement{Key: s.key(s.address4().AsSlice())})
			six = append(six, nftables.SetElement{Key: s.key(s.address6().AsSlice())})
		}
		if err := errors.Join(do(bound4, four), do(bound6, six)); err != nil {
			return err
		}
		slots = slots[n:]
	}
	return nil
}

// lease puts the two elements of the lease anew. The kernel counts in its own clock, which stands still in
// suspend; whoever renews measures with one that does not.
func lease(c *nftables.Conn, until time.Duration) error {
	_, _, set := sets()
	c.FlushSet(set)
	left := (until - sinceBoot()).Truncate(time.Millisecond)
	if left <= 0 {
		return nil
	}
	return c.SetAddElements(set, []nftables.SetElement{
		{Key: []byte{unix.NFPROTO_IPV4}, Timeout: left}, {Key: []byte{unix.NFPROTO_IPV6}, Timeout: left}})
}

// build replaces the table, whatever is there, by one of these chains that permits p.
func build(c *nftables.Conn, p permits, chains []chain) error {
	c.AddTable(inet()) // so that there is one to delete
	c.DelTable(inet())
	c.AddTable(inet())
	bound4, bound6, leaseSet := sets()
	for _, s := range []*nftables.Set{bound4, bound6, leaseSet} {
		if err := c.AddSet(s, nil); err != nil {
			return err
		}
	}
	for _, reason := range reasons {
		c.AddObj(&nftables.NamedObj{Table: inet(), Name: reason, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	}
	for _, ch := range chains {
		policy := nftables.ChainPolicyDrop
		kernel := c.AddChain(&nftables.Chain{Name: ch.name, Table: inet(), Hooknum: ch.hook, Priority: &ch.priority,
			Type: nftables.ChainTypeFilter, Policy: &policy})
		for i, r := range ch.rules {
			c.AddRule(&nftables.Rule{Table: inet(), Chain: kernel, Exprs: r, UserData: comment(i)})
		}
	}
	if err := elements(c, c.SetAddElements, without(p.bound, nil)); err != nil {
		return err
	}
	return lease(c, p.until)
}

// comment tells the edition of a rule and its place.
func comment(i int) []byte {
	return userdata.AppendString(nil, userdata.TypeComment, fmt.Sprintf("%s.%d", edition(), i))
}
