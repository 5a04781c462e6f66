package hostagent

import (
	"context"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/null"
)

// TestALateDriverClaimsOnceItIsOpen: before that its tier has nothing warm, and says why.
func TestALateDriverClaimsOnceItIsOpen(t *testing.T) {
	opened := make(chan struct{})
	l := openLate([]driver.Tier{driver.Null}, driver.Capabilities{Warm: true}, func(context.Context) (driver.Driver, error) {
		<-opened
		return null.Open(null.Config{Dir: t.TempDir()})
	})
	limits := driver.Limits{CPUMillis: 1000, MemoryBytes: 64 << 20, PIDs: 64}
	w := driver.WarmSpec{ID: ids.NewWarmID(), Tier: driver.Null, Limits: limits}
	one := ids.Epoch{Incarnation: 1, Index: 1}
	spec := w.Spec(ids.DeriveSessionKey([]byte("k"), t.Name(), "t", "ann", "default"), ids.Generation(one), one)
	if _, err := l.Prepare(t.Context(), w); !errs.Is(err, errkind.Unimplemented) {
		t.Errorf("prepare before it is open: %v", err)
	}
	if _, err := l.Claim(t.Context(), w.ID, spec); !errs.Is(err, errkind.NotFound) {
		t.Errorf("claim before it is open: %v", err)
	}
	if l.Fits(w, spec) == "" {
		t.Error("it fits before it is open")
	}
	close(opened)
	<-l.done
	if _, err := l.Prepare(t.Context(), w); err != nil || l.Fits(w, spec) != "" {
		t.Fatalf("prepare: %v, fits: %q", err, l.Fits(w, spec))
	}
	sb, err := l.Claim(t.Context(), w.ID, spec)
	if err != nil || sb.ID != w.ID || sb.Session != spec.Session {
		t.Errorf("claim: %+v, %v", sb, err)
	}
	if err := l.Stop(t.Context(), sb.ID); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
