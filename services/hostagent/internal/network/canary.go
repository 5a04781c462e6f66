package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
)

const (
	canaryName = "berth-canary"
	canaryTime = 10 * time.Second
	// settle is how long the canary waits for one frame, patience for an answer: a packet that is lost on a
	// busy host comes again.
	settle   = 250 * time.Millisecond
	patience = 2500 * time.Millisecond
)

// ErrLeak says that something got where it must not, or did not get where it must.
var ErrLeak = errors.New("the router lets through what it must not")

// Canary proves on this machine that the rules deny, before the host takes sessions. A throw-away router with
// the same rules shows that nothing reaches a door with no lease, or with no binding, and that with both the
// doors are reached and nothing else is. Then this router, whatever is bound and leased in it, is looked at
// and shown to deny a link that is not bound.
func (r *Router) Canary(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, canaryTime)
	defer cancel()
	twin, err := Open(ctx, Config{Dir: filepath.Join(r.dir, "canary"), Log: r.log})
	if err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	defer func() { err = errors.Join(err, twin.Destroy(context.WithoutCancel(ctx)), os.RemoveAll(twin.dir)) }()
	if err := twin.canary(ctx, patience); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	if _, err := r.Check(ctx); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	if err := r.canary(ctx, 0); err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	return nil
}

// canary makes a sandbox of its own in the router and tries; with patience also what happens with permission.
func (r *Router) canary(ctx context.Context, patience time.Duration) (err error) {
	pin := filepath.Join(r.dir, "canary-sandbox")
	defer func() { err = errors.Join(err, r.Remove(ctx, canaryName), netns.Remove(pin)) }()
	if err := errors.Join(r.Remove(ctx, canaryName), netns.Remove(pin)); err != nil {
		return err
	}
	if _, err := netns.Pin(pin); err != nil {
		return err
	}
	l, err := r.Make(ctx, canaryName, false)
	if err != nil {
		return err
	}
	if err := l.Plug(pin); err != nil {
		return err
	}
	w, err := newWitness(r, pin, l)
	if err != nil {
		return err
	}
	defer w.Close()
	w.patience = patience
	if patience == 0 {
		return w.nothing(ctx, "with no binding")
	}
	return r.phases(ctx, w, l)
}

func (r *Router) phases(ctx context.Context, w *witness, l Link) error {
	if err := w.open(); err != nil {
		return err
	}
	err := w.nothing(ctx, "with no binding and no lease")
	if err == nil {
		err = errors.Join(r.Bind(ctx, l), w.nothing(ctx, "with no lease"))
	}
	if err == nil {
		err = errors.Join(r.Unbind(ctx, l), r.Lease(canaryTime), w.nothing(ctx, "with no binding"))
	}
	if err == nil {
		err = errors.Join(r.Bind(ctx, l), w.doors(ctx), w.talk())
	}
	if err == nil {
		err = errors.Join(r.Lease(0), w.nothing(ctx, "after the lease"))
	}
	return err
}

// witness sees what of a sandbox's frames comes to the router and what gets past its rules.
type witness struct {
	router   *Router
	sandbox  string
	link     Link
	slot     slot
	raw      int // sends frames at the sandbox's end
	end      int // its index there
	closers  []io.Closer
	patience time.Duration // with what is asked
}

const watchTable = "watch"

func newWitness(r *Router, sandbox string, l Link) (*witness, error) {
	s, err := l.slot()
	if err != nil {
		return nil, err
	}
	w := &witness{router: r, sandbox: sandbox, link: l, slot: s, raw: -1}
	err = netns.Do(sandbox, func() error {
		end, err := net.InterfaceByName(inside)
		if err != nil {
			return err
		}
		w.end = end.Index
		w.raw, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return os.NewSyscallError("send frames", err)
	})
	if err == nil {
		err = r.table.transact(w.watch)
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// watch counts the packets that come from the link, and those that get past the rules.
func (w *witness) watch(c *nftables.Conn) error {
	t := &nftables.Table{Name: watchTable, Family: nftables.TableFamilyINet}
	c.AddTable(t)
	c.DelTable(t)
	c.AddTable(t)
	accept := nftables.ChainPolicyAccept
	for _, ch := range []struct {
		name     string
		hook     *nftables.ChainHook
		priority nftables.ChainPriority
	}{{"came", nftables.ChainHookPrerouting, -500}, {"in", nftables.ChainHookInput, 100}, {"on", nftables.ChainHookForward, -100}} {
		c.AddObj(&nftables.NamedObj{Table: t, Name: ch.name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
		kernel := c.AddChain(&nftables.Chain{Name: ch.name, Table: t, Hooknum: ch.hook, Priority: &ch.priority,
			Type: nftables.ChainTypeFilter, Policy: &accept})
		c.AddRule(&nftables.Rule{Table: t, Chain: kernel, Exprs: rule(metaIs(expr.MetaKeyIIFNAME, name(w.link.Name)),
			[]expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: ch.name}})})
	}
	return nil
}

// Close ends the watching.
func (w *witness) Close() {
	if w.raw >= 0 {
		_ = unix.Close(w.raw)
	}
	for _, d := range w.closers {
		_ = d.Close()
	}
	_ = w.router.table.transact(func(c *nftables.Conn) error {
		t := &nftables.Table{Name: watchTable, Family: nftables.TableFamilyINet}
		c.AddTable(t)
		c.DelTable(t)
		return nil
	})
}

func (w *witness) counts() (came, past uint64, err error) {
	n, err := w.router.table.counters(&nftables.Table{Name: watchTable, Family: nftables.TableFamilyINet})
	return n["came"], n["in"] + n["on"], err
}

// send sends a frame, waits until it came, and says whether it got past the rules.
func (w *witness) send(p probe, expect bool) (past bool, err error) {
	came, before, err := w.counts()
	if err != nil {
		return false, err
	}
	to := &unix.SockaddrLinklayer{Ifindex: w.end, Halen: 6}
	copy(to.Addr[:], p.frame[:6])
	if err := unix.Sendto(w.raw, p.frame, 0, to); err != nil {
		return false, os.NewSyscallError("send a frame", err)
	}
	for end := time.Now().Add(settle); ; {
		n, after, err := w.counts()
		if err != nil {
			return false, err
		}
		if after > before {
			return true, nil
		}
		if (n > came || !p.seen) && !expect {
			return false, nil
		}
		if time.Now().After(end) {
			if n == came && p.seen {
				return false, fmt.Errorf("%w: a frame did not come to the rules: %s", ErrLeak, p.what)
			}
			return false, nil
		}
	}
}

// nothing shows that no frame gets past the rules and that none is answered.
func (w *witness) nothing(ctx context.Context, when string) error {
	_, past, err := w.counts()
	if err != nil {
		return err
	}
	heard, err := w.heard()
	if err != nil {
		return err
	}
	for _, p := range probes(w.slot, w.slot+1) {
		if err := ctx.Err(); err != nil {
			return err
		}
		leak, err := w.send(p, false)
		if err != nil {
			return err
		}
		if leak {
			return fmt.Errorf("%w: %s, %s", ErrLeak, p.what, when)
		}
	}
	_, now, err := w.counts()
	if err == nil && now != past {
		err = fmt.Errorf("%w: %d packets, %s", ErrLeak, now-past, when)
	}
	if err != nil {
		return err
	}
	if n, err := w.heard(); err != nil || n != heard {
		return errors.Join(err, fmt.Errorf("%w: %d answers, %s", ErrLeak, n-heard, when))
	}
	return nil
}

// heard counts the frames that came to the sandbox.
func (w *witness) heard() (n uint64, err error) {
	err = netns.Do(w.sandbox, func() error {
		end, err := netlink.LinkByName(inside)
		if err == nil {
			n = end.Attrs().Statistics.RxPackets
		}
		return err
	})
	return n, err
}

// doors shows that of all frames those for a door get past the rules and no others.
func (w *witness) doors(ctx context.Context) error {
	for _, p := range probes(w.slot, w.slot+1) {
		if err := ctx.Err(); err != nil {
			return err
		}
		past, err := w.send(p, p.through)
		if err != nil {
			return err
		}
		if past && !p.through {
			return fmt.Errorf("%w: %s", ErrLeak, p.what)
		}
		if !past && p.through {
			return fmt.Errorf("%w: not the right ones: %s is dropped", ErrLeak, p.what)
		}
	}
	return nil
}

// open opens every door in the router; each says to whom a caller wanted to speak.
func (w *witness) open() error {
	for _, gateway := range []netip.Addr{Gateway4, Gateway6} {
		for _, port := range []int{DNSPort, ConnectPort, SocksPort, TransparentPort} {
			control := netns.Control(nil)
			if port == TransparentPort {
				control = netns.Transparent
			}
			l, err := netns.Listen(w.router.path, "tcp", at(gateway, port), control)
			if err != nil {
				return fmt.Errorf("open a door: %w", err)
			}
			w.closers = append(w.closers, l)
			go answer(l)
		}
		c, err := netns.ListenPacket(w.router.path, "udp", at(gateway, DNSPort), nil)
		if err != nil {
			return fmt.Errorf("open the resolver's door: %w", err)
		}
		w.closers = append(w.closers, c)
		go func() {
			b := make([]byte, 64)
			for {
				_, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = c.WriteTo([]byte(at(gateway, DNSPort)), from)
			}
		}()
	}
	return nil
}

func at(a netip.Addr, port int) string { return net.JoinHostPort(a.String(), strconv.Itoa(port)) }

func answer(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, c.LocalAddr().String())
		_ = c.Close()
	}
}

// talk speaks to every door from the sandbox, and to other addresses, where the transparent door answers.
func (w *witness) talk() error {
	for _, gateway := range []netip.Addr{Gateway4, Gateway6} {
		elsewhere := example4
		if gateway.Is6() {
			elsewhere = example6
		}
		for _, to := range []string{
			at(gateway, DNSPort), at(gateway, ConnectPort), at(gateway, SocksPort), at(elsewhere, 443), at(elsewhere, DNSPort),
		} {
			if err := w.ask("tcp", to); err != nil {
				return err
			}
		}
		if err := w.ask("udp", at(gateway, DNSPort)); err != nil {
			return err
		}
	}
	return nil
}

func (w *witness) ask(network, to string) error {
	var c net.Conn
	err := netns.Do(w.sandbox, func() (err error) {
		d := net.Dialer{Timeout: w.patience}
		d.SetMultipathTCP(false)
		c, err = d.Dial(network, to)
		return err
	})
	if err != nil {
		return fmt.Errorf("speak to %s: %w", to, err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(w.patience))
	if network == "udp" {
		if _, err := io.WriteString(c, "?"); err != nil {
			return fmt.Errorf("ask %s: %w", to, err)
		}
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	if err != nil {
		return fmt.Errorf("hear from %s: %w", to, err)
	}
	if string(b[:n]) != to {
		return fmt.Errorf("%w: who asked for %s came to %s", ErrLeak, to, b[:n])
	}
	return nil
}
