package core

import (
	"fmt"
	"slices"
	"strings"
	"time"

	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
)

// NewSpec reads a declared pool. zone finds a time zone by its name. What the file's reader lets pass is
// not checked again, but for what would break a decision.
func NewSpec(s *poolv1.Spec, zone func(string) (*time.Location, error)) (Spec, error) {
	out := Spec{Template: s.GetTemplate(), Tier: s.GetTier(), Minimum: int(s.GetMinimum()), Ratio: s.GetRatio(),
		Ceiling: int(s.GetCeiling()), InFlight: max(1, int(s.GetInFlight())), MaxAge: s.GetMaxAge().AsDuration(),
		Wait: s.GetWait().AsDuration(), Share: s.GetShare(), Zones: slices.Clone(s.GetZones())}
	if out.Template == "" {
		return Spec{}, fmt.Errorf("the pool names no template")
	}
	if !(out.Ratio >= 0) || !(out.Share > 0 && out.Share <= 1) || out.MaxAge <= 0 || out.Wait < 0 {
		return Spec{}, fmt.Errorf("the pool of %s has a ratio of %v, a share of %v, a max_age of %s and a wait of %s", out.Template, out.Ratio, out.Share, out.MaxAge, out.Wait)
	}
	for _, sc := range s.GetSchedule() {
		slot := Slot{From: int(sc.GetFrom()), To: int(sc.GetTo()), Minimum: int(sc.GetMinimum()), Zone: time.UTC}
		for _, d := range sc.GetDays() {
			slot.Days = append(slot.Days, time.Weekday(d%7))
		}
		if name := sc.GetTimeZone(); name != "" {
			var err error
			if slot.Zone, err = zone(name); err != nil {
				return Spec{}, fmt.Errorf("the pool of %s: there is no time zone %q", out.Template, name)
			}
		}
		out.Schedule = append(out.Schedule, slot)
	}
	return out, nil
}

// applies reports whether the slot holds at a time. One that goes past midnight belongs to the day on
// which it begins.
func (s Slot) applies(now time.Time) bool {
	t := now.In(s.Zone)
	minute, day := t.Hour()*60+t.Minute(), t.Weekday()
	if s.From < s.To {
		return s.on(day) && minute >= s.From && minute < s.To
	}
	return s.on(day) && minute >= s.From || s.on((day+6)%7) && minute < s.To
}

func (s Slot) on(d time.Weekday) bool { return len(s.Days) == 0 || slices.Contains(s.Days, d) }

// String is the slot in the words of the file.
func (s Slot) String() string {
	days := "every day"
	if len(s.Days) > 0 {
		var names []string
		for _, d := range s.Days {
			names = append(names, strings.ToLower(d.String()[:3]))
		}
		days = strings.Join(names, ",")
	}
	return fmt.Sprintf("%s %02d:%02d-%02d:%02d %s", days, s.From/60, s.From%60, s.To/60, s.To%60, s.Zone)
}
