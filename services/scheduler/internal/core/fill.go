package core

import (
	"fmt"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Fill is a cell for measurements: so many hosts, and so many sessions that
// sleep with a saved disk, came about by the entries that a real one takes. It
// also returns the index of the last entry.
func Fill(hosts, sessions int) (*State, uint64) {
	s, index := NewState(), uint64(0)
	apply := func(e Entry) {
		index++
		e.Now = Time(index)
		s.Apply(index, reread(e))
	}
	for i := range hosts {
		apply(Entry{Join: &Host{ID: FillHost(i), Boot: fmt.Sprintf("boot-%d", i), Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_CONTAINER},
			Capacity: Limits{MemoryBytes: 256 << 30, CPUMillis: 64000, PIDs: 1 << 20, DiskBytes: 4 << 40}, CPUPercent: 400, PIDsPercent: 400, DiskPercent: 400, Zone: fmt.Sprintf("zone-%d", i%3)}})
	}
	for i := range sessions {
		if hosts == 0 {
			break
		}
		k, h := FillKey(i), FillHost(i%hosts)
		apply(Entry{Open: FillOpen(i, fmt.Sprintf("r%025d", i), []Candidate{{Host: h}})})
		v := s.Session(k)
		ref := Ref{k, v.Generation, v.Epoch}
		apply(Entry{Woke: &Woke{Ref: ref, Origin: corev1.Origin_ORIGIN_CREATED, ImageDigest: fillImage, Timing: fillTiming()}})
		apply(Entry{Sleep: &SleepCmd{Tenant: v.Tenant, Keys: []ids.SessionKey{k}, Reason: "idle"}})
		apply(Entry{Slept: &Slept{Ref: ref, Manifest: ManifestInfo{ID: fmt.Sprintf("m%032d", i), ImageDigest: fillImage}}})
		if i%1000 == 999 {
			apply(Entry{Trim: &Trim{Upto: s.OutSeq}})
			apply(Entry{Tick: &Tick{Elapsed: MaxTick}})
		}
	}
	apply(Entry{Trim: &Trim{Upto: s.OutSeq}})
	for range 3 {
		apply(Entry{Tick: &Tick{Elapsed: MaxTick}}) // requests are forgotten
	}
	return s, index
}

const fillImage = "sha256:7b2f4b6b1a0e5f5c2c9e0b4a1f3d8e6c5b4a39281706f5e4d3c2b1a098765432"

// FillHost is the id of a host of Fill.
func FillHost(i int) ids.Host { return ids.Host(fmt.Sprintf("host-%d", i)) }

// FillKey is the key of a session of Fill.
func FillKey(i int) ids.SessionKey { return ids.SessionKey(fmt.Sprintf("s%052d", i)) }

// FillOpen opens a session of Fill.
func FillOpen(i int, request string, named []Candidate) *Open {
	return &Open{
		Actor: Actor{Tenant: ids.Tenant(fmt.Sprintf("tenant-%d", i%20)), Issuer: "https://issuer.example/realms/main", Subject: fmt.Sprintf("user-%08d@example.org", i), Frontend: "web"},
		Terms: Terms{Plan: "standard", Template: "python", Tier: corev1.Tier_TIER_GVISOR, Limits: Limits{MemoryBytes: 512 << 20, CPUMillis: 500, PIDs: 256, DiskBytes: 4 << 30},
			Idle: 15 * time.Minute, Retention: 720 * time.Hour, Image: "registry.example/python:3.13", TierReason: "the plan names it", Priority: 50, MaxAwake: 1 << 20},
		Request: ids.RequestID(request), Hash: make([]byte, 32), Name: "default", Cause: corev1.Cause_CAUSE_RESUME,
		Keys: []ids.SessionKey{FillKey(i)}, Candidates: named,
	}
}

// reread gives every entry memory of its own, as the log does.
func reread(e Entry) Entry {
	b, err := e.Encode()
	if err == nil {
		e, err = DecodeEntry(b)
	}
	if err != nil {
		panic(err) // an entry of ours can be written and read
	}
	return e
}

func fillTiming() Timing {
	t := Timing{Total: 80 * time.Millisecond}
	for i := range 12 {
		t.Steps = append(t.Steps, Step{Name: fmt.Sprintf("host.step_%d", i), Start: time.Duration(i) * 6e6, Took: 6e6})
	}
	return t
}
