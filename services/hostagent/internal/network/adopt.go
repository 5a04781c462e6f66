package network

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// kernelTable is what the kernel has of the table.
type kernelTable struct {
	permits permits
	// whole: every rule of this edition is in its place and nothing of the sets could not be read.
	whole bool
}

// adopt takes over the table that is there, with what is in its sets, if keep says so of the slot; a table of
// other rules is replaced by one with the same permits.
func (t *table) adopt(keep func(slot) bool) error {
	t.write.Lock()
	defer t.write.Unlock()
	k, err := t.read()
	if err != nil {
		return err
	}
	want := permits{bound: map[slot]bool{}, until: k.permits.until}
	for s := range k.permits.bound {
		if keep(s) {
			want.bound[s] = true
		}
	}
	if !k.whole || len(want.bound) != len(k.permits.bound) {
		if err := t.transact(func(c *nftables.Conn) error { return build(c, want, chains()) }); err != nil {
			return fmt.Errorf("write the router's table: %w", err)
		}
	}
	t.have = want
	return nil
}

// check restores the table if it is not what was written.
func (t *table) check() (restored bool, err error) {
	t.write.Lock()
	defer t.write.Unlock()
	k, err := t.read()
	if err != nil {
		return false, err
	}
	if k.whole && t.same(k.permits) {
		return false, nil
	}
	if err := t.transact(func(c *nftables.Conn) error { return build(c, t.have, chains()) }); err != nil {
		return false, fmt.Errorf("restore the router's table: %w", err)
	}
	return true, nil
}

// clockSlack is what two readings of the lease may differ by.
const clockSlack = 500 * time.Millisecond

// same says whether the kernel permits what was written. The lease may have passed in the meantime.
func (t *table) same(k permits) bool {
	if len(k.bound) != len(t.have.bound) || len(without(k.bound, t.have.bound)) > 0 {
		return false
	}
	// Longer than it was told is never right; shorter is, after a suspend of the machine it is not seen here.
	now := sinceBoot()
	if k.until > max(t.have.until, now)+clockSlack {
		return false
	}
	return t.have.until < now+clockSlack || k.until > 0
}

// read reads the table. One that is not there is empty and not whole.
func (t *table) read() (kernelTable, error) {
	k := kernelTable{permits: permits{bound: map[slot]bool{}}}
	c, err := t.conn()
	if err != nil {
		return k, err
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return k, fmt.Errorf("read the tables: %w", err)
	}
	found := false
	for _, kt := range tables {
		if kt.Name == tableName {
			found, k.whole = true, kt.Flags == 0
		}
	}
	if !found {
		return k, nil
	}
	rules, err := wholeRules(c)
	if err != nil {
		return k, err
	}
	permits, complete, err := readSets(c)
	if err != nil {
		return k, err
	}
	return kernelTable{permits: permits, whole: k.whole && rules && complete}, nil
}

// wholeRules says whether every chain has the rules of this edition, in order, and no others.
func wholeRules(c *nftables.Conn) (bool, error) {
	list, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, fmt.Errorf("read the chains: %w", err)
	}
	there := map[string]*nftables.Chain{}
	for _, ch := range list {
		if ch.Table.Name == tableName {
			there[ch.Name] = ch
		}
	}
	for _, want := range chains() {
		ch := there[want.name]
		if ch == nil || ch.Hooknum == nil || *ch.Hooknum != *want.hook || ch.Priority == nil ||
			*ch.Priority != want.priority || ch.Policy == nil || *ch.Policy != nftables.ChainPolicyDrop {
			return false, nil
		}
		rules, err := c.GetRules(inet(), ch)
		if err != nil {
			return false, fmt.Errorf("read the rules: %w", err)
		}
		if len(rules) != len(want.rules) {
			return false, nil
		}
		for i, r := range rules { // a rule's text tells what it is; not every expression can be read back
			if !bytes.Equal(r.UserData, comment(i)) {
				return false, nil
			}
		}
	}
	return true, nil
}

// readSets reads what the sets permit: slots that are in both sets, and the shorter of the lease's elements.
func readSets(c *nftables.Conn) (p permits, complete bool, err error) {
	p, complete = permits{bound: map[slot]bool{}}, true
	var list [3][]nftables.SetElement
	bound4, bound6, leaseSet := sets()
	for i, s := range []*nftables.Set{bound4, bound6, leaseSet} {
		s.ID = 0
		list[i], err = c.GetSetElements(s)
		if errors.Is(err, unix.ENOENT) {
			return p, false, nil
		}
		if err != nil {
			return p, false, fmt.Errorf("read the set %s: %w", s.Name, err)
		}
	}
	six := map[slot]bool{}
	for _, e := range list[1] {
		s, ok := slotOfKey(e.Key)
		complete = complete && ok && bytes.Equal(e.Key, s.key(s.address6().AsSlice()))
		six[s] = ok
	}
	for _, e := range list[0] {
		s, ok := slotOfKey(e.Key)
		if ok = ok && bytes.Equal(e.Key, s.key(s.address4().AsSlice())); ok && six[s] {
			p.bound[s] = true
		}
		complete = complete && ok
	}
	complete = complete && len(p.bound) == len(list[0]) && len(p.bound) == len(list[1])
	if len(list[2]) == 2 {
		p.until = sinceBoot() + min(list[2][0].Expires, list[2][1].Expires)
		complete = complete && list[2][0].Timeout > 0 && list[2][1].Timeout > 0
	}
	return p, complete && len(list[2])%2 == 0, nil
}

func slotOfKey(key []byte) (slot, bool) {
	end, _, ok := bytes.Cut(key, []byte{0})
	if !ok {
		return 0, false
	}
	return parseSlot(string(end))
}

// counters reads those of a table of the router's namespace.
func (t *table) counters(of *nftables.Table) (map[string]uint64, error) {
	t.write.Lock()
	defer t.write.Unlock()
	c, err := t.conn()
	if err != nil {
		return nil, err
	}
	objects, err := c.GetNamedObjects(of)
	if err != nil {
		return nil, fmt.Errorf("read the counters: %w", err)
	}
	all := map[string]uint64{}
	for _, o := range objects {
		if n, ok := o.(*nftables.NamedObj); ok {
			if counter, ok := n.Obj.(*expr.Counter); ok {
				all[n.Name] = counter.Packets
			}
		}
	}
	return all, nil
}
