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
