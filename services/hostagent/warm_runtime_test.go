package hostagent

import (
	"strings"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// TestRealWarmSandboxes: a session's life on claimed sandboxes, with a restart in the middle and one that
// another process prepared.
func TestRealWarmSandboxes(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	for _, tier := range []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR} {
		t.Run(tierName(tier), func(t *testing.T) {
			r := realRig(t)
			r.start()
			if !r.run.h.offers(tier) {
				t.Skipf("skipped: this host has no tier %s: %v", tierName(tier), lacking(r.run.h.caps))
			}
			warmLifeOf(t, r, tier)
		})
	}
}

func prepareIn(tier corev1.Tier) *hostv1.PrepareRequest {
	req := prepareOf(ids.NewWarmID(), 10)
	w := &hostv1.WakeRequest{Terms: req.Terms}
	tierTerms(tier)(w)
	return req
}

func warmLifeOf(t *testing.T, r *rig, tier corev1.Tier) {
	p := newPool(r)
	for range 2 {
		began := time.Now()
		if _, err := p.prepare(prepareIn(tier)); err != nil {
			t.Fatal(err)
		}
		t.Logf("prepared in %s", time.Since(began))
	}
	claimed := func(ref *corev1.SessionRef, what string, change func(*hostv1.WakeRequest)) {
		t.Helper()
		began := time.Now()
		reply := r.mustWake(ref, func(w *hostv1.WakeRequest) {
			tierTerms(tier)(w)
			if change != nil {
				change(w)
			}
		})
		took := time.Since(began)
		if reply.GetWarm() == "" {
			t.Errorf("%s: it started cold: %s", what, reply.GetColdReason())
		}
		first := time.Now()
		c := r.client(ref)
		o := c.exec("x"+what, "sh", "-c", "cat /run/berth/session.json; echo $HOSTNAME; hostname; ls -ld /; cat /root/keep; echo mine > /root/keep")
		if !strings.Contains(string(o.stdout), string(key("ann"))) {
			t.Errorf("%s: %q %q", what, o.stdout, o.stderr)
		}
		if resumed := what != "fresh"; strings.Contains(string(o.stdout), "mine") != resumed {
			t.Errorf("%s: %q %q", what, o.stdout, o.stderr)
		}
		t.Logf("%s: wake %s, first command %s", what, took, time.Since(first))
		for _, s := range reply.GetTiming().GetSteps() {
			t.Logf("  %-44s at %8.2f took %8.2f ms", s.GetName(), ms(s.GetStart().AsDuration()), ms(s.GetTook().AsDuration()))
		}
	}
	one, two := ref("ann", 5, 6), ref("ann", 5, 9)
	claimed(one, "fresh", nil)
	_, err := r.sleep(one, time.Time{}, true)
	must(t, err)
	claimed(two, "resumed", func(w *hostv1.WakeRequest) { resume(r, one)(w) })
	if _, err := p.prepare(prepareIn(tier)); err != nil {
		t.Fatal(err)
	}
	r.halt()
	r.start()
	if n := len(newPool(r).warm().GetWarm()); n != 0 {
		t.Errorf("%d of the process before are told of", n)
	}
	found, err := r.run.h.drv.List(t.Context())
	if err != nil || len(found) != 1 {
		t.Errorf("after a restart: %v %v", found, err)
	}
	if o := r.client(two).exec("after", "cat", "/root/keep"); string(o.stdout) != "mine\n" {
		t.Errorf("adopted: %q %q", o.stdout, o.stderr)
	}
	must(t, r.delete(two))
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
