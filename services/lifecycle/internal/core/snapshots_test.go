package core

import (
	"strings"
	"testing"
	"time"

	"gopkg.in/yaml.v3"
)

// TestSnapshotsThatMakeNoSense: each is refused in one sentence that names the plan and the field.
func TestSnapshotsThatMakeNoSense(t *testing.T) {
	base := DefaultSnapshots()
	for name, c := range map[string]struct {
		change func(*Snapshots)
		say    string
	}{
		"too often":           {func(s *Snapshots) { s.Every = 4999 * time.Millisecond }, "snapshots.every"},
		"negative":            {func(s *Snapshots) { s.Every = -time.Second }, "snapshots.every"},
		"hardly ever":         {func(s *Snapshots) { s.Every = 25 * time.Hour }, "snapshots.every"},
		"negative keep_all":   {func(s *Snapshots) { s.KeepAll = -1 }, "snapshots.keep_all"},
		"negative hourly":     {func(s *Snapshots) { s.KeepHourly = -time.Hour }, "snapshots.keep_hourly"},
		"for ever":            {func(s *Snapshots) { s.KeepDaily = 1 << 62 }, "snapshots.keep_daily"},
		"too many of them":    {func(s *Snapshots) { s.Every, s.KeepAll = 5*time.Second, 720*time.Hour }, "snapshots.keep_all"},
		"many weeks of hours": {func(s *Snapshots) { s.KeepHourly = 1001 * time.Hour }, "snapshots.keep_hourly"},
		"three years of days": {func(s *Snapshots) { s.KeepDaily = 3 * 365 * 24 * time.Hour }, "snapshots.keep_daily"},
		"two years of days":   {func(s *Snapshots) { s.KeepDaily = 2 * 365 * 24 * time.Hour }, ""},
		"all for ever":        {func(s *Snapshots) { s.KeepAll = MostKept + 1 }, "snapshots.keep_all"},
		"hourly for ever":     {func(s *Snapshots) { s.KeepHourly = MostKept + 1 }, "snapshots.keep_hourly"},
		"good":                {func(*Snapshots) {}, ""},
		"off and none kept":   {func(s *Snapshots) { *s = Snapshots{} }, ""},
		"the least interval":  {func(s *Snapshots) { s.Every = LeastEvery }, ""},
	} {
		s := base
		c.change(&s)
		p := testPolicy()
		plan := p.Plans["free"]
		plan.Snapshots = &s
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

// TestSnapshotsLeftOut: a key that a file leaves out has its default, one that is 0 stays 0.
func TestSnapshotsLeftOut(t *testing.T) {
	some := DefaultSnapshots()
	some.Every, some.KeepDaily = 5*time.Minute, 0
	for text, want := range map[string]Snapshots{
		"template: x":                            DefaultSnapshots(),
		"snapshots: ":                            DefaultSnapshots(),
		"snapshots: {}":                          DefaultSnapshots(),
		"snapshots: {every: 5m, keep_daily: 0s}": some,
	} {
		var p Plan
		if err := yaml.Unmarshal([]byte(text), &p); err != nil {
			t.Fatal(err)
		}
		if got := p.snapshots(); got != want {
			t.Errorf("%s: %+v", text, got)
		}
	}
	d := yaml.NewDecoder(strings.NewReader("snapshots: {evry: 5m}"))
	d.KnownFields(true)
	if err := d.Decode(&Plan{}); err == nil {
		t.Error("a key that is not known was taken")
	}
}
