package archive

import (
	"slices"
	"time"
)

// A host's clock may jump. So that no jump throws history away, whatever it is:
//   - age is measured by a clock of the manifests' own, which follows the host's clock but moves
//     forward by at most maxStep a snapshot: what is younger than D outlives at least D/maxStep
//     snapshots taken at a wrong time;
//   - what was taken after that clock stays;
//   - a snapshot drops at most maxDrops others, the oldest, and never one of the keepNewest.
//
// Only the bound of maxHistory is above these: what is not the last of its hour goes first, for it is
// there once more than its hour needs, and then the oldest.
const (
	maxStep    = 6 * time.Hour
	maxDrops   = 8
	keepNewest = 10
)

// tick moves the manifests' own clock.
func tick(before, taken time.Time) time.Time {
	if limit := before.Add(maxStep); taken.After(limit) {
		return limit
	}
	return taken
}

// thin returns what stays of a history, newest first, under a manifest that is newer than all of it.
func thin(history []Info, clock, taken time.Time, keep Keep) []Info {
	type slot struct {
		span time.Duration
		at   time.Time
	}
	const day = 24 * time.Hour
	// The zero time is a midnight in UTC, so Truncate gives hours and days of UTC.
	seen := map[slot]bool{{time.Hour, taken.Truncate(time.Hour)}: true, {day, taken.Truncate(day)}: true}
	var gone []int
	lasts := map[string]bool{} // of an hour
	for i, past := range history {
		age := clock.Sub(past.TakenAt)
		hour, today := slot{time.Hour, past.TakenAt.Truncate(time.Hour)}, slot{day, past.TakenAt.Truncate(day)}
		stays := i < keepNewest || age <= 0 || age < keep.All ||
			age < keep.Hourly && !seen[hour] || age < keep.Daily && !seen[today]
		if !stays {
			gone = append(gone, i)
			continue
		}
		lasts[past.ID] = !seen[hour]
		seen[hour], seen[today] = true, true
	}
	kept := slices.Clone(history)
	for n := len(gone) - 1; n >= 0 && n >= len(gone)-maxDrops; n-- {
		kept = slices.Delete(kept, gone[n], gone[n]+1)
	}
	for i := len(kept) - 1; i >= keepNewest && len(kept) > maxHistory; i-- {
		if !lasts[kept[i].ID] {
			kept = slices.Delete(kept, i, i+1)
		}
	}
	return kept[:min(len(kept), maxHistory)]
}

// after fills in what a new manifest takes from its parent, which may be nil.
func (h *header) after(parent *Index, meta Meta) {
	h.info.Epoch, h.info.TakenAt = meta.Epoch, meta.TakenAt.Truncate(time.Millisecond).UTC()
	h.clock = h.info.TakenAt
	if parent == nil {
		return
	}
	h.info.Parent = parent.info.ID
	h.info.VMWritten = h.info.VMWritten || parent.info.VMWritten
	h.clock = tick(parent.clock, h.info.TakenAt)
	h.history = thin(append([]Info{parent.info}, parent.history...), h.clock, h.info.TakenAt, meta.Keep)
}
