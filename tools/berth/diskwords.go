package main

import (
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

// isSnapshot reports whether s may name a snapshot: an id, the beginning of one, or the head.
func isSnapshot(s string) bool {
	return s == "head" || s == "current" || len(s) >= 4 && s[0] == 'm' && ids.IsToken(s)
}

// Layouts of a time of this machine's zone.
var localLayouts = []string{"2006-01-02 15:04:05", "2006-01-02 15:04", "2006-01-02T15:04:05", "2006-01-02T15:04", "2006-01-02"}

// maxAgo is how far back a time may lie; more is a slip.
const maxAgo = 100 * 365 * 24 * time.Hour

// parseWhen reads a time, or a duration as so long ago.
func parseWhen(s string, now time.Time) (time.Time, error) {
	at, ok := time.Time{}, false
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		at, ok = t, true
	}
	for _, layout := range localLayouts {
		if t, err := time.ParseInLocation(layout, s, now.Location()); !ok && err == nil {
			at, ok = t, true
		}
	}
	if !ok {
		ago, err := parseAgo(s)
		if err != nil {
			return at, usage("%.60q is no time; write it like 2026-11-29T14:05:00Z, \"2026-11-29 14:05\" or, for ten minutes ago, 10m", s)
		}
		at = now.Add(-ago)
	}
	switch {
	case at.After(now):
		return at, usage("%s is in the future", when(at))
	case now.Sub(at) > maxAgo:
		return at, usage("%s is too long ago", when(at))
	}
	return at, nil
}

// parseAgo reads a duration; besides what Go reads it knows whole days, as in 3d.
func parseAgo(s string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		if err != nil {
			return 0, err
		}
		return time.Duration(n) * 24 * time.Hour, nil
	}
	d, err := time.ParseDuration(s)
	if err == nil && d < 0 {
		return 0, strconv.ErrRange
	}
	return d, err
}

var sizeUnits = []struct {
	name  string
	bytes uint64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}}

// maxSize is more than any file system takes.
const maxSize = 1 << 60

// parseSize reads a whole number with a unit, such as 8GiB. Units of 1000 are refused rather than
// guessed at.
func parseSize(s string) (uint64, error) {
	for _, u := range sizeUnits {
		digits, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 64)
		if err != nil || strings.HasPrefix(digits, "+") {
			break
		}
		if n == 0 || n > maxSize/u.bytes {
			return 0, usage("%s is no size that a disk can have", s)
		}
		return n * u.bytes, nil
	}
	return 0, usage("%.60q is no size; write a whole number and KiB, MiB, GiB or TiB, for example 8GiB", s)
}

// when writes a time as it can be given to --at.
func when(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// age writes how old something is, in its largest unit.
func age(d time.Duration) string {
	switch d = max(d, 0); {
	case d < time.Minute:
		return strconv.Itoa(int(d/time.Second)) + " s"
	case d < time.Hour:
		return strconv.Itoa(int(d/time.Minute)) + " min"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d/time.Hour)) + " h"
	}
	return strconv.Itoa(int(d/(24*time.Hour))) + " days"
}

func verb(n int, one, more string) string {
	if n == 1 {
		return one
	}
	return more
}

// time is now.
func (a *app) time() time.Time {
	if a.now != nil {
		return a.now()
	}
	return time.Now()
}
