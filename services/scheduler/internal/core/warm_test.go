package core

import (
	"slices"
	"strings"
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

// TestWarmNeverBeatsTheDisk: whatever hosts there are, a reservation is asked
// of those alone that are as near to the disk as the best, and changes nothing
// of a candidate but its place, its reservation and one word of its ranks.
func TestWarmNeverBeatsTheDisk(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		named := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) Candidate {
			c := Candidate{Host: ids.Host(rapid.StringMatching(`h[0-9]`).Draw(t, "host"))}
			c.Refused = rapid.SampledFrom([]string{"", "", "is full"}).Draw(t, "refused")
			c.Ranks = rapid.SampledFrom([][]string{nil, {rankDisk, rankImage}, {rankHeld, "2 warm"}, {rankImage}, {"memory 1% used"}}).Draw(t, "ranks")
			return c
		}), 0, 10, func(c Candidate) ids.Host { return c.Host }).Draw(t, "named")
		before := slices.Clone(named)
		hosts := Reservable(named)
		for _, h := range hosts {
			i := slices.IndexFunc(named, func(c Candidate) bool { return c.Host == h })
			first := slices.IndexFunc(named, func(c Candidate) bool { return c.Refused == "" })
			if named[i].Refused != "" || named[i].nearness() != named[first].nearness() {
				t.Fatalf("%s of %v", h, named)
			}
			out := Reserved(named, h, "p1")
			if len(out) != len(named) || out[0].Host != h || out[0].Reservation != "p1" || !slices.Contains(out[0].Ranks, warmReserved) {
				t.Fatalf("%v", out)
			}
		}
		if len(hosts) > MaxCandidates {
			t.Fatalf("%d hosts", len(hosts))
		}
		for i, c := range before {
			if c.Reservation != named[i].Reservation || !slices.Equal(c.Ranks, named[i].Ranks) {
				t.Fatalf("the candidates that were given changed: %v", named)
			}
		}
	})
}

// TestReservationIsBounded: one that is too long, or of a host that is not
// named, is no reservation.
func TestReservationIsBounded(t *testing.T) {
	named := []Candidate{{Host: "h1"}, {Host: "h2", Refused: "is full"}}
	for _, out := range [][]Candidate{Reserved(named, "h1", strings.Repeat("p", maxReservation+1)), Reserved(named, "h2", "p1"),
		Reserved(named, "h3", "p1"), Reserved(named, "h1", "")} {
		if out[0].Host != "h1" || out[0].Reservation != "" {
			t.Errorf("%v", out)
		}
	}
	if name := WarmName(&Terms{Template: "python", Tier: corev1.Tier_TIER_GVISOR}); name != "python/gvisor" {
		t.Errorf("warm ones are counted under %q", name)
	}
}
