package containerd

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// BenchmarkClaim measures, turn by turn on the same machine, Claim beside a cold Create, each also until
// the first answer on the channel. It prints medians; what was made is stopped, and its disk taken off at
// once, outside of the measure.
func BenchmarkClaim(b *testing.B) {
	h := newHost(b)
	d := openDriver(b, h)
	for _, tier := range h.cfg.Tiers {
		if _, ok := warmTiers[tier]; !ok {
			continue
		}
		b.Run(string(tier), func(b *testing.B) {
			m := &measure{h: h, d: d, took: map[string][]time.Duration{}}
			for n := range b.N {
				m.turn(b, "cold", h.Spec(b, 2*n+1, 1), tier)
				m.turn(b, "warm", h.Spec(b, 2*n+2, 1), tier)
			}
			b.ReportMetric(0, "ns/op") // of both together: says nothing
			for what, d := range m.took {
				b.ReportMetric(float64(median(d).Microseconds())/1000, what+"-ms")
			}
		})
	}
}

// measure is what BenchmarkClaim collects.
type measure struct {
	h    *host
	d    *Driver
	took map[string][]time.Duration
}

func (m *measure) note(what string, began time.Time) {
	m.took[what] = append(m.took[what], time.Since(began))
}

// turn makes one sandbox, cold or warm, and removes it.
func (m *measure) turn(b *testing.B, how string, spec driver.Spec, tier driver.Tier) {
	b.Helper()
	spec.Tier = tier
	w := warmFor(spec, tier)
	start := func() (driver.Sandbox, error) { return m.d.Create(b.Context(), spec) }
	began := time.Now()
	if how == "warm" {
		if _, err := m.d.Prepare(b.Context(), w); err != nil {
			b.Fatal(err)
		}
		m.note("prepare", began)
		start = func() (driver.Sandbox, error) { return m.d.Claim(b.Context(), w.ID, spec) }
	}
	began = time.Now()
	sb, err := start()
	if err != nil {
		b.Fatal(err)
	}
	m.note(how, began)
	for _, s := range sb.Steps {
		m.took[how+"-"+s.Name] = append(m.took[how+"-"+s.Name], s.Took)
	}
	k, err := drivertest.Open(sb.Channel)
	if err != nil {
		b.Fatal(err)
	}
	defer k.Close()
	if sb.Enter != "" {
		if _, err := k.Do("enter", sb.Enter); err != nil {
			b.Fatal(err)
		}
	}
	if _, err := k.Do("echo", "x"); err != nil {
		b.Fatal(err)
	}
	m.note(how+"-answer", began)
	began = time.Now()
	if err := m.d.Stop(b.Context(), sb.ID); err != nil {
		b.Fatal(err)
	}
	m.note(how+"-stop", began)
	if err := m.h.disks.Detach(b.Context(), disk.Key{Session: spec.Session, Generation: spec.Generation}); err != nil {
		b.Errorf("%s: the disk is held after Stop: %v", how, err)
	}
}
