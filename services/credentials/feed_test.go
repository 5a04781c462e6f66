package credentials

import (
	"fmt"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/credentials/internal/core"
)

// deleting is a service that heard of so many deleted sessions lately.
func deleting(t testing.TB, n int) *service {
	t.Helper()
	s := &service{state: core.NewState(core.Policy{}), feed: "f", seq: 1}
	var err error
	if s.box, err = seal.RandomBox(); err != nil {
		t.Fatal(err)
	}
	began := time.Unix(1_800_000_000, 0)
	for i := range n {
		key := ids.DeriveSessionKey([]byte("k"), "https://idp", "acme", fmt.Sprint(i), "default")
		s.state.Revoked[core.Generation{Tenant: "acme", Session: key, Generation: ids.Generation{Incarnation: 1, Index: uint64(i + 1)}}] = began.Add(time.Duration(i/4) * time.Second)
	}
	return s
}

// Each deleted session changes what hosts are told, and all of them ask: 30 a second for a quarter of an hour.
func BenchmarkTellingHostsWhatWasDeleted(b *testing.B) {
	s := deleting(b, 27000)
	for b.Loop() {
		s.all("")
	}
}

// TestHostsAreToldWhatWasDeletedLastHoweverMuchWas: the latest of many, the last one first, and of a frontend's
// own tenant alone.
func TestHostsAreToldWhatWasDeletedLastHoweverMuchWas(t *testing.T) {
	for _, n := range []int{0, 1, maxTold - 1, maxTold, 2 * maxTold, 2*maxTold + 1, 9 * maxTold} {
		s := deleting(t, n)
		told := s.all("").GetRevoked()
		if len(told) != min(n, maxTold) {
			t.Fatalf("of %d, %d are told", n, len(told))
		}
		for i, g := range told {
			if oldest := max(n-maxTold, 0) / 4 * 4; int(g.GetGeneration().GetIndex()) <= oldest {
				t.Errorf("of %d, the one of index %d is told", n, g.GetGeneration().GetIndex())
			}
			if i > 0 && g.GetUntil().AsTime().After(told[i-1].GetUntil().AsTime()) {
				t.Errorf("of %d, number %d is later than the one before it", n, i)
			}
		}
		if other := s.all("globex").GetRevoked(); len(other) != 0 {
			t.Errorf("another tenant is told of %d", len(other))
		}
	}
}
