package scheduler

import (
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
)

func (h *fakeHost) lastAsked() *hostv1.WakeRequest {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked
}

// A session that was in a virtual machine is never given to a host in a weaker tier, whoever asks and
// whichever leader decides; the record and the terms say so.
func TestADiskOfAMachineWakesInMachinesOnly(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.tiers = []corev1.Tier{corev1.Tier_TIER_NULL, corev1.Tier_TIER_MICROVM}
	h.join(t)
	a := admission(1, "r1")
	a.Terms.Tier = corev1.Tier_TIER_MICROVM
	must[wakeReply](t)(w.openWith(a))
	if h.lastAsked().GetVmWritten() || !w.show(1).GetVmWritten() {
		t.Errorf("a first wake says %t, the record %t", h.lastAsked().GetVmWritten(), w.show(1).GetVmWritten())
	}
	must[sleepReply](t)(w.close(1, "r2"))
	w.restart()
	must[wakeReply](t)(w.openWith(admission(1, "r3")))
	asked := h.lastAsked()
	if asked.GetTerms().GetTier() != corev1.Tier_TIER_MICROVM || !asked.GetVmWritten() || !strings.Contains(asked.GetTerms().GetTierReason(), errkind.VMWritten) {
		t.Errorf("the host was asked for %v", asked)
	}
}

// What only a host knows it says by refusing: the wake is tried again in the right tier.
func TestAHostThatRefusesAMachinesDiskIsAskedForAMachine(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.tiers = []corev1.Tier{corev1.Tier_TIER_NULL, corev1.Tier_TIER_MICROVM}
	h.join(t)
	must[wakeReply](t)(w.open(1, "r1"))
	must[sleepReply](t)(w.close(1, "r2"))
	h.onWake = func(r *hostv1.WakeRequest) error {
		if core := r.GetTerms().GetTier(); core != corev1.Tier_TIER_MICROVM {
			return errs.E("attach disk", errkind.Refused, "", errkind.VMWritten+"; it wakes in a virtual machine only")
		}
		return nil
	}
	must[wakeReply](t)(w.open(1, "r3"))
	if asked := h.lastAsked(); asked.GetTerms().GetTier() != corev1.Tier_TIER_MICROVM || !w.show(1).GetVmWritten() {
		t.Errorf("the host was asked for %v", asked)
	}
}
