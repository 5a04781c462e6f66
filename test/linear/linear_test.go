package linear

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

var (
	duration = flag.Duration("linear.duration", 25*time.Second, "how long clients and faults go on")
)

const (
	sessions = 4
	clients  = 8
	// patience of one request; longer than a failover.
	patience = 8 * time.Second
)

// recorder is the history.
type recorder struct {
	start time.Time
	mu    sync.Mutex
	ops   []porcupine.Operation
	count map[Kind]int
	open  int
}

func (r *recorder) now() int64 { return int64(time.Since(r.start)) }

func (r *recorder) add(who int, call int64, in Input, out Output) {
	r.put(porcupine.Operation{ClientId: who, Call: call, Input: in, Output: out, Return: r.now()})
}

// addUnknown adds what may happen at any time from its call on.
func (r *recorder) addUnknown(who int, call int64, in Input) {
	r.put(porcupine.Operation{ClientId: who, Call: call, Input: in, Output: Output{Unknown: true}, Return: int64(Forever)})
}

func (r *recorder) put(o porcupine.Operation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ops = append(r.ops, o)
	r.count[o.Input.(Input).Kind]++
	if o.Return == int64(Forever) {
		r.open++
	}
}

// TestOwnershipIsLinearizable runs real scheduler processes, kills and pauses
// them from a seed, and checks what everybody was told.
func TestOwnershipIsLinearizable(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: three processes for half a minute")
	}
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("BERTH_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("BERTH_SEED is %q, want a number", s)
		}
	}
	t.Logf("seed %d; again with BERTH_SEED=%d", seed, seed)
	rec := &recorder{start: time.Now(), count: map[Kind]int{}}
	dir, err := os.MkdirTemp("", "berth-linear-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("logs, and the picture of an illegal history, are kept in %s", dir)
		} else if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	c := newCluster(t, dir, "h1", "h2")
	var hosts []*host
	keeping, stopKeeping := context.WithCancel(context.Background())
	var keepers sync.WaitGroup
	for i, id := range []ids.Host{"h1", "h2"} {
		h, joined := c.host(id, rec, clients+i), make(chan struct{})
		hosts = append(hosts, h)
		keepers.Go(func() { h.keep(keeping, joined) })
		select {
		case <-joined:
		case <-time.After(30 * time.Second):
			t.Fatalf("host %s could not join within 30 s", id)
		}
	}
	w := &workload{rec: rec, hosts: hosts, life: c.connect(subjects.Service("lifecycle")), op: c.connect(subjects.Operator())}
	ctx, stop := context.WithTimeout(context.Background(), *duration)
	defer stop()
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() { w.run(ctx, i, rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	c.torment(ctx, rand.New(rand.NewPCG(seed, 1<<32)))
	all.Wait()
	stopKeeping()
	keepers.Wait()
	w.check(t, dir)
}

// torment kills, stops in order, and pauses replicas until ctx ends. One is
// away at a time, now and then two.
func (c *cluster) torment(ctx context.Context, rnd *rand.Rand) {
	pause := func(from, to time.Duration) {
		select {
		case <-ctx.Done():
		case <-time.After(from + time.Duration(rnd.Int64N(int64(to-from)))):
		}
	}
	fault := func(name string) (heal func()) {
		switch n := rnd.IntN(10); {
		case n < 4:
			c.t.Logf("kill -9 %s", name)
			c.end(name, syscall.SIGKILL)
			return func() { c.start(name) }
		case n < 8:
			c.t.Logf("pause %s", name)
			c.signal(name, syscall.SIGSTOP)
			return func() { c.signal(name, syscall.SIGCONT) }
		default:
			c.t.Logf("stop %s", name)
			c.end(name, syscall.SIGTERM)
			return func() { c.start(name) }
		}
	}
	for ctx.Err() == nil {
		pause(500*time.Millisecond, 2*time.Second)
		victim := c.leader()
		if rnd.IntN(4) == 0 {
			victim = c.names[rnd.IntN(len(c.names))]
		}
		heal := fault(victim)
		pause(500*time.Millisecond, 2500*time.Millisecond)
		if other := c.leader(); other != victim && rnd.IntN(4) == 0 {
			second := fault(other)
			pause(100*time.Millisecond, time.Second)
			second()
		}
		heal()
	}
}

// workload is what clients do.
type workload struct {
	rec      *recorder
	hosts    []*host
	life, op *bus.Conn
}

func (w *workload) run(ctx context.Context, who int, rnd *rand.Rand) {
	for n := 0; ctx.Err() == nil; n++ {
		user := rnd.IntN(sessions)
		key := sessionKey(user)
		rctx, cancel := context.WithTimeout(context.Background(), patience)
		id := fmt.Sprintf("r%d-%d", who, n)
		switch p := rnd.IntN(100); {
		case p < 30:
			w.open(rctx, who, user, id)
		case p < 45:
			w.sleep(rctx, who, key, id)
		case p < 49:
			w.delete(rctx, who, key, id)
		case p < 70:
			w.hosts[rnd.IntN(len(w.hosts))].snapshot(rctx, key)
		default:
			w.show(rctx, who, key)
		}
		cancel()
		select { // leave the processes some of the machine
		case <-ctx.Done():
		case <-time.After(time.Duration(rnd.IntN(40)) * time.Millisecond):
		}
	}
}

func (w *workload) open(ctx context.Context, who, user int, id string) {
	in, call := Input{Kind: Open, Session: sessionKey(user)}, w.rec.now()
	r, err := bus.Invoke[*schedulerv1.WakeReply](ctx, w.life, "scheduler", "wake", &schedulerv1.WakeRequest{Admission: admission(user, id)})
	if err != nil {
		return // what it does by itself is not in the history
	}
	w.rec.add(who, call, in, Output{Generation: stampOf(r.GetSession().GetGeneration()), Epoch: stampOf(r.GetSession().GetEpoch()),
		Phase: Active, Host: r.GetHost()})
}

func (w *workload) sleep(ctx context.Context, who int, key, id string) {
	in, call := Input{Kind: Sleep, Session: key}, w.rec.now()
	r, err := bus.Invoke[*schedulerv1.SleepReply](ctx, w.life, "scheduler", "sleep",
		&schedulerv1.SleepRequest{Tenant: "acme", Session: key, RequestId: id, Reason: "close"})
	if err != nil {
		return
	}
	w.rec.add(who, call, in, Output{Generation: stampOf(r.GetSession().GetGeneration()), Epoch: stampOf(r.GetSession().GetEpoch()),
		Phase: phaseOf(r.GetState())})
}

func (w *workload) delete(ctx context.Context, who int, key, id string) {
	in, call := Input{Kind: Delete, Session: key}, w.rec.now()
	r, err := bus.Invoke[*schedulerv1.DeleteReply](ctx, w.life, "scheduler", "delete",
		&schedulerv1.DeleteRequest{Tenant: "acme", Session: key, RequestId: id})
	if err != nil {
		return
	}
	w.rec.add(who, call, in, Output{Generation: stampOf(r.GetSession().GetGeneration()), Epoch: stampOf(r.GetSession().GetEpoch()),
		Phase: phaseOf(r.GetState())})
}

func (w *workload) show(ctx context.Context, who int, key string) {
	in, call := Input{Kind: Show, Session: key}, w.rec.now()
	r, err := bus.Invoke[*schedulerv1.ShowReply](ctx, w.op, "scheduler", "show", &schedulerv1.ShowRequest{Tenant: "acme", Session: key})
	if errs.Is(err, errkind.NotFound) {
		w.rec.add(who, call, in, Output{None: true})
		return
	}
	if err != nil {
		return
	}
	s := r.GetRecord()
	w.rec.add(who, call, in, Output{Generation: stampOf(s.GetSession().GetGeneration()), Epoch: stampOf(s.GetSession().GetEpoch()),
		Phase: phaseOf(s.GetState()), Host: s.GetHost(), Head: s.GetManifest(), Revision: s.GetRevision()})
}

// check checks the history, and that there is one.
func (w *workload) check(t *testing.T, dir string) {
	w.rec.mu.Lock()
	ops, count, open := w.rec.ops, w.rec.count, w.rec.open
	w.rec.mu.Unlock()
	t.Logf("%d operations %v, %d of them without an answer", len(ops), count, open)
	for _, k := range []Kind{Open, Sleep, Delete, Show, Commit} {
		if count[k] < 5 {
			t.Errorf("only %d of %s were answered; the history shows little", count[k], k)
		}
	}
	result, info := porcupine.CheckOperationsVerbose(Model(), ops, time.Minute)
	if result == porcupine.Ok {
		return
	}
	path := filepath.Join(dir, "history.html")
	if err := porcupine.VisualizePath(Model(), info, path); err != nil {
		t.Errorf("draw the history: %v", err)
	}
	if result == porcupine.Unknown {
		t.Fatal("whether the history is legal could not be found out in a minute")
	}
	for _, part := range partition(ops) {
		if !porcupine.CheckOperations(Model(), part) {
			t.Errorf("ownership of %s is not linearizable:\n%s", part[0].Input.(Input).Session, stuck(part))
		}
	}
}

// stuck tells where a history of one session stops being legal: the shortest
// beginning that is not, by its last answers.
func stuck(ops []porcupine.Operation) string {
	slices.SortFunc(ops, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
	n := sort.Search(len(ops), func(n int) bool {
		cut := slices.Clone(ops[:n])
		for _, o := range ops[n:] { // it may have begun before
			if o.Input.(Input).Kind == Commit && o.Call < until(ops, n) {
				o.Output, o.Return = Output{Unknown: true}, int64(Forever)
				cut = append(cut, o)
			}
		}
		return !porcupine.CheckOperations(Model(), cut)
	})
	var b strings.Builder
	for _, o := range ops[max(0, n-12):min(n, len(ops))] {
		fmt.Fprintf(&b, "%10.3f-%.3f client %d %s\n", time.Duration(o.Call).Seconds(), time.Duration(o.Return).Seconds(), o.ClientId,
			describe(o.Input.(Input), o.Output.(Output)))
	}
	return b.String()
}

// until is when the last of the first n operations returned.
func until(ops []porcupine.Operation, n int) int64 {
	if n == 0 {
		return 0
	}
	return ops[n-1].Return
}

func sessionKey(user int) string {
	return ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", fmt.Sprint("u", user), "default").String()
}

func admission(user int, request string) *corev1.Admission {
	return &corev1.Admission{
		Actor: &corev1.Actor{Tenant: "acme", Issuer: "https://issuer", Subject: fmt.Sprint("u", user), Frontend: "web"},
		Terms: &corev1.Terms{Plan: "free", Template: "default", Tier: corev1.Tier_TIER_NULL,
			Limits: &corev1.Limits{CpuMillis: 100, MemoryBytes: 1 << 20, Pids: 64, DiskBytes: 1 << 30},
			Idle:   durationpb.New(15 * time.Minute), Retention: durationpb.New(720 * time.Hour),
			Persistence: corev1.Persistence_PERSISTENCE_DURABLE},
		RequestId: request, BodyHash: []byte("h"), StoredAt: timestamppb.Now(),
		Deadline: timestamppb.New(time.Now().Add(patience)),
		Keys:     []string{sessionKey(user)}, SessionName: "default",
	}
}
