# Berth: one sandbox per user session. `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:

BIN      := $(CURDIR)/bin
CACHE    ?= $(or $(BERTH_CACHE),$(HOME)/.cache/berth)
TOOLS    := $(CACHE)/tools
MODULES  := ./... ./schemas/... ./sdk/... ./test/...
BUF      := $(TOOLS)/buf-v1.75.0/buf
GENGO    := $(TOOLS)/protoc-gen-go-v1.36.12/protoc-gen-go
NATSCLI  := $(TOOLS)/natscli-v0.5.0/nats
FUZZTIME ?= 20s
export BERTH_NATSCLI := $(NATSCLI)
# A package that was built in one clone is not built again in another.
export GOFLAGS := $(strip $(GOFLAGS) -trimpath)

.PHONY: help setup build testtools runtimes image parts demo test test-long flake check e2e hostile egress bench bench-egress bench-open bench-disk bench-handoff bench-tiers bench-pool bench-identity chaos sim sim-long fuzz gen lint clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 16

setup: ## install by name what this machine lacks (Debian packages)
	@tools/setup/setup.sh

build: ## build the programs into bin/ (CLOUD=1: with the clients of S3, Google Cloud, Azure and their key services)
	@mkdir -p $(BIN)
	@CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o $(BIN)/berth-guest ./services/hostagent/guest/cmd/berth-guest
	@CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o $(BIN)/berth-wasm ./services/hostagent/guest/wasm/cmd/berth-wasm
	@CGO_ENABLED=0 GOOS=wasip1 GOARCH=wasm go build -trimpath -ldflags='-s -w' -o $(BIN)/js.wasm ./tools/wasm/js
	@CGO_ENABLED=0 go build -trimpath -ldflags=-w $(if $(CLOUD),-tags cloud) -o $(BIN)/berth ./tools/berth

testtools: setup ## build what the tests are run with
	@mkdir -p $(BIN)
	@CGO_ENABLED=0 go build -o $(BIN)/ ./tools/testns ./tools/testreport ./tools/testlong ./tools/flake
	@CGO_ENABLED=0 go run ./tools/image --busybox >/dev/null

runtimes: setup ## build the pinned containerd, runc, runsc and shims, fetch the kernel of virtual machines (cached by version)
	@CGO_ENABLED=0 go run ./tools/runtimes >/dev/null

image: setup ## make the default session image (cached by recipe)
	@CGO_ENABLED=0 go run ./tools/image >/dev/null

# What everything below runs on. The image is made while the runtimes are compiled.
parts:
	@$(MAKE) --no-print-directory -j3 runtimes image build

demo: parts ## two users, two sandboxes: work, sleep, wake, delete (JSON=1: one object as last line)
	@CGO_ENABLED=0 go run ./tools/demo $(if $(JSON),--json)

# The same faults in every run of the tests; make test-long, and go test by itself, draw new ones.
test: export BERTH_SEED := $(or $(BERTH_SEED),20)

# Packages whose tests start real sandboxes. testns gives each test process namespaces of its own, so that two
# run at the same time; the longest stand first, so that none of them runs alone at the end.
REAL := ./services/hostagent/driver/microvm ./services/hostagent/driver/containerd ./test/e2e ./services/hostagent \
  ./test/hostile ./test/egress ./services/hostagent/... ./tools/runtimes/... ./test/...

# Tests of test/e2e with clusters, which run apart from the rest of it, at the same time.
CLUSTERS := ^(TestHandoff|TestTheSameScenariosInManyProcesses|TestAClusterOfProcesses.*|TestAMember.*|TestKillNineOfACluster.*|TestACutScheduler.*)$$

# Packages in which goroutines meet run with the race detector, and only so.
RACE := ./internal/... ./sdk/... ./services/identity/... ./services/credentials/... ./services/lifecycle/... \
  ./services/scheduler/... ./services/pool/... ./services/egress/...

# The race detector over parts of hostagent, without real sandboxes; their whole tests are among REAL.
RACE_SHORT := ./services/hostagent/guest/... ./services/hostagent/internal/box ./services/hostagent/internal/core \
  ./services/hostagent/internal/idrange ./services/hostagent/driver/router ./services/hostagent/driver/null \
  ./services/hostagent/driver/microvm/qmp

BEGAN := $(shell date +%s)

test: parts testtools $(BUF) $(GENGO) $(NATSCLI) ## all tests: unit, integration, end to end; prints where the time went, counts and skips
	@tools/setup/room.sh
	@$(MAKE) --no-print-directory lint
	@tools/setup/testall.sh $(BEGAN) "$(REAL)" '$(CLUSTERS)' "$(RACE)" "$(RACE_SHORT)"

test-long: parts testtools $(NATSCLI) ## everything at full size and in every tier, for hours; goes on where it was interrupted (ONLY=step,...)
	@$(BIN)/testlong -bin $(BIN) -cache $(CACHE) $(if $(ONLY),-only $(ONLY))

flake: parts testtools $(NATSCLI) ## PKG N times (default 20), every second run under load; prints each failure with its log (RACE_DETECTOR=1, RUN=pattern)
	@$(BIN)/flake -n $(or $(N),20) -exec $(BIN)/testns $(if $(RACE_DETECTOR),-race) $(if $(RUN),-run '$(RUN)') $(PKG)

# Packages whose tests need root or runtimes, and do nothing else worth a second between two edits.
ROOTED := /(services/hostagent|services/hostagent/driver/(containerd|microvm|wasm)|services/hostagent/internal/(archive|cgroup|disk|diskpool|extents|fence|loopdev|network|newroot|saver)(/.*)?|tools/runtimes(/.*)?|test/(chaos|e2e|egress|hostile|leaks|linear|storm))$$

check: ## quick: vet and tests that need neither root nor runtimes; what did not change is answered from the cache
	@CGO_ENABLED=0 go vet $(MODULES)
	@set -o pipefail; go list $(MODULES) | grep -vE '$(ROOTED)' | CGO_ENABLED=0 xargs go test -short -vet=off -json -p 4 -timeout 10m | go run ./tools/testreport -began $(BEGAN) -budget 90s

# One suite at full size.
e2e egress hostile chaos: export BERTH_TEST_LONG := 1
LONGTEST := CGO_ENABLED=0 go test -count=1 -timeout 120m -exec $(BIN)/testns

e2e: parts testtools $(NATSCLI) ## end-to-end scenarios only, in every tier
	@set -o pipefail; $(LONGTEST) -json -p 2 ./test/e2e ./test/... | $(BIN)/testreport

bench: bench-open bench-disk bench-handoff bench-tiers bench-pool bench-identity bench-egress ## all benchmarks

bench-open: parts ## opens, execs and resumes beside their floors, into bench/open.json
	@mkdir -p bench
	@go run ./test/bench/open --out bench/open.json

bench-disk: parts ## freeze, snapshot, sleep and restore of disks beside restic and zstd, into bench/disk.json
	@mkdir -p bench
	@tools/setup/setup.sh zstd
	@tools/setup/setup.sh restic || echo "bench-disk: restic cannot be installed; the peer is zstd"
	@CGO_ENABLED=0 go run ./test/bench/disk --out bench/disk.json

bench-handoff: parts ## what a failure costs: leader, NATS server, host with 50 sessions; placement in a large cell; into bench/handoff.json
	@mkdir -p bench
	@CGO_ENABLED=0 go run ./test/bench/handoff --out bench/handoff.json

bench-tiers: parts ## every isolation tier side by side beside its floor, and what a greedy neighbour takes away; into bench/tiers.json
	@mkdir -p bench
	@CGO_ENABLED=0 go run ./test/bench/tiers --out bench/tiers.json

bench-egress: build ## what it costs to leave through the gate, beside the same without one; into bench/egress.json
	@mkdir -p bench
	@CGO_ENABLED=0 go run ./test/bench/egress --out bench/egress.json

bench-identity: build ## tokens, logins and revocation: what it costs to know who asks; into bench/identity.json
	@mkdir -p bench
	@CGO_ENABLED=0 go run ./test/bench/identity --out bench/identity.json

bench-pool: parts ## warm claims beside cold opens in every tier, and the control plane's share of one, into bench/pool.json
	@mkdir -p bench
	@CGO_ENABLED=0 go run ./test/bench/pool --out bench/pool.json

egress: parts testtools ## every known way round an egress policy, in every tier with a network; real clients
	@set -o pipefail; $(LONGTEST) -json ./test/egress | $(BIN)/testreport

hostile: parts testtools ## what a hostile session tries, in every tier, as root and as a user; prints rows per tier and tiers that did not run
	@set -o pipefail; rows=$$(mktemp); $(LONGTEST) -json ./test/hostile | tee $$rows | $(BIN)/testreport; rc=$$?; \
	  sed -nE 's/.*"Output":"((ROWS|NOT RUN).*)\\n".*/\1/p' $$rows; rm -f $$rows; exit $$rc

chaos: parts testtools ## 100 random faults on a cluster under load, from a printed seed (BERTH_FAULTS, BERTH_SEED)
	@BERTH_FAULTS=$${BERTH_FAULTS:-100} $(LONGTEST) -v -run TestChaos ./test/chaos

sim: ## 2,000 seeds of the simulation on all cores (SEEDS, FIRST; one with its trace: SEED=n)
	@cd test && go run ./sim/cmd $(if $(SEED),-seed $(SEED),-seeds $(or $(SEEDS),2000) -first $(or $(FIRST),1))

sim-long: ## 100,000 seeds of the simulation
	@cd test && go run ./sim/cmd -seeds $(or $(SEEDS),100000) -first $(or $(FIRST),1)

fuzz: ## every fuzz target for FUZZTIME (default 20s) each
	@tools/setup/fuzz.sh $(FUZZTIME)

gen: $(BUF) $(GENGO) ## generate Go from schemas/proto, and the generated documents
	@cd schemas && PATH=$(dir $(GENGO)):$$PATH $(BUF) generate
	@go test ./tools/archtest ./schemas/asyncapi ./services/scheduler/internal/core -run 'Generated|StateTable' -update

lint: $(BUF) $(GENGO) ## vet, format, module files, schema lint, breaking changes and drift of generated code
	@test -z "$$(gofmt -l $$(git ls-files '*.go' | grep -v '\.pb\.go$$'))" || { echo "not formatted:"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	@tools/setup/modules.sh
	@CGO_ENABLED=0 go vet $(MODULES)
	@CGO_ENABLED=0 go vet -tags cloud ./tools/berth ./services/hostagent/cmd/... ./services/credentials/cmd/...
	@cd schemas && $(BUF) lint && $(BUF) breaking --against released.json
	@tmp=$$(mktemp -d) && cd schemas && PATH=$(dir $(GENGO)):$$PATH $(BUF) generate -o $$tmp && diff -r $$tmp/gen gen >/dev/null \
	  || { echo "schemas/gen is stale: run make gen"; rm -rf $$tmp; exit 1; }; rm -rf $$tmp

clean: ## remove bin/ and bench/ (the cache of runtimes and images stays)
	@rm -rf bin bench

$(BUF):
	@echo "building buf v1.75.0 (about 2 min, once)"
	@GOWORK=off GOBIN=$(dir $@) go install github.com/bufbuild/buf/cmd/buf@v1.75.0

$(GENGO):
	@GOWORK=off GOBIN=$(dir $@) go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12

$(NATSCLI):
	@echo "building natscli v0.5.0 (about 1 min, once)"
	@GOWORK=off GOBIN=$(dir $@) go install github.com/nats-io/natscli/nats@v0.5.0
