package core

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

const fleetHosts, fleetSessions = 1000, 100_000

var fleet = sync.OnceValues(func() (*State, uint64) { return Fill(fleetHosts, fleetSessions) })

// advice is what a leader knows of 1,000 hosts.
func advice() func(ids.Host) HostFacts {
	facts := map[ids.Host]HostFacts{}
	for i := range fleetHosts {
		images := map[string]bool{fillImage: i%2 == 0}
		warm := map[string]uint32{"python": uint32(i % 3)}
		facts[FillHost(i)] = HostFacts{Alive: true, Images: func(r string) bool { return images[r] }, Warm: func(t string) uint32 { return warm[t] }}
	}
	return func(h ids.Host) HostFacts { return facts[h] }
}

// BenchmarkPlacement1000Hosts100kSessions ranks the hosts for a sleeping
// session, commits the open and the answer of the host: one placement.
func BenchmarkPlacement1000Hosts100kSessions(b *testing.B) {
	s, index := fleet()
	s = s.Clone()
	facts, n := advice(), 0
	for b.Loop() {
		i := (n * 7919) % fleetSessions
		k := FillKey(i)
		sess := s.Session(k)
		o := FillOpen(i, fmt.Sprintf("b%025d", n), nil)
		o.Candidates = s.Rank(sess, o.Terms, facts)
		index++
		out := s.Apply(index, Entry{Now: Time(index), Open: o})
		if sess.State == Asleep && (out.Session == nil || out.Session.State != Waking) {
			b.Fatalf("not placed: %+v, %+v", out, out.Session)
		}
		if out.Session.State == Waking {
			index++
			s.Apply(index, Entry{Now: Time(index), Woke: &Woke{Ref: Ref{k, out.Session.Generation, out.Session.Epoch}, Origin: corev1.Origin_ORIGIN_RESUMED}})
		}
		if n++; n%1000 == 0 {
			index++
			s.Apply(index, Entry{Now: Time(index), Trim: &Trim{Upto: s.OutSeq}})
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "placements/s")
}

// heapOf is the memory that what f returns takes.
func heapOf(f func() *State) (uint64, *State) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&before)
	s := f()
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return after.HeapAlloc - min(before.HeapAlloc, after.HeapAlloc), s
}

// BenchmarkSleepingSessionBytes is the memory of one sleeping session, as
// entries made it and after a restore.
func BenchmarkSleepingSessionBytes(b *testing.B) {
	for b.Loop() {
		n, s := heapOf(func() *State { s, _ := Fill(fleetHosts, fleetSessions); return s })
		b.ReportMetric(float64(n)/fleetSessions, "bytes/session")
		raw := dump(b, s)
		n, r := heapOf(func() *State {
			r, err := ReadState(bytes.NewReader(raw))
			if err != nil {
				b.Fatal(err)
			}
			return r
		})
		b.ReportMetric(float64(n)/fleetSessions, "restored-bytes/session")
		runtime.KeepAlive(raw)
		runtime.KeepAlive(s)
		runtime.KeepAlive(r)
	}
}

// TestSleepingSessionStaysSmall: a sleeping session takes less than 1 KiB, also
// after a restore.
func TestSleepingSessionStaysSmall(t *testing.T) {
	const sessions = 5000
	n, s := heapOf(func() *State { s, _ := Fill(10, sessions); return s })
	raw := dump(t, s)
	m, r := heapOf(func() *State {
		r, err := ReadState(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		return r
	})
	runtime.KeepAlive(raw)
	runtime.KeepAlive(s)
	runtime.KeepAlive(r)
	if n/sessions >= 1024 || m/sessions >= 1024 {
		t.Errorf("%d bytes, %d after a restore", n/sessions, m/sessions)
	}
	t.Logf("%d bytes, %d after a restore", n/sessions, m/sessions)
}

func BenchmarkSnapshot100k(b *testing.B) {
	s, _ := fleet()
	for b.Loop() {
		var w bytes.Buffer
		if _, err := s.WriteTo(&w); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(w.Len())/(1<<20), "MiB")
	}
}

func BenchmarkRestore100k(b *testing.B) {
	s, _ := fleet()
	raw := dump(b, s)
	for b.Loop() {
		if _, err := ReadState(bytes.NewReader(raw)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkHostLost is the loss of a host of 1,000, of whose sessions 100 are awake.
func BenchmarkHostLost(b *testing.B) {
	base, index := fleet()
	base = base.Clone()
	for i := range 100 {
		k := FillKey(i * fleetHosts)
		index++
		out := base.Apply(index, Entry{Now: 1, Open: FillOpen(i*fleetHosts, "lost", []Candidate{{Host: FillHost(0)}})})
		index++
		base.Apply(index, Entry{Now: 1, Woke: &Woke{Ref: Ref{k, out.Session.Generation, out.Session.Epoch}, Origin: corev1.Origin_ORIGIN_RESUMED}})
	}
	h := base.Host(FillHost(0))
	for b.Loop() {
		b.StopTimer()
		s := base.Clone()
		b.StartTimer()
		s.Apply(index+1, Entry{Now: 2, HostLost: &HostLost{Host: h.ID, Boot: h.Boot}})
		s.Apply(index+2, Entry{Now: 3, Join: h})
	}
}
