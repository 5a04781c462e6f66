#!/usr/bin/env bash
# Runs the tests of `make test` and reports on them: testall.sh BEGAN "REAL" "CLUSTERS" "RACE" "RACE SHORT".
# BEGAN is when make began, in seconds since 1970. CLUSTERS is a pattern of tests in test/e2e.
# Packages with real sandboxes mostly wait, the others mostly compute: two of the first run beside one of the others.
set -euo pipefail
began=$1 real=$2 clusters=$3 race=$4 short=$5
bin=$PWD/bin
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 130' INT TERM
export BERTH_TESTNS_USAGE=$dir/usage.json

# gotest NAME FLAG... PACKAGE... runs one part and writes its action graph; make lint has vetted everything. The
# report names each failure; a part that failed without one, as by a package that does not exist, is noted in
# the file failed.
gotest() {
	local name=$1
	shift
	go test -json -count=1 -vet=off -exec "$bin/testns" -debug-actiongraph="$dir/graph-$name.json" "$@" || echo "$name" >>"$dir/failed"
}

everything() {
	trap 'exit 130' INT TERM # a subshell begins without its parent's traps
	export CGO_ENABLED=0 # as in make build: what that compiled is not compiled again
	gotest real -p 2 -timeout 40m -skip "$clusters" $real >"$dir/real.json" &
	local job=$!
	trap 'kill $job 2>/dev/null || true' EXIT
	gotest clusters -timeout 40m -run "$clusters" ./test/e2e
	gotest plain -p 1 -timeout 20m $plain
	export CGO_ENABLED=1 # the race detector needs it
	gotest race -race -p 1 -timeout 20m $raced
	gotest race-short -race -short -p 1 -timeout 20m $short
	wait $job
	trap - EXIT
	cat "$dir/real.json"
}

raced=$(go list $race)
plain=$(go list ./... ./schemas/... ./sdk/... | grep -vE '/(services/hostagent|tools/runtimes)(/|$)' | grep -vxF "$raced")
everything | "$bin/testreport" -dir "$dir" -began "$began" -budget 15m
if [ -s "$dir/failed" ]; then
	echo "testall: go test failed in $(paste -sd, "$dir/failed"), and the report names no failure" >&2
	exit 1
fi
