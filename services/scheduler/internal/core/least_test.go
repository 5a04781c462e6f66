package core

import (
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

func (c *cell) openTier(key ids.SessionKey, req string, tier, least corev1.Tier) Outcome {
	c.t.Helper()
	return c.apply(Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: tier, Idle: time.Minute, Retention: 720 * time.Hour},
		Request: ids.RequestID(req), StoredAt: Time(c.now), Deadline: Time(c.now + time.Minute), Keys: []ids.SessionKey{key},
		Decision: &Decision{Chosen: tier, Least: least, Floor: least, FloorFrom: "the tenant's floor"}, Candidates: named("h1"), Alive: []ids.Host{"h1"}}})
}

// TestFaultAnOpenJoinsAWeakerTier: a session that is awake, or wakes, in a tier that is weaker than an
// open needs is refused to it; nothing else of the session changes.
func TestFaultAnOpenJoinsAWeakerTier(t *testing.T) {
	const gvisor, microvm, wasm = corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_MICROVM, corev1.Tier_TIER_WASM
	c := newCell(t)
	c.openTier("sa", "r1", gvisor, gvisor)
	c.refused(c.openTier("sa", "r2", microvm, microvm), errkind.Refused) // it wakes
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	was := *c.s.Session("sa")
	out := c.openTier("sa", "r3", microvm, microvm)
	c.refused(out, errkind.Refused)
	if out.Refused == nil || !strings.Contains(out.Refused.Reason, "awake in tier gvisor") || !strings.Contains(out.Refused.Reason, "the tenant's floor") {
		t.Errorf("the refusal says %+v", out.Refused)
	}
	c.refused(c.openTier("sa", "r4", wasm, wasm), errkind.Refused) // native code is no module
	if now := *c.s.Session("sa"); now.Revision != was.Revision || now.State != Active {
		t.Errorf("a refused open changed the session: %+v", now)
	}
	// A stronger tier would be taken if it woke now, but this one is enough.
	if out := c.openTier("sa", "r5", microvm, gvisor); out.Refused != nil || out.Session.State != Active {
		t.Errorf("an open that needs no more than gvisor: %+v", out)
	}
	if out := c.openTier("sa", "r6", microvm, corev1.Tier_TIER_NULL); out.Refused != nil || out.Session.State != Active {
		t.Errorf("an open that says nothing: %+v", out)
	}
}

// TestFaultAnOpenThatIsTooStrongWaitsForTheSleep: a sleep may be called off, back into the weaker tier.
func TestFaultAnOpenThatIsTooStrongWaitsForTheSleep(t *testing.T) {
	const gvisor, microvm = corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_MICROVM
	c := newCell(t)
	c.openTier("sa", "r1", gvisor, gvisor)
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{"sa"}, Reason: "close"}})
	if out := c.openTier("sa", "r2", microvm, microvm); !out.Wait || c.s.Session("sa").Wake != nil {
		t.Fatalf("an open of a weaker session that goes to sleep: %+v", out)
	}
	c.apply(Entry{Slept: &Slept{Ref: c.ref("sa"), Manifest: ManifestInfo{ID: "m1"}}})
	if out := c.openTier("sa", "r2", microvm, microvm); out.Refused != nil || out.Session.Wake.Terms.Tier != microvm {
		t.Errorf("once it sleeps: %+v", out)
	}
}

// TestFaultAWakeThatWaitsStaysInAWeakerTier: an open that joins a wake which is not placed yet raises it.
func TestFaultAWakeThatWaitsStaysInAWeakerTier(t *testing.T) {
	const container, gvisor = corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR
	c := newCell(t)
	c.asleep("sa")
	if out := c.apply(Entry{Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: container, Retention: time.Hour}, Request: "r1",
		StoredAt: Time(c.now), Deadline: Time(c.now + time.Minute), Keys: []ids.SessionKey{"sa"}}}); out.Session.State != Asleep {
		t.Fatalf("placed without a host: %+v", out.Session)
	}
	if out := c.openTier("sa", "r2", gvisor, gvisor); out.Refused != nil || out.Session.State != Waking || out.Session.Wake.Terms.Tier != gvisor {
		t.Errorf("the second open: %+v %+v", out, out.Session.Wake)
	}
}

// TestFaultANotedWakeIsExchangedForAWeakerOne: an open whose own tier is not comparable with that of a
// wake that others wait for leaves theirs and waits; one that needs more raises it, also while the session
// still goes to sleep.
func TestFaultANotedWakeIsExchangedForAWeakerOne(t *testing.T) {
	const container, gvisor, wasm, null = corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_WASM, corev1.Tier_TIER_NULL
	c := newCell(t)
	c.openTier("sa", "r1", gvisor, gvisor)
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	c.apply(Entry{Sleep: &SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{"sa"}, Reason: "close"}})
	c.openTier("sa", "r2", container, null)
	if w := c.s.Session("sa").Wake; w == nil || w.Terms.Tier != container {
		t.Fatalf("the wake that is noted: %+v", w)
	}
	if out := c.openTier("sa", "r3", wasm, wasm); !out.Wait || c.s.Session("sa").Wake.Terms.Tier != container {
		t.Errorf("an open of a module: %+v %+v", out, c.s.Session("sa").Wake)
	}
	if out := c.openTier("sa", "r4", gvisor, gvisor); out.Refused != nil || c.s.Session("sa").Wake.Terms.Tier != gvisor {
		t.Errorf("an open that needs gvisor: %+v %+v", out, c.s.Session("sa").Wake)
	}
	if out := c.openTier("sa", "r5", container, container); out.Refused != nil || c.s.Session("sa").Wake.Terms.Tier != gvisor {
		t.Errorf("an open that needs less lowered the wake: %+v %+v", out, c.s.Session("sa").Wake)
	}
	c.apply(Entry{Slept: &Slept{Ref: c.ref("sa"), Manifest: ManifestInfo{ID: "m1"}}}) // no host is named: it waits
	if out := c.openTier("sa", "r6", wasm, wasm); out.Refused == nil || !strings.Contains(out.Refused.Reason, "waits to wake in tier gvisor") {
		t.Errorf("an open of a module beside a wake that waits: %+v", out)
	}
}

// TestAnEarlierFormatJoinsAsItDid: the log of an earlier version comes to the state that it had.
func TestAnEarlierFormatJoinsAsItDid(t *testing.T) {
	const gvisor, microvm = corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_MICROVM
	c := newCell(t)
	c.openTier("sa", "r1", gvisor, gvisor)
	c.woke("sa", corev1.Origin_ORIGIN_CREATED)
	out := c.apply(Entry{V: vmSince - 1, Open: &Open{Actor: Actor{Tenant: "acme"}, Terms: Terms{Tier: microvm}, Request: "r2",
		StoredAt: Time(c.now), Deadline: Time(c.now + time.Minute), Keys: []ids.SessionKey{"sa"}}})
	if out.Refused != nil {
		t.Errorf("refused: %+v", out.Refused)
	}
}
