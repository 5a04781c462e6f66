package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

func host(tiers ...corev1.Tier) *schedulerv1.HostRecord {
	return &schedulerv1.HostRecord{Host: "h1", Alive: true, Tiers: tiers}
}

// TestAnOldViewIsNoView: once scheduler has not been heard for three intervals
// nothing is known, and that is not that nothing is there.
func TestAnOldViewIsNoView(t *testing.T) {
	f := &fleet{every: time.Minute, log: bustest.Log(t), list: func(context.Context) ([]*schedulerv1.HostRecord, error) {
		return []*schedulerv1.HostRecord{host(corev1.Tier_TIER_CONTAINER)}, nil
	}}
	if f.known().Known {
		t.Error("something is known before anybody was asked")
	}
	_, err := f.fresh(t.Context(), time.Second)
	must(t, err)
	if got := f.known(); !got.Known || len(got.Offers) != 1 {
		t.Errorf("known is %+v", got)
	}
	f.list = func(context.Context) ([]*schedulerv1.HostRecord, error) { return nil, errors.New("away") }
	if v, err := f.fresh(t.Context(), time.Minute); err != nil || !v.Known {
		t.Errorf("a fresh view was asked for again: %v", err)
	}
	if v, err := f.fresh(t.Context(), 0); err == nil || v.Known {
		t.Errorf("without an answer %+v is known", v)
	}
	f.at = f.at.Add(-4 * time.Minute)
	if f.known().Known {
		t.Error("a view of four minutes ago still counts")
	}
}

// TestNoRefusalByAnOldView: a host with the tier has joined since scheduler was
// asked last; the open asks again before it is refused. And when no host has it,
// the refusal says what there is.
func TestNoRefusalByAnOldView(t *testing.T) {
	w := newWorld(t)
	w.hosts = []*schedulerv1.HostRecord{host(corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR)}
	cfg := NewConfig()
	cfg.HostsEvery = time.Hour // asked once
	defer w.start(cfg)()
	idn := w.identity()
	open := func(id string) error {
		v := w.verified()
		v.RequestId = id
		_, err := bus.Invoke[*lifecyclev1.OpenReply](t.Context(), idn, "lifecycle", "open",
			&lifecyclev1.OpenRequest{Verified: v, Ask: &identityv1.OpenRequest{Template: "microvm"}})
		return err
	}
	n := 0
	refused := func() bool { // not before lifecycle has heard the first listing: what is configured counts then
		n++
		err := open(fmt.Sprintf("r%d", n))
		if err == nil {
			<-w.wakes
			return false
		}
		if !errs.Is(err, errkind.Refused) || !strings.Contains(err.Error(), "it offers container, gvisor") {
			t.Errorf("the answer is %v", err)
		}
		return true
	}
	for deadline := time.Now().Add(20 * time.Second); !refused(); {
		if time.Now().After(deadline) {
			t.Fatal("a tier that no host has is never refused")
		}
	}
	w.mu.Lock()
	w.hosts = append(w.hosts, host(corev1.Tier_TIER_MICROVM))
	w.mu.Unlock()
	var d *corev1.TierDecision
	for deadline := time.Now().Add(20 * time.Second); ; n++ { // the listing may be believed for a moment
		err := open(fmt.Sprintf("r%d", n+1))
		if err == nil {
			// On a busy machine scheduler may not answer in time: what is configured counts then.
			if d = (<-w.wakes).GetAdmission().GetTierDecision(); !strings.Contains(d.GetFacts()["fleet.tiers"], "as configured") {
				break
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("refused by what was so before: %v", err)
		}
	}
	if d.GetChosen() != corev1.Tier_TIER_MICROVM || d.GetFloorFrom() != "the template's tier" || d.GetFacts()["fleet.tiers"] != "container, gvisor, microvm (not proved)" || len(d.GetUnknown()) != 5 {
		t.Errorf("the decision is %v", d)
	}
}

// TestAnOperatorSeesThePolicyInForce: the text as it was read, and from where.
func TestAnOperatorSeesThePolicyInForce(t *testing.T) {
	w := newWorld(t)
	cfg := NewConfig()
	cfg.TierPolicy = filepath.Join(t.TempDir(), "tier.yaml")
	text := "data_classes: [a]\nrules: [{name: one, when: 'true', tier: gvisor, reason: because}]\n"
	must(t, os.WriteFile(cfg.TierPolicy, []byte(text), 0o600))
	defer w.start(cfg)()
	must(t, os.Remove(cfg.TierPolicy))
	got, err := bus.Invoke[*lifecyclev1.TierPolicyReply](t.Context(), bustest.Connect(t, w.bus, subjects.Operator()), "lifecycle", "tier_policy", &lifecyclev1.TierPolicyRequest{})
	must(t, err)
	if got.GetSource() != cfg.TierPolicy || got.GetText() != text {
		t.Errorf("shown is %v", got)
	}
}

// TestAPolicyThatIsWrongStartsNothing: better no lifecycle than one without walls.
func TestAPolicyThatIsWrongStartsNothing(t *testing.T) {
	cfg := NewConfig()
	cfg.TierPolicy = filepath.Join(t.TempDir(), "tier.yaml")
	must(t, os.WriteFile(cfg.TierPolicy, []byte("rules: []"), 0o600))
	if err := Run(t.Context(), cfg, nil, bustest.Log(t), nil); err == nil || !strings.Contains(err.Error(), "data_classes are missing") {
		t.Errorf("it started: %v", err)
	}
}
