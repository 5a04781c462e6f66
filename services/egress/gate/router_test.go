package gate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
)

// sandbox4 is the address of the one sandbox of these tests, on the router's own loopback; likewise of IPv6.
const (
	sandbox4 = "100.64.0.9"
	sandbox6 = "fd62:6572:7468:1::9"
)

// newRouter makes a namespace with the gateway's addresses, a sandbox's beside them, and every synthetic
// address local, so that a listener at one of them stands for the kernel's tproxy. It ends with the test.
func newRouter(t testing.TB, path string) {
	t.Helper()
	made, err := netns.Pin(path)
	if errors.Is(err, unix.EPERM) {
		t.Skip("a network namespace needs root")
	}
	must(t, err)
	if !made {
		t.Fatal("there is one already")
	}
	t.Cleanup(func() { must(t, netns.Remove(path)) })
	must(t, netns.Do(path, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, s := range []string{gateway4 + "/32", sandbox4 + "/32", gateway6 + "/128", sandbox6 + "/128"} {
			a, err := netlink.ParseAddr(s)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(lo, a); err != nil {
				return fmt.Errorf("add %s: %w", s, err)
			}
		}
		return netlink.LinkSetUp(lo)
	}))
}

// inside dials from the sandbox's address in the router.
func inside(path, network, from, to string) (c net.Conn, err error) {
	var local net.Addr = &net.TCPAddr{IP: net.ParseIP(from)}
	if network[:3] == "udp" {
		local = &net.UDPAddr{IP: net.ParseIP(from)}
	}
	err = netns.Do(path, func() error {
		c, err = (&net.Dialer{LocalAddr: local, Timeout: 5 * time.Second}).Dial(network, to)
		return err
	})
	return c, err
}

// The doors open in a real router once it is there, over both families; another router under the same path is
// found; and what is dialled goes out of the host's own namespace.
func TestDoorsOpenInARealRouter(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "router")
	if os.Geteuid() != 0 {
		t.Skip("a network namespace needs root")
	}
	w := newWorldAt(t, path)
	w.apply(w.rule("api.example.com", ""), 0)
	b := binding(1)
	b.Address4, b.Address6 = sandbox4, sandbox6
	w.sync(time.Hour, b)
	for range 2 {
		t.Run("router", func(t *testing.T) {
			newRouter(t, path)
			for _, x := range []struct{ family, from, gateway string }{{"4", sandbox4, gateway4}, {"6", sandbox6, gateway6}} {
				eventually(t, "the name is answered over IPv"+x.family, func() bool {
					c, err := inside(path, "udp"+x.family, x.from, net.JoinHostPort(x.gateway, portDNS))
					if err != nil {
						return false
					}
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(time.Second))
					conn := &dns.Conn{Conn: c}
					if conn.WriteMsg(new(dns.Msg).SetQuestion("api.example.com.", dns.TypeA)) != nil {
						return false
					}
					m, err := conn.ReadMsg()
					return err == nil && len(m.Answer) == 1
				})
				tr := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: w.cell},
					DialContext: func(context.Context, string, string) (net.Conn, error) {
						c, err := inside(path, "tcp"+x.family, x.from, net.JoinHostPort(x.gateway, portConnect))
						if err != nil {
							return nil, err
						}
						return tunnel(c, fmt.Sprintf("api.example.com:%d", w.port))
					}}
				resp, err := (&http.Client{Transport: tr}).Get(fmt.Sprintf("https://api.example.com:%d/", w.port))
				must(t, err)
				raw, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || string(raw) != "hello" {
					t.Errorf("IPv%s: %q, %v", x.family, raw, err)
				}
				// The transparent door is one: it takes a connection, and resets what stands for no name.
				c, err := inside(path, "tcp"+x.family, x.from, net.JoinHostPort(x.gateway, portTransparent))
				if errors.Is(err, unix.ECONNRESET) {
					continue // at once
				}
				must(t, err)
				_ = c.SetDeadline(time.Now().Add(patience))
				if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil {
					t.Errorf("IPv%s: the transparent door answers a literal", x.family)
				}
				c.Close()
			}
		})
	}
}
