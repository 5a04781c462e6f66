package identity_test

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/services/identity"
)

func TestExampleConfigurationParses(t *testing.T) {
	cfg := identity.NewConfig()
	must(t, svc.LoadConfig("identity.example.yaml", &cfg))
	if len(cfg.Issuers) != 1 || cfg.Issuers[0].Tenant != "acme" {
		t.Errorf("%+v", cfg)
	}
	if cfg.KeyDir = t.TempDir(); cfg.Validate() != nil {
		t.Error(cfg.Validate())
	}
	if i := cfg.Issuers[0]; i.ClockTolerance == nil || *i.ClockTolerance != 10*time.Second || i.Plans["gold"] != "large" {
		t.Errorf("%+v", i)
	}
	if err := svc.ParseConfig([]byte("issuer: x"), &cfg); err == nil {
		t.Error("an unknown key was taken")
	}
}
