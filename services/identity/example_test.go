package identity_test

import (
	"testing"

	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/services/identity"
)

func TestExampleConfigurationParses(t *testing.T) {
	cfg := identity.NewConfig()
	must(t, svc.LoadConfig("identity.example.yaml", &cfg))
	if len(cfg.Issuers) != 1 || cfg.Issuers[0].Tenant != "acme" {
		t.Errorf("%+v", cfg)
	}
	if err := svc.ParseConfig([]byte("issuer: x"), &cfg); err == nil {
		t.Error("an unknown key was taken")
	}
}
