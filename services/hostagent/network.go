package hostagent

import (
	"context"
	"maps"
	"path/filepath"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// nets are the networks of this host's sandboxes: a link each, whose traffic comes out of it, and the gate
// that lets it out. A link is let through only while its sandbox is that of one exact generation and epoch,
// after the gate took whose it is, and as long as the host's lease holds, which the kernel counts by itself.
type nets struct {
	h     *host
	opens func(ctx context.Context, dir string) (links, error)
	// opened is what comes of the opening that was begun; nil: none is under way.
	opened chan openedLinks
	links  links // nil: no sandbox here is given a network
	// why no tier that can have a network is offered, though this host is to give one.
	why   string
	files *netFiles

	// leased asks for the kernel to hear of the lease, told for the gate to hear of all.
	leased, told chan struct{}

	mu  sync.Mutex // after a session's
	all map[ids.SandboxID]*binding
	// changes counts those of all, so that a list that was told is known to be an old one.
	changes uint64
	gate    gateState
	drops   map[string]uint64 // as told last
}

func newNets(h *host) *nets {
	n := &nets{h: h, leased: make(chan struct{}, 1), told: make(chan struct{}, 1), all: map[ids.SandboxID]*binding{}}
	n.opens = func(ctx context.Context, dir string) (links, error) { return openLinks(ctx, dir, h.log) }
	h.lease.changed = n.renewed
	return n
}

// networked reports whether this host is to give its sandboxes a network.
func (c Config) networked() bool { return c.Network.Enabled && !c.bare() }

// openedLinks are links, or why there are none.
type openedLinks struct {
	links links
	err   error
}

func (n *nets) dir() string { return filepath.Join(n.h.cfg.Dir, "net") }

// begin begins to take over the links of an earlier process. It takes a moment, which the lease of what runs
// here may not have: the rest of the host opens meanwhile.
func (n *nets) begin(ctx context.Context) {
	if !n.h.cfg.networked() {
		return
	}
	n.opened = make(chan openedLinks, 1)
	go func(done chan<- openedLinks) {
		l, err := n.opens(ctx, n.dir())
		done <- openedLinks{l, err}
	}(n.opened)
}

// open ends what begin began. Unless a canary proved that what is not bound reaches nothing, no link is made,
// and no tier that needs one is offered.
func (n *nets) open() error {
	if n.opened == nil {
		return nil
	}
	got := <-n.opened
	n.opened = nil
	if got.err != nil {
		n.why = "its sandboxes cannot be walled off (network.enabled: false gives them no network): " + got.err.Error()
		n.h.log.Error("this host offers no tier that has a network", "reason", got.err)
		for t, c := range n.h.caps {
			if c.Network && c.Absent == "" {
				c.Absent = n.why
				n.h.caps[t] = c
			}
		}
		return nil
	}
	return n.use(got.links, n.dir())
}

// use begins to give networks by these links.
func (n *nets) use(l links, dir string) (err error) {
	n.links = l
	n.files, err = openNetFiles(filepath.Join(dir, "files"), n.h.runFolder(""), n.h.cfg.Network.Trust, n.h.log)
	return err
}

// missing says why this host gives no network though it is to.
func (n *nets) missing() string {
	if n == nil {
		return ""
	}
	return n.why
}

// bars says why a tier must not be offered though its driver can run it; empty: it may.
func (n *nets) bars(c driver.Capabilities) string {
	if !c.Network {
		return ""
	}
	return n.missing()
}

// has reports whether sandboxes of a tier are given a network here.
func (n *nets) has(t driver.Tier) bool {
	return n != nil && n.links != nil && n.h.drv.Capabilities()[t].Network
}

// make gives a sandbox its link and the files that belong to it; nil where its tier has none.
func (n *nets) make(ctx context.Context, id ids.SandboxID, t driver.Tier) (*network.Link, error) {
	if !n.has(t) {
		return nil, nil
	}
	if err := n.files.furnish(n.h.runFolder(id)); err != nil {
		return nil, errs.E("give a network", errkind.Internal, string(id), err)
	}
	l, err := n.links.Make(ctx, string(id), n.h.drv.Capabilities()[t].Tap)
	if err != nil {
		return nil, errs.E("give a network", errkind.Unavailable, string(id), err)
	}
	return &l, nil
}

// remove takes the link of a sandbox away that is gone.
func (n *nets) remove(ctx context.Context, id ids.SandboxID) error {
	if n == nil || n.links == nil {
		return nil
	}
	if err := n.links.Remove(ctx, string(id)); err != nil {
		return errs.E("take a network away", errkind.Unavailable, string(id), err)
	}
	return nil
}

// strays are those of all links that are of no sandbox which this host has, makes or holds warm. They were
// listed before the sessions are looked at: whoever makes one is there already.
func (n *nets) strays(found []driver.Found, all []network.Found) (out []network.Link) {
	keep := map[string]bool{}
	for _, f := range found {
		keep[string(f.ID)] = true
	}
	for _, id := range n.h.keeper.names() { // before the sessions: that is the way they go
		keep[string(id)] = true
	}
	maps.Copy(keep, n.h.held())
	for _, l := range all {
		if !keep[l.Link.Sandbox] {
			out = append(out, l.Link)
		}
	}
	return out
}

// sweep removes links that belong to nothing, lets none through that no session has, and takes over those
// that a session has which was taken over without.
func (n *nets) sweep(ctx context.Context, found []driver.Found) error {
	if n == nil || n.links == nil {
		return nil
	}
	all, failed := n.list(ctx)
	for _, l := range n.strays(found, all) {
		n.h.log.Info("removing a link that no sandbox has", "sandbox", l.Sandbox, "link", l.Name)
		if err := n.remove(ctx, ids.SandboxID(l.Sandbox)); err != nil {
			failed = err
		}
	}
	for _, l := range all {
		n.retake(l)
		if l.Bound && n.find(ids.SandboxID(l.Link.Sandbox)) == nil { // one that is bound has its binding noted before
			n.h.log.Warn("a link was bound to no session", "sandbox", l.Link.Sandbox)
			if err := n.links.Unbind(ctx, l.Link); err != nil {
				failed = err
			}
		}
	}
	return failed
}

// retake makes a binding of a link that has none, of a session that is awake.
func (n *nets) retake(l network.Found) {
	id := ids.SandboxID(l.Link.Sandbox)
	if n.find(id) != nil {
		return
	}
	n.h.mu.Lock()
	s := n.h.bySand[id]
	n.h.mu.Unlock()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sb != nil && s.sb.ID == id && s.st.Phase == core.Awake {
		n.put(l.Link, bindingOf(s.rec, l.Link), l.Bound)
		n.ask()
	}
}

// list tells every link of this host; none where it gives no network.
func (n *nets) list(ctx context.Context) ([]network.Found, error) {
	if n == nil || n.links == nil {
		return nil, nil
	}
	all, err := n.links.List(ctx)
	if err != nil {
		return nil, errs.E("list links", errkind.Unavailable, string(n.h.id), err)
	}
	return all, nil
}

// look restores what somebody took from the rules, and counts what they dropped.
func (n *nets) look(ctx context.Context) {
	if n == nil || n.links == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	restored, err := n.links.Check(ctx)
	n.h.health.note("network", err, "the rules of the sandboxes' network cannot be restored")
	switch {
	case err != nil:
		n.h.log.Error("the rules of the sandboxes' network are not what they should be", "error", err)
	case restored:
		n.h.log.Error("the rules of the sandboxes' network were taken away; they are restored")
		n.again(ctx)
	}
	if drops, err := n.links.Drops(); err == nil {
		n.h.meters.dropped(n.drops, drops)
		n.drops = drops
	}
}

// again binds what is to be bound, and has the kernel hear of the lease.
func (n *nets) again(ctx context.Context) {
	for _, b := range n.bindings() {
		b.mu.Lock()
		was := b.open
		b.open = false
		b.mu.Unlock()
		if !was {
			continue
		}
		n.h.meters.lets(-1)
		if err := n.admit(ctx, b); err != nil {
			n.h.log.Warn("a session has no way out for now", "sandbox", b.id, "error", err)
		}
	}
	n.renewed()
}

// renewed is called when the lease was granted, settled or lost. It waits for nothing.
func (n *nets) renewed() {
	for _, c := range []chan struct{}{n.leased, n.told} {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// keepLease lets the kernel hear of the lease until ctx ends; then, and when this process stands still, it
// runs out there by itself.
func (n *nets) keepLease(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.leased:
			n.lend(ctx)
		}
	}
}

// lend tells the kernel how long the host may act now.
func (n *nets) lend(ctx context.Context) {
	if err := n.links.Lease(n.h.lease.acts()); err != nil && ctx.Err() == nil {
		n.h.log.Error("the kernel did not take the lease: nothing leaves the sandboxes", "error", err)
	}
	// Who stood still between the two has lent too much.
	if n.h.lease.over() {
		if err := n.links.Lease(0); err != nil {
			n.h.log.Error("the kernel did not take that the lease is lost", "error", err)
		}
	}
}

// close lets go: links stay, and what is bound runs out with the lease. Where there is no link nothing is
// left.
func (n *nets) close() error {
	if n == nil {
		return nil
	}
	if n.opened != nil {
		n.links = (<-n.opened).links
	}
	if n.links == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if all, err := n.links.List(ctx); err == nil && len(all) == 0 {
		return n.links.Destroy(ctx)
	}
	return n.links.Close()
}
