package scheduler

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/schemas/errkind"
)

// A host that says at length what ails it, in letters of more than one byte, does
// not keep the operator from listing hosts.
func TestLongWordsOfAHostAreCutAtACharacter(t *testing.T) {
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.load = &schedulerv1.HostLoad{Unhealthy: "a" + strings.Repeat("é", maxReason)}
	for range 2 * maxTiers {
		h.load.Tiers = append(h.load.Tiers, &corev1.TierFact{Tier: corev1.Tier_TIER_MICROVM, Accel: "tcg", Absent: "a" + strings.Repeat("é", maxReason), NotHeld: []string{"disk_io"}})
	}
	h.join(t)
	r, err := bus.Invoke[*schedulerv1.HostsReply](bustest.Context(t), w.op, "scheduler", "hosts", &schedulerv1.HostsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if said := r.GetHosts()[0].GetUnhealthy(); !strings.HasPrefix(said, "aé") || len(said) > maxReason {
		t.Errorf("unhealthy: %q", said)
	}
	facts := r.GetHosts()[0].GetTierFacts()
	if len(facts) != maxTiers {
		t.Fatalf("%d facts of tiers", len(facts))
	}
	f := facts[0]
	if f.GetTier() != corev1.Tier_TIER_MICROVM || f.GetAccel() != "tcg" || len(f.GetAbsent()) > maxReason || !strings.HasPrefix(f.GetAbsent(), "aé") || len(f.GetNotHeld()) != 1 {
		t.Errorf("a tier: %v", f)
	}
}

// What a host answers is stored in every session's record: it is bounded.
func TestAnswersOfAHostAreBounded(t *testing.T) {
	long := strings.Repeat("ü", 1<<19)
	f := failureOf(errors.New(long))
	for _, a := range []core.Answer{
		{Err: &f},
		{Woke: &core.Woke{ImageDigest: long}},
		{Slept: &core.Slept{Manifest: core.ManifestInfo{ID: long}}},
		{Slept: &core.Slept{Manifest: core.ManifestInfo{ID: "m1", ImageDigest: long}}},
	} {
		got := bound(a)
		if got.Woke != nil || got.Slept != nil || got.Err == nil || len(got.Err.Reason) > maxFailure || !utf8.ValidString(got.Err.Reason) {
			t.Errorf("%.100v", got)
		}
	}
	if f.Kind != errkind.Internal || len(f.Reason) < len(long) {
		t.Errorf("the failure itself was changed")
	}
	ok := bound(core.Answer{Slept: &core.Slept{Manifest: core.ManifestInfo{ID: "m1"}}})
	if ok.Slept == nil || ok.Err != nil {
		t.Errorf("%+v", ok)
	}
}

// A session at rest that is being saved has no compute that an open could keep
// awake: its host is not asked to, which would make some that nobody counts.
func TestOpenDuringASaveWakesNothingThere(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	r := must[wakeReply](t)(w.open(1, "r1"))
	w.exited(h1, r.GetSession())
	w.become(1, corev1.State_STATE_ASLEEP)
	w.withHost(t, "h2", 0)
	open := h1.block("sleep")
	w.drain("h1", true, time.Minute)
	h1.await(t, "sleep")
	done := make(chan error, 1)
	go func() { _, err := w.open(1, "r2"); done <- err }()
	w.until("the open is committed", func() bool {
		told := w.told(1)
		return len(told) > 0 && told[len(told)-1].GetAdmitted() != nil
	})
	time.Sleep(100 * time.Millisecond)
	open()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	w.activeOn(1, "h2")
	h1.mu.Lock()
	defer h1.mu.Unlock()
	if h1.wakes != 1 {
		t.Errorf("h1 was asked to wake it %d times, once was right", h1.wakes)
	}
}
