package scheduler

import (
	"reflect"
	"testing"

	"github.com/berth-dev/berth/internal/svc"
)

func TestExampleConfiguration(t *testing.T) {
	cfg := NewConfig("")
	if err := svc.LoadConfig("scheduler.example.yaml", &cfg); err != nil {
		t.Fatal(err)
	}
	want := NewConfig("/var/lib/berth/scheduler")
	want.Peers = cfg.Peers // empty in both
	if !reflect.DeepEqual(cfg, want) {
		t.Errorf("the example does not hold the defaults:\n%+v\n%+v", cfg, want)
	}
	for name, change := range map[string]func(*Config){
		"no folder":      func(c *Config) { c.Dir = "" },
		"short lease":    func(c *Config) { c.Lease = 1 },
		"no tries":       func(c *Config) { c.WakeTries = 0 },
		"no back-off":    func(c *Config) { c.RetryMin = 0 },
		"bind, no TLS":   func(c *Config) { c.Bind = "127.0.0.1:0" },
		"wrong time-out": func(c *Config) { c.WakeTimeout = -1 },
	} {
		c := NewConfig("/x")
		change(&c)
		if c.Validate() == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}
