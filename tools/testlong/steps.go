package main

// step is a part of the long run: a shell script at the root of the project, in which BIN is the directory of
// the programs and SEED a random number of this run.
type step struct {
	name, what, script string
}

// report is the end of a script: it reads the output of `go test -json`.
const report = " | $BIN/testreport"

// steps of the long run, the quickest to fail first. testsize.Long holds in all of them.
var steps = []step{
	{"drivers", "the conformance suite of every tier at full size",
		"go test -json -p 2 -count=1 -timeout 90m -exec $BIN/testns ./services/hostagent/driver/..." + report},
	{"hostile", "the whole hostile matrix, in emulated VMs too",
		"go test -json -count=1 -timeout 90m -exec $BIN/testns ./test/hostile" + report},
	{"egress", "every way round an egress policy, in every tier with a network",
		"go test -json -count=1 -timeout 90m -exec $BIN/testns ./test/egress" + report},
	{"e2e", "every end-to-end scenario in every kind of world",
		"go test -json -count=1 -timeout 120m -exec $BIN/testns ./test/e2e" + report},
	{"race", "the race detector over the packages with real sandboxes",
		"go test -json -race -p 1 -count=1 -timeout 120m -exec $BIN/testns ./services/hostagent/... ./test/storm ./test/linear" + report},
	{"storm", "10,000 opens of a warm pool while members are killed, from a printed seed",
		"echo BERTH_SEED=$SEED; BERTH_SEED=$SEED go test -json -count=1 -timeout 60m -exec $BIN/testns ./test/storm" + report},
	{"chaos", "100 random faults on a cluster under load",
		"echo BERTH_SEED=$SEED; BERTH_SEED=$SEED BERTH_FAULTS=100 go test -json -count=1 -timeout 180m -exec $BIN/testns -run 'TestChaos$' ./test/chaos" + report},
	{"sim", "100,000 fresh seeds of the simulation",
		"cd test && go run ./sim/cmd -seeds 100000 -first $SEED"},
	{"fuzz", "every fuzz target for 60 s",
		"tools/setup/fuzz.sh 60s"},
}
