package containerd

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/berth-dev/berth/internal/netns"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

func newRouter(t *testing.T) *network.Router {
	t.Helper()
	r, err := network.Open(t.Context(), network.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Destroy(t.Context()); err != nil {
			t.Error(err)
		}
	})
	return r
}

// A start that fails, or whose agent dies, between the making of the first process and its start: the namespace
// with the link in it is not one that an empty sandbox has.
func TestAFailureWithALinkLeavesNothing(t *testing.T) {
	h := newHost(t)
	r := newRouter(t)
	for _, tier := range h.cfg.Tiers {
		for _, point := range []string{"sandbox.network", "sandbox.over", "sandbox.start"} {
			for _, hard := range []bool{false, true} {
				if point == "sandbox.over" && tier != driver.Container {
					continue
				}
				t.Run(fmt.Sprint(tier, " ", point, " ", hard), func(t *testing.T) {
					failLinked(t, h, r, tier, point, hard)
				})
			}
		}
	}
}

func failLinked(t *testing.T, h *host, r *network.Router, tier driver.Tier, point string, hard bool) {
	spec := h.Spec(t, 1, 1)
	defer h.Release(t)
	l, err := r.Make(t.Context(), string(spec.ID()), false)
	if err != nil {
		t.Fatal(err)
	}
	spec.Tier, spec.Link, spec.Over = tier, &l, []driver.Over{{From: guestName, To: "/etc/changed"}}
	d := h.Open(t).(*Driver)
	d.run.Crash = hard
	d.run.Fault = func(name string) error {
		if name == point {
			return errFault
		}
		return nil
	}
	if _, err := d.Create(t.Context(), spec); !errors.Is(err, errFault) {
		t.Fatalf("got %v", err)
	}
	_ = d.Close()
	d = openDriver(t, h)
	if found, err := d.List(t.Context()); err != nil || hard != (len(found) == 1) {
		t.Errorf("the next driver finds %+v, %v", found, err)
	}
	if err := d.Stop(t.Context(), spec.ID()); err != nil {
		t.Error(err)
	}
	if left := h.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		var host, peer error
		if err := netns.Do(r.Path(), func() error {
			_, host = net.InterfaceByName(l.Name)
			_, peer = net.InterfaceByName(l.Peer)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if host != nil || peer == nil { // it went with its namespace, or was never plugged
			break
		}
		if time.Now().After(end) {
			t.Fatal("the link's other end is in a namespace that lives")
		}
	}
	if err := r.Remove(t.Context(), string(spec.ID())); err != nil {
		t.Error(err)
	}
}

// What a machine of Kata Containers has of a network is what its namespace has before it starts.
func TestAMachineOfKataGetsItsNamespaceAndItsFiles(t *testing.T) {
	d := &Driver{cfg: NewConfig("/state", "/runtimes")}
	spec := driver.Spec{Tier: driver.Kata, Link: &network.Link{}, Over: []driver.Over{{From: "trust.pem", To: "/etc/ssl/cert.pem"}}, Init: []string{"/sbin/init"}}
	m := &making{d: d, spec: spec, id: "bx", linked: true, machine: &machine{}}
	for _, s := range []*specs.Spec{m.machineSpec(), m.guestSpec()} {
		want := specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: d.netns("bx")}
		if !slices.Contains(s.Linux.Namespaces, want) {
			t.Errorf("namespaces: %v", s.Linux.Namespaces)
		}
	}
	want := []string{"/run/berth/guest", "-root=/run/berth-disk", "-over=trust.pem:/etc/ssl/cert.pem", "--", "/sbin/init"}
	if got := m.guestSpec().Process.Args; !slices.Equal(got, want) {
		t.Errorf("arguments: %q", got)
	}
	var names []string
	for _, column := range m.table() {
		for _, s := range column {
			names = append(names, s.Name)
		}
	}
	if i, j := slices.Index(names, "sandbox.network"), slices.Index(names, "sandbox.machine"); i < 0 || i > j {
		t.Errorf("steps: %v", names)
	}
}
