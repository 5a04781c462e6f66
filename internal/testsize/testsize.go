// Package testsize tells a test which of two runs it is part of: `make test`, in which each promise is proved
// once and in the cheapest place that can show it, or `make test-long`, in which everything is proved at full
// size and in every tier. It guarantees that what `make test` leaves out is skipped by name, with the reason,
// so that the report lists it.
package testsize

import (
	"os"
	"testing"
)

// Env is the environment variable that `make test-long` sets.
const Env = "BERTH_TEST_LONG"

// Long reports whether this is a run at full size.
func Long() bool { return os.Getenv(Env) != "" }

// NeedLong skips the test unless this is a run at full size. proved says where `make test` proves the same.
func NeedLong(t testing.TB, proved string) {
	t.Helper()
	if !Long() {
		t.Skipf("left to make test-long: %s", proved)
	}
}
