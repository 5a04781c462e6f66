package sim

import (
	"flag"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
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

// open are seeds that end without coming to rest, and that nobody has mended yet; they break no rule of
// safety. docs/faults.md lists them. Each is printed in every run, must still break the invariant
// named here, and leaves the list when it holds.
var open = map[uint64]string{
	1687: "ends-quiet: a draining host keeps one session, which it is asked to save again and again",
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
	broken := 0
	for _, r := range total.Broken {
		why, known := open[r.Seed]
		if what, _, _ := strings.Cut(why, ":"); known && r.Broken.Invariant == what {
			t.Logf("OPEN: seed %d, %s", r.Seed, why)
			continue
		}
		broken++
	}
	if broken > 0 {
		t.Fatalf("%d of %d seeds broke an invariant\n%s", broken, total.Seeds, out.String())
	}
	for seed, why := range open {
		played := seed >= *firstFlag && seed < *firstFlag+uint64(n)
		if played && !slices.ContainsFunc(total.Broken, func(r Result) bool { return r.Seed == seed }) {
			t.Errorf("seed %d holds now; take it from the list of what is open: %s", seed, why)
		}
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
