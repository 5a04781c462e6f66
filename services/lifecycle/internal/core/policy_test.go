package core

import (
	"strings"
	"testing"
)

// TestPlacementThatNoHostCanMeet: a zone that no host can have and a priority out of bounds are
// refused when the policy is read, not found when a user waits.
func TestPlacementThatNoHostCanMeet(t *testing.T) {
	zones := func(n int) (out []string) {
		for i := range n {
			out = append(out, "z"+strings.Repeat("x", i))
		}
		return out
	}
	for name, c := range map[string]struct {
		change func(*Plan)
		say    string
	}{
		"none":              {func(*Plan) {}, ""},
		"all of it":         {func(p *Plan) { p.Priority, p.Zones, p.MaxAwake = MaxPriority, zones(MaxZones), 1 }, ""},
		"above the highest": {func(p *Plan) { p.Priority = MaxPriority + 1 }, "priority is 101"},
		"an empty zone":     {func(p *Plan) { p.Zones = []string{""} }, "is no zone"},
		"a dot in a zone":   {func(p *Plan) { p.Zones = []string{"eu.1"} }, "is no zone"},
		"capitals":          {func(p *Plan) { p.Zones = []string{"EU"} }, "is no zone"},
		"the same twice":    {func(p *Plan) { p.Zones = []string{"eu", "eu"} }, "is there twice"},
		"too many":          {func(p *Plan) { p.Zones = zones(MaxZones + 1) }, "at most 16"},
	} {
		p := testPolicy()
		plan := p.Plans["free"]
		c.change(&plan)
		p.Plans["free"] = plan
		err := p.Validate()
		switch {
		case c.say == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.say == "":
		case err == nil:
			t.Errorf("%s: it was taken", name)
		case !strings.Contains(err.Error(), `plan "free"`) || !strings.Contains(err.Error(), c.say) || strings.Contains(err.Error(), "\n"):
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestRatesAndOpenFilesOfAPlanHold: a limit that the template leaves out is the plan's, and the lower
// one counts where both say something.
func TestRatesAndOpenFilesOfAPlanHold(t *testing.T) {
	for _, c := range []struct{ template, plan, want uint64 }{{0, 0, 0}, {0, 1 << 30, 1 << 30}, {1 << 30, 0, 1 << 30}, {2 << 30, 1 << 30, 1 << 30}, {1 << 30, 2 << 30, 1 << 30}} {
		got := capped(Limits{DiskBytesPerSecond: c.template, DiskOpsPerSecond: c.template, OpenFiles: c.template},
			Limits{DiskBytesPerSecond: c.plan, DiskOpsPerSecond: c.plan, OpenFiles: c.plan})
		if got.GetDiskBytesPerSecond() != c.want || got.GetDiskOpsPerSecond() != c.want || got.GetOpenFiles() != c.want {
			t.Errorf("template %d, plan %d: %v", c.template, c.plan, got)
		}
	}
	for name, change := range map[string]func(*Limits){
		"disk_bytes_per_second is 1": func(l *Limits) { l.DiskBytesPerSecond = 1 },
		"disk_ops_per_second is 1":   func(l *Limits) { l.DiskOpsPerSecond = 1 },
		"open_files is 3":            func(l *Limits) { l.OpenFiles = 3 },
		"open_files is 99999999":     func(l *Limits) { l.OpenFiles = 99999999 },
	} {
		p := testPolicy()
		plan, template := p.Plans["free"], p.Templates["quick"]
		change(&plan.Limits)
		p.Plans["free"] = plan
		if err := p.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("in the plan: %v, want %s", err, name)
		}
		p = testPolicy()
		change(&template.Limits)
		p.Templates["quick"] = template
		if err := p.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("in the template: %v, want %s", err, name)
		}
	}
}
