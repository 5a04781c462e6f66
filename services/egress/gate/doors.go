package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/internal/netns"
	"github.com/berth-dev/berth/services/egress/internal/names"
	"github.com/berth-dev/berth/services/egress/internal/proxy"
)

// Where the doors are in the router: the host's agent has sandboxes' packets led there, and nowhere else.
const (
	gateway4        = "100.64.0.1"
	gateway6        = "fd62:6572:7468::1"
	portTransparent = "15001"
	portConnect     = "3128"
	portSOCKS       = "1080"
	portDNS         = "53"
)

// Listener opens what sandboxes reach. Without one the gate opens it in the router.
type Listener interface {
	// Listen opens a stream door at an address of the router; transparent: it takes connections to any address.
	Listen(network, address string, transparent bool) (net.Listener, error)
	ListenPacket(network, address string) (net.PacketConn, error)
	// Router tells one router from the next; an error: there is none now.
	Router() (string, error)
}

// router opens doors in the namespace at a path.
type router string

// Listen implements Listener.
func (r router) Listen(network, address string, transparent bool) (net.Listener, error) {
	if transparent {
		return netns.Listen(string(r), network, address, netns.Transparent)
	}
	return netns.Listen(string(r), network, address, nil)
}

// ListenPacket implements Listener.
func (r router) ListenPacket(network, address string) (net.PacketConn, error) {
	return netns.ListenPacket(string(r), network, address, nil)
}

// Router implements Listener.
func (r router) Router() (string, error) {
	info, err := os.Stat(string(r))
	if err != nil {
		return "", err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", errors.New("the router cannot be told from another")
	}
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), nil
}

// doors are open for one family of addresses whenever there is a router.
type doors struct {
	at     Listener
	proxy  *proxy.Proxy
	names  *names.Server
	log    *slog.Logger
	opened func(family string, open bool)
}

const (
	doorEvery = 200 * time.Millisecond
	door4     = "tcp4"
	door6     = "tcp6"
)

// run keeps both families' doors open until ctx ends.
func (d *doors) run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, family := range []string{door4, door6} {
		wg.Go(func() { d.keep(ctx, family) })
	}
	wg.Wait()
}

// keep opens the doors of one family, and again when there is another router or one of them broke.
func (d *doors) keep(ctx context.Context, family string) {
	said := ""
	for ctx.Err() == nil {
		id, err := d.at.Router()
		var set *doorSet
		if err == nil {
			set, err = d.open(family)
		}
		if err != nil {
			if text := err.Error(); text != said && !errors.Is(err, os.ErrNotExist) {
				said = text
				d.log.Info("the gate's doors wait for the router", "family", family, "error", err)
			}
			pause(ctx, doorEvery)
			continue
		}
		said = ""
		d.log.Info("the gate's doors are open", "family", family)
		d.opened(family, true)
		err = d.serve(ctx, set, id)
		d.opened(family, false)
		if ctx.Err() == nil {
			d.log.Warn("the gate's doors are opened again", "family", family, "error", err)
			pause(ctx, doorEvery)
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// doorSet is the open doors of one family.
type doorSet struct {
	transparent, connect, socks, dns net.Listener
	packets                          net.PacketConn
}

func (s *doorSet) close() {
	for _, l := range []net.Listener{s.transparent, s.connect, s.socks, s.dns} {
		if l != nil {
			_ = l.Close()
		}
	}
	if s.packets != nil {
		_ = s.packets.Close()
	}
}

// open opens all doors of a family, or none.
func (d *doors) open(family string) (*doorSet, error) {
	gateway, udp := gateway4, "udp4"
	if family == door6 {
		gateway, udp = gateway6, "udp6"
	}
	s := &doorSet{}
	var failed error
	for _, x := range []struct {
		to          *net.Listener
		port        string
		transparent bool
	}{{&s.transparent, portTransparent, true}, {&s.connect, portConnect, false}, {&s.socks, portSOCKS, false}, {&s.dns, portDNS, false}} {
		if failed == nil {
			*x.to, failed = d.at.Listen(family, net.JoinHostPort(gateway, x.port), x.transparent)
		}
	}
	if failed == nil {
		s.packets, failed = d.at.ListenPacket(udp, net.JoinHostPort(gateway, portDNS))
	}
	if failed != nil {
		s.close()
		return nil, failed
	}
	return s, nil
}

var errRouter = errors.New("there is another router, or none")

// serve serves until ctx ends, the router is another one, or a door breaks; what is open is reset then.
func (d *doors) serve(ctx context.Context, s *doorSet, id string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, f := range []func() error{
		func() error { return d.proxy.ServeTransparent(ctx, s.transparent) },
		func() error { return d.proxy.ServeConnect(ctx, s.connect) },
		func() error { return d.proxy.ServeSOCKS(ctx, s.socks) },
		func() error { return d.names.Serve(ctx, s.dns) },
		func() error { return d.names.ServePacket(ctx, s.packets) },
	} {
		wg.Go(func() {
			if err := f(); err != nil {
				cancel(err)
				return
			}
			cancel(errors.New("a door was closed"))
		})
	}
	tick := time.NewTicker(doorEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			if now, err := d.at.Router(); err != nil || now != id {
				cancel(errRouter)
			}
		}
	}
	s.close()
	wg.Wait()
	return context.Cause(ctx)
}
