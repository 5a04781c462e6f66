package core

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// large is a cell of n sessions, each with six remembered requests.
func large(n int) *State {
	s := NewState()
	s.Apply(1, Entry{Join: &Host{ID: "h1", Boot: "b1", Tiers: []corev1.Tier{corev1.Tier_TIER_GVISOR}, Capacity: Limits{MemoryBytes: 1 << 50}}})
	index := uint64(1)
	for i := range n {
		key := ids.SessionKey(fmt.Sprintf("s%052d", i))
		for r := range 6 {
			index++
			s.Apply(index, Entry{Now: 1, Open: &Open{Actor: Actor{Tenant: "acme", Issuer: "https://issuer.example", Subject: fmt.Sprint("user-", i)},
				Terms: Terms{Tier: corev1.Tier_TIER_GVISOR, Limits: Limits{MemoryBytes: 1 << 28}, Idle: time.Minute}, Request: ids.RequestID(fmt.Sprintf("r%025d", r)),
				Hash: make([]byte, 32), Keys: []ids.SessionKey{key}, Candidates: named("h1"), Alive: []ids.Host{"h1"}}})
			index++
			v := s.Session(key)
			s.Apply(index, Entry{Now: 1, Woke: &Woke{Ref: Ref{key, v.Generation, v.Epoch}, Origin: 1}})
		}
		s.Apply(index, Entry{Trim: &Trim{Upto: s.OutSeq}})
	}
	return s
}

// BenchmarkFreeze is how long entries stop for a snapshot; BenchmarkSnapshot
// and BenchmarkRestore go on beside them or before them.
func BenchmarkFreeze(b *testing.B) {
	s := large(50_000)
	for b.Loop() {
		s.Freeze()
	}
}

func BenchmarkSnapshot(b *testing.B) {
	s := large(50_000)
	for b.Loop() {
		var w bytes.Buffer
		if _, err := s.WriteTo(&w); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(w.Len())/(1<<20), "MiB")
	}
}

func BenchmarkRestore(b *testing.B) {
	var w bytes.Buffer
	if _, err := large(50_000).WriteTo(&w); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := ReadState(bytes.NewReader(w.Bytes())); err != nil {
			b.Fatal(err)
		}
	}
}
