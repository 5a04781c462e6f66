package credentials

import (
	"testing"

	"github.com/berth-dev/berth/internal/svc"
)

func TestExampleConfigurationParses(t *testing.T) {
	cfg := Config{}
	if err := svc.LoadConfig("credentials.example.yaml", &cfg); err != nil {
		t.Fatal(err)
	}
	want := NewConfig()
	if want.KeyDir = cfg.KeyDir; cfg != want {
		t.Errorf("the example is %+v, the defaults are %+v", cfg, want)
	}
}
