package hostagent

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/hostagent/driver/containerd"
)

var rewrite = flag.Bool("rewrite", false, "rewrite golden files")

func TestExampleConfigurationParses(t *testing.T) {
	cfg := NewConfig()
	must(t, svc.LoadConfig("hostagent.example.yaml", &cfg))
	must(t, cfg.check())
	if cfg.Host != "h1" || cfg.Images["default"] == "" || cfg.Disk.Ready != 2 || cfg.Hello != 20*time.Second {
		t.Errorf("%+v", cfg)
	}
	if err := svc.ParseConfig([]byte("hots: x"), &cfg); err == nil {
		t.Error("an unknown key was taken")
	}
}

// TestPreflightSaysWhatIsMissing: one sentence, and nothing is made.
func TestPreflightSaysWhatIsMissing(t *testing.T) {
	base := NewConfig()
	base.Host, base.Dir = "h1", filepath.Join(t.TempDir(), "not", "made")
	for name, change := range map[string]func(*Config){
		"bad host":      func(c *Config) { c.Host = "No Host" },
		"relative dir":  func(c *Config) { c.Dir = "here" },
		"bad driver":    func(c *Config) { c.Driver = "magic" },
		"no tier":       func(c *Config) { c.Tiers = nil },
		"bad tier":      func(c *Config) { c.Tiers = []string{"vault"} },
		"null and more": func(c *Config) { c.Driver, c.Tiers = driverNull, []string{"null", "gvisor"} },
		"null driver":   func(c *Config) { c.Driver = driverNull },
		"handler":       func(c *Config) { c.Handlers = map[string]containerd.Handler{"gvisor": {}} },
		"handler path":  func(c *Config) { c.Handlers = map[string]containerd.Handler{"kata": {Shim: "shim"}} },
		"no wakes":      func(c *Config) { c.MaxWakes = 0 },
		"no hello":      func(c *Config) { c.Hello = 0 },
		"no runtimes":   func(c *Config) { c.Runtimes = "/no/such/folder" },
		"bad grace":     func(c *Config) { c.Grace = -1 },
		"reserved host": func(c *Config) { c.Host = "operator" },
	} {
		cfg := base
		change(&cfg)
		err := Preflight(cfg)
		if err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
		if _, serr := os.Stat(base.Dir); !os.IsNotExist(serr) {
			t.Fatalf("%s: something was made", name)
		}
	}
	cfg := base
	cfg.Driver, cfg.Tiers = driverNull, []string{"null"}
	must(t, Preflight(cfg))
}

func TestHostKeyStaysAndIsPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "h", "host.key")
	first, err := hostKey(path)
	must(t, err)
	again, err := hostKey(path)
	must(t, err)
	if first.Public() != again.Public() {
		t.Error("the key changed")
	}
	st, err := os.Stat(path)
	must(t, err)
	if st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
	must(t, os.Chmod(path, 0o644))
	if _, err := hostKey(path); !errs.Is(err, errkind.Refused) {
		t.Errorf("a key that others can read: %v", err)
	}
	must(t, os.WriteFile(path, []byte("nonsense"), 0o600))
	must(t, os.Chmod(path, 0o600))
	if _, err := hostKey(path); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a damaged key: %v", err)
	}
}

// TestPlaceGolden: the text of /run/berth/session.json, which agents read.
func TestPlaceGolden(t *testing.T) {
	tm := terms()
	tm.Tier, tm.TierReason, tm.Idle = corev1.Tier_TIER_GVISOR, "the default", durationpb.New(15*time.Minute)
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	durable := describe("s1", "default", tm, "sha256:abc", corev1.Origin_ORIGIN_RESUMED, time.Time{}, at)
	tm.Persistence = corev1.Persistence_PERSISTENCE_EPHEMERAL
	brief := describe("s1", "scratch", tm, "sha256:abc", corev1.Origin_ORIGIN_CREATED, time.Time{}, at)
	back := describe("s1", "default", tm, "sha256:abc", corev1.Origin_ORIGIN_RESTORED, at.Add(-time.Hour), at)
	got := string(durable.json()) + string(brief.json()) + string(back.json())
	const file = "testdata/session.json.golden"
	if *rewrite {
		must(t, os.MkdirAll("testdata", 0o755))
		must(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	must(t, err)
	if got != string(want) {
		t.Errorf("differs from %s; got:\n%s", file, got)
	}
	var any map[string]any
	must(t, json.Unmarshal(durable.json(), &any))
	dir := filepath.Join(t.TempDir(), "run")
	must(t, writePlace(dir, durable.json()))
	must(t, writePlace(dir, brief.json()))
	left, err := os.ReadDir(dir)
	must(t, err)
	if len(left) != 1 {
		t.Errorf("%d files in the run folder", len(left))
	}
}

// TestTheMarginLeavesTheWatchdogTime: a margin too short for its looks, and an unknown fence, are refused.
func TestTheMarginLeavesTheWatchdogTime(t *testing.T) {
	good := NewConfig()
	good.Host, good.Dir = "h1", t.TempDir()
	if err := good.check(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"margin":    func(c *Config) { c.Margin = 399 * time.Millisecond },
		"no margin": func(c *Config) { c.Margin = 0 },
		"fence":     func(c *Config) { c.Fence = "thaw" },
	} {
		c := good
		change(&c)
		if err := c.check(); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	now := 100 * time.Second
	l := heldLease(&now)
	l.margin = 30 * time.Second // more than the lease has
	if left := l.left(); left != leaseTerm-leaseTerm/4 {
		t.Errorf("a margin that is longer than the lease leaves %s", left)
	}
}
