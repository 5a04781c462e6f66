// Package chaos breaks a cluster of processes under load, at random from a seed that is printed, and
// holds what users were told against what is there. After each fault every session answers again, and
// every file that was acknowledged as saved is in it, by its hash; a file that was written and not
// saved is missing only if the platform said that the session was restored as of an earlier time. At
// no time can the sandbox of an earlier owner run once a later one is active. At the end everything
// is deleted, and nothing is left on the hosts, in the store and on the machine.
//
// BERTH_FAULTS says how many faults, BERTH_SEED repeats a run (as far as a machine repeats itself).
package chaos

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// clock is how times are printed.
const clock = "15:04:05.000"

// sessions are the workers' users, each with the names of their sessions.
var sessions = []struct {
	tenant, user string
	names        []string
}{
	{"acme", "ann", []string{"one", "two", "three"}},
	{"acme", "bob", []string{"one", "two", "three"}},
	{"globex", "cleo", []string{"one", "two"}},
}

// terms let many sessions fit on a part of this machine, and save and sleep often.
const terms = `lifecycle:
  policy:
    templates:
      default: {image: default, tier: container, limits: {cpu_millis: 500, memory_bytes: 67108864, pids: 128, disk_bytes: 67108864}}
    plans:
      default: {template: default, idle: 20s, retention: 720h, snapshots: {every: 10s}}
`

// run is one run of chaos.
type run struct {
	t       *testing.T
	e       *testenv.Env
	seed    uint64
	store   string // folder; empty: on the bus
	op      *sdk.Client
	workers []*worker
	history *history
	owners  *owners
	lines   []string // of faults so far

	mu    sync.Mutex
	wrong []string
}

// TestChaos: zero lost, zero double owners, zero leaks.
func TestChaos(t *testing.T) {
	faults := testenv.Number(t, "BERTH_FAULTS", 4)
	r := &run{t: t, seed: testenv.Number(t, "BERTH_SEED", rand.Uint64()), owners: newOwners()}
	t.Logf("%d faults; to repeat them: BERTH_SEED=%d BERTH_FAULTS=%d", faults, r.seed, faults)
	r.history = newHistory(r.owners)
	r.begin()
	b := &breaker{run: r, e: r.e, rng: rand.New(rand.NewPCG(r.seed, 0))}
	ctx, cancel := context.WithCancel(t.Context())
	var wg, load sync.WaitGroup
	defer wg.Wait()
	defer load.Wait()
	defer cancel()
	began := time.Now()
	wg.Go(func() { r.history.follow(ctx, r.op, began) })
	cgroups := map[string][]string{}
	for _, m := range r.e.Members() {
		if m.Service == "hostagent" {
			cgroups[m.Name] = cgroupsOf(m.Marks)
		}
	}
	wg.Go(func() { r.owners.watch(ctx, cgroups, r.report) })
	working, stop := context.WithCancel(ctx)
	defer stop()
	for _, w := range r.workers {
		load.Go(func() { w.run(working) })
	}
	r.settle(fault{what: "nothing", undo: nothing}, 0)
	for i := range faults {
		time.Sleep(time.Second + time.Duration(b.rng.Int64N(int64(3*time.Second)))) // of work
		r.settle(b.next(), int(i)+1)
	}
	stop()
	load.Wait()
	r.finish()
}

// begin starts the cluster with a store that the seed chooses, and prepares the workers.
func (r *run) begin() {
	t := r.t
	config := filepath.Join(t.TempDir(), "berth.yaml")
	if err := os.WriteFile(config, []byte(terms), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--config", config, "--link-seed", fmt.Sprint(r.seed)}
	if r.seed%2 == 0 {
		r.store = filepath.Join(t.TempDir(), "store")
		if err := os.Mkdir(r.store, 0o700); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--store", "file://"+r.store)
	} else {
		args = append(args, "--store", "nats://")
	}
	t.Cleanup(r.forget)
	r.e = testenv.PrepareCluster(t, args...)
	t.Cleanup(r.keep)
	r.e.Up()
	r.op = r.e.Operator()
	for _, u := range sessions {
		c, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: r.e.ClientFile("fe-" + u.tenant + "-web"), User: r.tokens(u.tenant, u.user)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		for _, name := range u.names {
			n := uint64(len(r.workers) + 1)
			r.workers = append(r.workers, &worker{name: name, user: u.user, client: c, history: r.history, rng: rand.New(rand.NewPCG(r.seed, n)),
				probes: make(chan chan<- answer, 1), ledger: newLedger(), failed: map[string]int{}})
		}
	}
}

// tokens mints a user's token now and then, as a frontend's login does.
func (r *run) tokens(tenant, user string) sdk.TokenSource {
	var mu sync.Mutex
	var token string
	var minted time.Time
	return func(ctx context.Context) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(minted) > 20*time.Minute {
			fresh, err := r.e.Token(ctx, tenant, user)
			if err != nil {
				return "", err
			}
			token, minted = fresh, time.Now()
		}
		return token, nil
	}
}

// settle waits until the fault is over and every session answers again, and compares their files.
func (r *run) settle(f fault, number int) {
	r.t.Helper()
	time.Sleep(f.held)
	f.undo()
	healed := time.Now()
	answers := make(chan answer, len(r.workers))
	for _, w := range r.workers {
		w.ask(answers)
	}
	var last answer
	files := 0
	for range r.workers {
		a := <-answers
		files += a.files
		if a.took > last.took {
			last = a
		}
		for _, what := range a.wrong {
			r.report([]string{fmt.Sprintf("session %s of %s, %s: %s", a.worker.name, a.worker.user, a.worker.keyNow(), what)})
		}
	}
	took := time.Since(healed)
	peers := &schedulerv1.PeersReply{}
	r.call("peers", &schedulerv1.PeersRequest{}, peers)
	handoffs, restored := r.history.counts()
	line := fmt.Sprintf("%3d. %s; held %.1f s; all answered %.1f s later (last: %s of %s); %d saved files compared; so far %d handoffs, %d restored, %d log entries",
		number, f.what, f.held.Seconds(), took.Seconds(), last.worker.name, last.worker.user, files, handoffs, restored, peers.GetApplied())
	r.lines = append(r.lines, time.Now().Format(clock)+" "+line)
	r.t.Log(line)
	if len(last.tries) > 0 {
		r.t.Logf("     %s of %s was asked again: %s", last.worker.name, last.worker.user, strings.Join(last.tries[max(0, len(last.tries)-5):], "; "))
	}
	r.gone()
	r.check()
}

// gone waits until no sandbox of an earlier epoch runs.
func (r *run) gone() {
	for end := time.Now().Add(time.Minute); ; time.Sleep(lookEvery) {
		left := r.owners.leftovers(time.Now().Add(-3 * lookEvery))
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			r.report(left)
			return
		}
	}
}

func (r *run) report(wrong []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wrong = append(r.wrong, wrong...)
}

// check ends the test if anything was found.
func (r *run) check() {
	r.t.Helper()
	r.report(r.history.problems())
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.wrong) > 0 {
		r.t.Fatalf("seed %d:\n%s", r.seed, strings.Join(r.wrong, "\n"))
	}
}

// finish deletes every session, and looks for what is left.
func (r *run) finish() {
	r.t.Helper()
	for _, w := range r.workers {
		w.delete(r.t.Context())
		r.report(w.wrong)
	}
	r.within("every generation is told deleted and erased", func() []string { return r.history.unended() })
	r.within("no host has anything of a session", r.inventories)
	r.within("the scheduler knows no session", r.records)
	r.within("the store has nothing of a session", r.objects)
	r.check()
	failed := map[string]int{}
	deletes := 0
	for _, w := range r.workers {
		deletes += w.deletes
		for k, n := range w.failures() {
			failed[k] += n
		}
	}
	watched := r.owners.watched()
	if watched == 0 {
		r.t.Error("no owner was seen running: the watcher looks in the wrong place")
	}
	r.t.Logf("%d owners were watched, %d deletes; operations that failed meanwhile, by kind: %v", watched, deletes, failed)
}

// within waits until nothing is left of a kind.
func (r *run) within(what string, left func() []string) {
	r.t.Helper()
	var now []string
	for end := time.Now().Add(90 * time.Second); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		if now = left(); len(now) == 0 {
			return
		}
	}
	r.report([]string{"not true at the end: " + what + ":\n\t" + strings.Join(now, "\n\t")})
}

// call asks the scheduler as the operator, again until it answers.
func (r *run) call(method string, req, reply proto.Message) {
	r.t.Helper()
	var err error
	for end := time.Now().Add(endTime); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(r.t.Context(), opTime)
		err = r.op.Call(ctx, "scheduler", method, req, reply)
		cancel()
		if err == nil {
			return
		}
	}
	r.t.Fatalf("seed %d: %s: %v", r.seed, method, err)
}

func (r *run) records() (left []string) {
	reply := &schedulerv1.ListReply{}
	r.call("list", &schedulerv1.ListRequest{}, reply)
	for _, rec := range reply.GetRecords() {
		left = append(left, rec.String())
	}
	return left
}

// kept is where what is known of a failed run is.
func (r *run) kept() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("berth-chaos-%d", r.seed))
}

// forget removes what was kept, unless the test failed: also in the cleanup that comes before.
func (r *run) forget() {
	if !r.t.Failed() {
		_ = os.RemoveAll(r.kept())
		return
	}
	r.t.Logf("seed %d; the faults:\n%s\nevents and logs are kept in %s", r.seed, strings.Join(r.lines, "\n"), r.kept())
}

// keep writes what is known, and copies the logs: whether anything is left on the machine is known
// when they are gone.
func (r *run) keep() {
	var text strings.Builder
	fmt.Fprintf(&text, "BERTH_SEED=%d\n%s\n\n%s\n", r.seed, strings.Join(r.lines, "\n"), strings.Join(r.wrong, "\n"))
	keys := map[string]bool{}
	for _, w := range r.workers {
		keys[w.keyNow()] = true
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		events := r.history.of(ids.SessionKey(key))
		fmt.Fprintf(&text, "\n%s\n%s\n", key, strings.Join(events, "\n"))
		named := func(what string) bool { return key != "" && strings.Contains(what, key) }
		if slices.ContainsFunc(r.wrong, named) {
			r.t.Logf("events of %s:\n%s", key, strings.Join(events[max(0, len(events)-25):], "\n"))
		}
	}
	err := os.RemoveAll(r.kept())
	if err == nil {
		err = os.CopyFS(filepath.Join(r.kept(), "log"), os.DirFS(filepath.Join(r.e.Dir, "log")))
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(r.kept(), "chaos.txt"), []byte(text.String()), 0o600)
	}
	if err != nil {
		r.t.Logf("the logs are not kept: %v", err)
	}
}
