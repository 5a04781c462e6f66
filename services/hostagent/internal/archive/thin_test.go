package archive

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func past(n int, at time.Time) Info {
	return Info{ID: idOf([20]byte{byte(n), byte(n >> 8)}), TakenAt: at}
}

// year saves at a steady pace and returns the history, newest first.
func steady(n int, every time.Duration, keep Keep) ([]Info, time.Time) {
	var history []Info
	at, clock := day0, day0
	for i := range n {
		at = at.Add(every)
		clock = tick(clock, at)
		history = thin(history, clock, at, keep)
		history = append([]Info{past(i, at)}, history...)
	}
	return history, at
}

func TestThinningKeepsMinutesHoursAndDays(t *testing.T) {
	history, now := steady(60*24*40, time.Minute, defaults)
	minutes, hours, days := 0, map[time.Time]bool{}, map[time.Time]bool{}
	for _, h := range history {
		switch age := now.Sub(h.TakenAt); {
		case age < time.Hour:
			minutes++
		case age < 24*time.Hour:
			hours[h.TakenAt.Truncate(time.Hour)] = true
			if h.TakenAt.Minute() != 59 {
				t.Errorf("%s is not the last of its hour", h.TakenAt)
			}
		default:
			days[h.TakenAt.Truncate(24*time.Hour)] = true
			if h.TakenAt.Hour() != 23 || h.TakenAt.Minute() != 59 {
				t.Errorf("%s is not the last of its day", h.TakenAt)
			}
		}
	}
	if minutes != 60 || len(hours) != 23 || len(days) != 29 || len(history) > 113 {
		t.Fatalf("%d minutes, %d hours, %d days, %d in all", minutes, len(hours), len(days), len(history))
	}
}

// TestClockThatJumpedKeepsHistory: years forward and back again, at any moment.
func TestClockThatJumpedKeepsHistory(t *testing.T) {
	before, now := steady(60*24*31, time.Minute, defaults)
	history, clock := before, now
	wrong := now.Add(10 * 365 * 24 * time.Hour)
	for i := range 20 {
		at := wrong.Add(time.Duration(i) * time.Minute)
		clock = tick(clock, at)
		history = append([]Info{past(50000+i, at)}, thin(history, clock, at, defaults)...)
	}
	old := 0
	for _, h := range before {
		if now.Sub(h.TakenAt) >= 24*time.Hour && slices.Contains(history, h) {
			old++
		}
	}
	if old < 20 {
		t.Fatalf("only %d of the days before are left after 20 snapshots at a wrong time", old)
	}
	at := now.Add(time.Hour)
	clock = tick(clock, at)
	if after := thin(history, clock, at, defaults); len(after) < len(history)-maxDrops {
		t.Fatal("too much was dropped when the clock was set right")
	} else if !slices.Contains(after, history[15]) {
		t.Fatal("a snapshot of the future was dropped")
	}
	if c := tick(day0, day0.Add(-time.Hour)); !c.Equal(day0.Add(-time.Hour)) {
		t.Fatal("a clock that went back is followed")
	}
}

// TestThinIsBounded: whatever the times are, a snapshot drops at most maxDrops others, never one of
// the newest, never one from the future, and keeps the order.
func TestThinIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 60).Draw(t, "n")
		var history []Info
		for i := range n {
			history = append(history, past(i, day0.Add(time.Duration(rapid.Int64Range(-1e6, 1e6).Draw(t, "at"))*time.Minute)))
		}
		dur := func(what string) time.Duration {
			return time.Duration(rapid.Int64Range(0, 1e5).Draw(t, what)) * time.Minute
		}
		keep := Keep{dur("all"), dur("hourly"), dur("daily")}
		clock := day0.Add(time.Duration(rapid.Int64Range(-1e6, 1e6).Draw(t, "clock")) * time.Minute)
		kept := thin(history, clock, clock, keep)
		if len(history)-len(kept) > maxDrops {
			t.Fatalf("%d were dropped", len(history)-len(kept))
		}
		at := 0
		for i, h := range history {
			if at < len(kept) && kept[at] == h {
				at++
				continue
			}
			if i < keepNewest || !h.TakenAt.Before(clock) || clock.Sub(h.TakenAt) < keep.All {
				t.Fatalf("number %d of %s was dropped", i, h.TakenAt)
			}
		}
		if at != len(kept) {
			t.Fatal("the order changed")
		}
	})
	long := make([]Info, maxHistory+50)
	for i := range long {
		long[i] = past(i, day0)
	}
	if got := thin(long, day0, day0, Keep{}); len(got) != maxHistory || got[0] != long[0] {
		t.Fatalf("%d entries", len(got))
	}
}

// TestAFloodOfCheckpointsKeepsTheDays: a program that asks for a checkpoint every second must not push
// a month of snapshots out of a history that has no room for all of them.
func TestAFloodOfCheckpointsKeepsTheDays(t *testing.T) {
	history, now := steady(60*24*31, time.Minute, defaults)
	clock := now
	for i := range 2 * maxHistory {
		now = now.Add(time.Second)
		clock = tick(clock, now)
		history = append([]Info{past(50000+i, now)}, thin(history, clock, now, defaults)...)
	}
	days, hours := map[time.Time]bool{}, map[time.Time]bool{}
	for _, h := range history {
		if age := now.Sub(h.TakenAt); age > 24*time.Hour {
			days[h.TakenAt.Truncate(24*time.Hour)] = true
		} else {
			hours[h.TakenAt.Truncate(time.Hour)] = true
		}
	}
	if len(days) < 29 || len(hours) < 23 || len(history) > maxHistory+1 {
		t.Fatalf("%d days and %d hours are left, %d snapshots in all", len(days), len(hours), len(history))
	}
	if got := now.Sub(history[500].TakenAt); got != 500*time.Second {
		t.Errorf("the newest were dropped: the 500th is %s old", got)
	}
}
