package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	vishns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
)

// ErrNoLink says that a sandbox has no such link.
var ErrNoLink = errors.New("no such link")

// Config of a router.
type Config struct {
	Dir string // the router is pinned in there
	Log *slog.Logger
}

// Router is the namespace of a host that has the host's end of every link. Its methods are idempotent and
// safe for concurrent use. One process at a time has a host's router open.
type Router struct {
	dir, path string
	log       *slog.Logger
	ns        *os.File
	kernel    *netlink.Handle
	table     *table

	mu    sync.Mutex // what follows, and the kernel's links
	links map[string]slot
	used  map[slot]Link
	last  slot // the one that was given last

	view sync.Mutex
	live map[slot]Link // those that may be bound; taken last, never held for long
}

// Found is a link as the kernel has it.
type Found struct {
	Link  Link
	Bound bool
}

// Open makes the router at dir/router, or adopts the one that is there: its links stay, and what is bound and
// leased stays so. Links that were half made are removed.
func Open(ctx context.Context, c Config) (*Router, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of the router: %w", err)
	}
	r := &Router{dir: c.Dir, path: filepath.Join(c.Dir, "router"), log: c.Log,
		links: map[string]slot{}, used: map[slot]Link{}, live: map[slot]Link{}}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	if err := r.open(); err != nil {
		_ = r.Close()
		return nil, fmt.Errorf("open the router: %w", err)
	}
	return r, nil
}

func (r *Router) open() (err error) {
	if _, err = netns.Pin(r.path); err != nil {
		return err
	}
	if r.ns, err = netns.Open(r.path); err != nil {
		return err
	}
	if r.kernel, err = handle(r.ns); err != nil {
		return err
	}
	r.table = &table{ns: r.ns}
	if err := netns.In(r.ns, routerSettings); err != nil {
		return err
	}
	if err := r.adoptLinks(); err != nil {
		return err
	}
	// The rules come before the doors' addresses and routes.
	if err := r.table.adopt(func(s slot) bool { _, ok := r.used[s]; return ok }); err != nil {
		return err
	}
	// A slot comes again as late as can be, so that nothing on its way to an address meets another sandbox.
	r.last = firstSlot + slot(rand.N(uint32(lastSlot-firstSlot)))
	return r.routes()
}

func handle(ns *os.File) (*netlink.Handle, error) {
	at := vishns.NsHandle(ns.Fd())
	if !at.IsOpen() { // no namespace would be the process's own
		return nil, os.ErrClosed
	}
	h, err := netlink.NewHandleAt(at, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("speak to a network namespace: %w", err)
	}
	return h, nil
}

// routes brings loopback up with the gateway's addresses, and keeps marked packets here.
func (r *Router) routes() error {
	lo, err := r.kernel.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	if err := r.kernel.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	for _, a := range []struct {
		family  int
		gateway *netlink.Addr
	}{{unix.AF_INET, nodad(hostPrefixOf(Gateway4))}, {unix.AF_INET6, nodad(hostPrefixOf(Gateway6))}} {
		if err := r.kernel.AddrReplace(lo, a.gateway); err != nil {
			return fmt.Errorf("give the gateway its address: %w", err)
		}
		rule := netlink.NewRule()
		rule.Family, rule.Mark, rule.Table, rule.Priority = a.family, mark, markTable, markTable
		if err := r.kernel.RuleAdd(rule); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("route what is marked: %w", err)
		}
		local := &netlink.Route{LinkIndex: lo.Attrs().Index, Family: a.family, Table: markTable, Type: unix.RTN_LOCAL,
			Scope: netlink.SCOPE_HOST, Dst: everything(a.family)}
		if err := r.kernel.RouteReplace(local); err != nil {
			return fmt.Errorf("keep what is marked: %w", err)
		}
	}
	return local(r.kernel, Gateway6)
}

// Path is where the router's namespace is pinned.
func (r *Router) Path() string { return r.path }

// List tells the links that are there, and which are bound.
func (r *Router) List(context.Context) ([]Found, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.usable(); err != nil {
		return nil, err
	}
	ends, err := r.ends()
	if err != nil {
		return nil, err
	}
	r.table.write.Lock()
	defer r.table.write.Unlock()
	var all []Found
	for s, l := range ends {
		if l.Sandbox != "" {
			all = append(all, Found{Link: l, Bound: r.table.have.bound[s]})
		}
	}
	return all, nil
}

// Bind lets the link through while the host's lease holds. ErrNoLink: it is not there.
func (r *Router) Bind(_ context.Context, l Link) error {
	s, err := l.slot()
	if err != nil {
		return err
	}
	there := false
	err = r.table.change(func(p *permits) {
		if there = r.isLive(s, l); there {
			p.bound[s] = true
		}
	})
	if err == nil && !there {
		err = fmt.Errorf("bind %s of %s: %w", l.Name, l.Sandbox, ErrNoLink)
	}
	return err
}

// Unbind ends that, from the next packet on. A link that is not bound is fine.
func (r *Router) Unbind(_ context.Context, l Link) error {
	s, err := l.slot()
	if err != nil {
		return err
	}
	return r.table.change(func(p *permits) {
		if r.isLive(s, l) {
			delete(p.bound, s)
		}
	})
}

func (r *Router) isLive(s slot, l Link) bool {
	r.view.Lock()
	defer r.view.Unlock()
	return r.live[s] == l
}

func (r *Router) setLive(s slot, l Link) {
	r.view.Lock()
	defer r.view.Unlock()
	r.live[s] = l
}

// Lease lets what is bound through for so long from now, by the kernel's own clock: also a host whose agent
// died or hangs goes silent. It replaces what was left before; 0 or less ends it at once.
func (r *Router) Lease(left time.Duration) error {
	return r.table.change(func(p *permits) { p.until, p.renewed = sinceBoot()+max(left, 0), true })
}

// Check looks whether the table is the one that was written, and writes it anew, as one change, if not. The
// router's own routes are put again in any case.
func (r *Router) Check(context.Context) (restored bool, err error) {
	restored, err = r.table.check()
	if restored {
		r.log.Warn("the rules of the router were changed by somebody else and are restored")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if unusable := r.usable(); unusable != nil {
		return restored, errors.Join(err, unusable)
	}
	return restored, errors.Join(err, r.routes())
}

// Drops counts the packets that were dropped since the table was written, by reason.
func (r *Router) Drops() (map[string]uint64, error) { return r.table.counters(inet()) }

// Close lets go of the router and leaves it as it is. What is asked of it later is refused with os.ErrClosed.
func (r *Router) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.close()
}

func (r *Router) close() error {
	if r.kernel != nil {
		r.kernel.Close()
		r.kernel = nil // closed, it would speak to the process's own namespace
	}
	if r.table != nil {
		r.table.write.Lock()
		defer r.table.write.Unlock()
		r.table.ns = nil
	}
	if r.ns == nil {
		return nil
	}
	ns := r.ns
	r.ns = nil
	return ns.Close()
}

// usable is for whoever has mu.
func (r *Router) usable() error {
	if r.kernel == nil {
		return fmt.Errorf("the router: %w", os.ErrClosed)
	}
	return nil
}

// Destroy removes the router with every link, and closes it. A namespace that somebody else still has open
// keeps nothing but the doors.
func (r *Router) Destroy(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.usable(); err != nil {
		return err
	}
	err := r.table.change(func(p *permits) { clear(p.bound); p.until, p.renewed = 0, true })
	ends, listed := r.ends()
	err = errors.Join(err, listed)
	for s := range ends {
		err = errors.Join(err, ctx.Err(), removeEnd(r.kernel, s))
	}
	return errors.Join(err, netns.Remove(r.path), r.close())
}
