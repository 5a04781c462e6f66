package sim

import (
	"flag"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "play this seed alone and print its trace")
	seedsFlag = flag.Int("seeds", 2000, "how many seeds TestSim plays")
	firstFlag = flag.Uint64("first", 1, "the first of them")
)

func TestMain(m *testing.M) {
	flag.Parse()
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

// known are seeds that broke an invariant, each with its cause. A mend changes the schedule of a seed, so
// each cause also has a test of its rule, which docs/faults.md names.
var known = []struct {
	seed  uint64
	cause string
}{
	{1020912, "a host joined while its loss was being recorded: it held a lease, and others could have its session"},
	{1687, "a blank disk at rest was not saved, and a drain asked for it without end"},
	{700136, "the same, with an epoch that never reached the host"},
	{1013453, "the same"},
	{1017033, "the same"},
	{1026144, "the same"},
	{10578, "the same"},
	{10951, "the same"},
	{13053, "the same"},
	{1000160, "a committed snapshot of an earlier epoch was withdrawn, so that each manifest after it was refused as a conflict"},
	{1007440, "the same"},
	{9145, "the same"},
	{803830, "the holder of a moved session was removed during the delete, and no other host cleaned the store"},
	{1024358, "a moved session was deleted while no host held a lease, and no host cleaned the store later"},
	{2044741, "both hosts of a deleted session were removed: the first counted as having cleaned the store"},
	{900572, "a removed host had confirmed an erasure before it cleaned the store, and no other host did"},
	{902014, "the same"},
	{902071, "the same"},
	{902135, "the same"},
	{2053413, "the simulated scheduler did not compare the epoch in a late report that a stale disk was dropped"},
	{12975, "a late wake of a deleted generation made a disk on a host that heard of the delete first"},
	{15500, "the same"},
	{2017067, "a late resume took back the drain that was asked for after it, and the simulated operator did not look"},
	{802083, "deletes of two newer generations cancelled each other's drop of an older generation"},
	{1020355, "the same"},
	{1025593, "the same"},
	{1027263, "the same"},
	{10920, "the same"},
	{12231, "the same"},
}

// TestKnownSeedsHold plays each known seed, also with -short.
func TestKnownSeedsHold(t *testing.T) {
	for _, k := range known {
		t.Run(strconv.FormatUint(k.seed, 10), func(t *testing.T) {
			t.Parallel()
			if r := Run(k.seed, Options{}); r.Broken != nil {
				t.Errorf("%v; its cause was: %s", r.Broken, k.cause)
			}
		})
	}
}

// TestSim plays many seeds, or with -seed one of them with its whole trace.
func TestSim(t *testing.T) {
	if *seedFlag != 0 {
		if r := Run(*seedFlag, Options{Trace: os.Stdout}); r.Broken != nil {
			t.Fatal(r.Broken)
		}
		return
	}
	n := *seedsFlag
	if testing.Short() {
		n = min(n, 150)
	}
	var out strings.Builder
	total := Many(*firstFlag, n, runtime.GOMAXPROCS(0), Options{}, &out)
	if len(total.Broken) > 0 {
		t.Fatalf("%d of %d seeds broke an invariant\n%s", len(total.Broken), total.Seeds, out.String())
	}
	if missing := total.Hits.Missing(); n >= 1000 && len(missing) > 0 {
		t.Errorf("these never happened in %d seeds: %q", n, missing)
	}
	t.Logf("%d seeds, %d steps, %s of virtual time", total.Seeds, total.Steps, total.Virtual)
	if testing.Verbose() {
		total.Hits.Print(os.Stdout)
	}
}

// TestSeedsPlayTheSameAgain: a trace is the same byte for byte, also beside other simulations.
func TestSeedsPlayTheSameAgain(t *testing.T) {
	for seed := uint64(1); seed <= 12; seed++ {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			var one, two strings.Builder
			a, b := Run(seed, Options{Trace: &one}), Run(seed, Options{Trace: &two})
			if a.Hash != b.Hash || a.Steps != b.Steps || one.String() != two.String() {
				t.Errorf("seed %d: traces %016x and %016x, %d and %d steps", seed, a.Hash, b.Hash, a.Steps, b.Steps)
			}
		})
	}
}

// TestAGuardThatIsMissingIsFound: without any one of the guards some seed breaks an invariant.
func TestAGuardThatIsMissingIsFound(t *testing.T) {
	within := 400
	for _, m := range Mutations() {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			for seed := uint64(1); seed <= uint64(within); seed++ {
				if r := Run(seed, Options{Mutation: m}); r.Broken != nil {
					t.Logf("found by seed %d: %v", seed, r.Broken)
					return
				}
			}
			t.Errorf("%d seeds hold although %s", within, m)
		})
	}
}
