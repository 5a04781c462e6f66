package e2e

import (
	"fmt"
	"os"
	"testing"

	"github.com/berth-dev/berth/test/testenv"
)

// Installations that tests share which need no fresh one. A session there falls asleep only when a test closes it.
var (
	// common has the tiers of this run and no configuration.
	common = testenv.Shared{Args: func() []string {
		return append([]string{"--idle", "1h", "--metrics", "127.0.0.1:0"}, testenv.Tiers()...)
	}}
	// disks has small disks and stores their snapshots in the bus.
	disks = testenv.Shared{Args: func() []string { return []string{"--config", disksConfig} }}
	// machines has every tier, virtual machines among them.
	machines = testenv.Shared{Args: func() []string { return testenv.AllTiers }}
)

// disksConfig is the configuration file of disks.
var disksConfig string

func TestMain(m *testing.M) { os.Exit(runAll(m)) }

func runAll(m *testing.M) int {
	file, err := os.CreateTemp("", "berth-*.yaml")
	if err == nil {
		disksConfig = file.Name()
		defer os.Remove(disksConfig)
		err = writeDiskConfig(file, diskTerms{})
		file.Close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	for _, s := range []*testenv.Shared{&common, &disks, &machines} {
		if err := s.End(); err != nil {
			fmt.Fprintln(os.Stderr, "an installation that tests shared:", err)
			code = max(code, 1)
		}
	}
	return code
}
