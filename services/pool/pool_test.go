package pool

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

const six = `pools:
  - template: default
    minimum: 6
    ceiling: 8
    in_flight: 2
    share: 1
`

func TestExampleConfiguration(t *testing.T) {
	cfg := NewConfig()
	if err := svc.LoadConfig("pool.example.yaml", &cfg); err != nil {
		t.Fatal(err)
	}
	want := NewConfig()
	want.Templates = cfg.Templates
	if !reflect.DeepEqual(cfg, want) || len(cfg.Templates) != 1 {
		t.Errorf("the example does not hold the defaults:\n%+v\n%+v", cfg, want)
	}
	for name, change := range map[string]func(*Config){
		"a lease that one lost renewal ends": func(c *Config) { c.Lease = 2 * c.RenewEvery },
		"no steps":                           func(c *Config) { c.Steps = 0 },
		"no pause":                           func(c *Config) { c.WarmEvery = 0 },
		"a tier that is none":                func(c *Config) { c.Templates = map[string]Template{"x": {Image: "i", Tier: "steel"}} },
		"no limits":                          func(c *Config) { c.Templates = map[string]Template{"x": {Image: "i", Tier: "gvisor"}} },
	} {
		c := NewConfig()
		change(&c)
		if c.Validate() == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

// What waits must be replaced when anything that it is made of changes, and only then.
func TestADigestTellsWhatASandboxIsMadeOf(t *testing.T) {
	base := Template{Image: "i", Tier: "gvisor", Limits: Limits{1, 2, 3, 4, 5, 6, 7}}
	seen := map[string]string{}
	for name, change := range map[string]func(*Template){
		"itself": func(*Template) {}, "image": func(t *Template) { t.Image = "j" }, "tier": func(t *Template) { t.Tier = "container" },
		"cpu": func(t *Template) { t.Limits.CPUMillis++ }, "memory": func(t *Template) { t.Limits.MemoryBytes++ }, "pids": func(t *Template) { t.Limits.Pids++ },
		"disk": func(t *Template) { t.Limits.DiskBytes++ }, "bytes": func(t *Template) { t.Limits.DiskBytesPerSecond++ },
		"ops": func(t *Template) { t.Limits.DiskOpsPerSecond++ }, "files": func(t *Template) { t.Limits.OpenFiles++ },
	} {
		c := base
		change(&c)
		terms, err := c.terms("default")
		must(t, err)
		d := digest(terms)
		if other, ok := seen[d]; ok {
			t.Errorf("%s and %s have the same digest", name, other)
		}
		seen[d] = name
		if again, _ := c.terms("default"); digest(again) != d {
			t.Errorf("%s: another digest the second time", name)
		}
	}
}

func TestAPoolIsFilledShownAndEnded(t *testing.T) {
	w := newWorld(t, "h1", "h2", "h3")
	w.start()
	must(t, w.apply(six))
	w.until("six wait", func() bool { return w.ready() == 6 })
	w.until("the pool says so", func() bool { return w.show("default").GetWarm() == 6 })
	if st := w.show("default"); st.GetGoal() != 6 || st.GetUnhealthy() != "" || len(st.GetHosts()) != 3 || st.GetSpec().GetCeiling() != 8 {
		t.Errorf("it stands so: %v", st)
	}
	for _, h := range w.hosts {
		if n := h.ready(); n != 2 {
			t.Errorf("%s has %d of 6", h.name, n)
		}
	}
	w.until("an event tells it", func() bool { return strings.Contains(w.told(), "filled") })
	_, err := bus.Invoke[*poolv1.RemoveReply](bustest.Context(t), w.op, "pool", "remove", &poolv1.RemoveRequest{Template: "default"})
	must(t, err)
	w.until("nothing is left", func() bool { return w.ready() == 0 })
	w.until("it is forgotten", func() bool {
		_, err := bus.Invoke[*poolv1.ShowReply](bustest.Context(t), w.op, "pool", "show", &poolv1.ShowRequest{Template: "default"})
		return errs.Is(err, errkind.NotFound)
	})
	if most := w.most("default"); most > 8 {
		t.Errorf("%d existed at once, above the ceiling", most)
	}
}

// told lists the names of the stored events of pools so far.
func (w *world) told() string {
	if w.events == nil {
		var err error
		w.events, err = w.op.JetStream().OrderedConsumer(bustest.Context(w.t), "BERTH_FLEET", jetstream.OrderedConsumerConfig{FilterSubjects: []string{"berth.v1.pool.>"}})
		must(w.t, err)
	}
	msgs, err := w.events.FetchNoWait(100)
	must(w.t, err)
	for m := range msgs.Messages() {
		ev := &poolv1.Event{}
		must(w.t, bus.Decode(m.Data(), m.Headers().Get("Content-Type"), ev))
		p, err := subjects.ParsePoolEvent(m.Subject())
		must(w.t, err)
		if p.Event != ev.GetWhat() || string(p.Template) != ev.GetTemplate() || ev.GetReason() == "" {
			w.t.Errorf("%s says %v", m.Subject(), ev)
		}
		w.heard = append(w.heard, ev.GetWhat())
	}
	return strings.Join(w.heard, " ")
}

// A file that is wrong anywhere changes nothing, and its line is named.
func TestARefusedFileChangesNothing(t *testing.T) {
	w := newWorld(t, "h1")
	w.start()
	for _, file := range []string{
		six + "  - template: nowhere\n    minimum: 1\n    ceiling: 2\n",
		"pools:\n  - template: default\n    minimum: 9\n    ceiling: 4\n",
		"pools:\n  - template: default\n    minimum: -1\n    ceiling: 4\n",
		"pools:\n  - template: default\n    minimum: 1\n    ceiling: 4\n    colour: red\n",
	} {
		err := w.apply(file)
		if !errs.Is(err, errkind.Invalid) || !strings.Contains(err.Error(), "line ") {
			t.Errorf("%q: %v", file, err)
		}
	}
	reply, err := bus.Invoke[*poolv1.ApplyReply](bustest.Context(t), w.op, "pool", "apply", &poolv1.ApplyRequest{File: []byte(six), DryRun: true})
	must(t, err)
	if len(reply.GetPools()) != 1 || reply.GetPools()[0].GetGoal() != 6 || len(reply.GetPools()[0].GetPlan()) == 0 {
		t.Errorf("a dry run says %v", reply.GetPools())
	}
	all, err := bus.Invoke[*poolv1.ShowReply](bustest.Context(t), w.op, "pool", "show", &poolv1.ShowRequest{})
	must(t, err)
	if len(all.GetPools()) != 0 {
		t.Errorf("there are pools: %v", all.GetPools())
	}
}

func TestTheConfigurationDeclaresPools(t *testing.T) {
	w := newWorld(t, "h1")
	w.cfg.Pools = filepath.Join(t.TempDir(), "pools.yaml")
	must(t, os.WriteFile(w.cfg.Pools, []byte(strings.Replace(six, "minimum: 6", "minimum: 9", 1)), 0o600))
	if err := w.cfg.Validate(); err == nil || !strings.Contains(err.Error(), w.cfg.Pools+": line 3") {
		t.Errorf("a file that is wrong: %v", err)
	}
	must(t, os.WriteFile(w.cfg.Pools, []byte(six), 0o600))
	must(t, w.cfg.Validate())
	w.start()
	w.until("six wait", func() bool { return w.ready() == 6 })
}

// The ceiling is what holds the memory of hosts together: a leader that dies in the middle of a
// preparation must not make its successor prepare the same again.
func TestALeaderThatDiesMidPrepareNeverExceedsTheCeiling(t *testing.T) {
	w := newWorld(t, "h1", "h2", "h3")
	for _, h := range w.hosts {
		h.set(func(h *fakeHost) { h.slow = 150 * time.Millisecond })
	}
	now := w.start()
	must(t, w.apply(strings.Replace(six, "ceiling: 8", "ceiling: 6", 1)))
	next := w.start()
	var before uint64
	for range 4 {
		w.until("a new leader has something prepared", func() bool { return w.begun() > before })
		before = w.begun()
		if next.kv.leads(now.kv) {
			now, next = next, now
		}
		now.kill()
		w.until("what it had begun waits", func() bool { return w.ready() > 0 })
		for _, h := range w.hosts {
			for h.claim() != "" {
			}
		}
		now, next = next, w.start()
	}
	next.stop()
	w.until("six wait", func() bool { return w.ready() == 6 })
	if most := w.most("default"); most > 6 {
		t.Errorf("%d existed at once, above the ceiling of 6", most)
	}
}

// begun is the latest term in which a preparation began.
func (w *world) begun() (term uint64) {
	for _, h := range w.hosts {
		h.set(func(h *fakeHost) { term = max(term, h.begun) })
	}
	return term
}

// A leader that cannot renew, and whose seat was taken meanwhile, has hosts do nothing any more.
func TestADeposedLeaderActsNoMore(t *testing.T) {
	w := newWorld(t, "h1", "h2")
	first := w.start()
	must(t, w.apply(strings.Replace(six, "ceiling: 8", "ceiling: 6", 1)))
	w.until("six wait", func() bool { return w.ready() == 6 })
	before := w.begun()
	w.start()
	first.kv.set(true, false)
	w.until("the second is heard", func() bool { return w.term() > before })
	for _, h := range w.hosts {
		for h.claim() != "" {
		}
	}
	w.until("the second has made new ones", func() bool { return w.ready() == 6 && w.begun() > before })
	first.kv.set(false, false)
	w.until("one of them answers", func() bool { return w.show("default").GetWarm() == 6 })
	first.stop()
	if most := w.most("default"); most > 6 {
		t.Errorf("%d existed at once, above the ceiling of 6", most)
	}
	if w.begun() != w.term() {
		t.Errorf("the last preparation is of term %d, and %d leads", w.begun(), w.term())
	}
}

// term is the latest that any host has heard of.
func (w *world) term() (term uint64) {
	for _, h := range w.hosts {
		h.set(func(h *fakeHost) { term = max(term, h.term) })
	}
	return term
}

func TestAHungHostHoldsUpNobodyElse(t *testing.T) {
	w := newWorld(t, "h1", "h2", "h3")
	w.hosts["h2"].set(func(h *fakeHost) { h.hangs = true })
	w.start()
	must(t, w.apply(six))
	w.until("the others have their part", func() bool { return w.hosts["h1"].ready() >= 2 && w.hosts["h3"].ready() >= 2 })
	must(t, w.apply(strings.Replace(six, "default", "other", 1)))
	w.until("they have that of another pool too", func() bool { return w.hosts["h1"].ready() >= 4 && w.hosts["h3"].ready() >= 4 })
	if most := w.most("default"); most > 8 {
		t.Errorf("%d existed at once, above the ceiling", most)
	}
}

// A host that refuses is asked again, ever more slowly, and the pool says why.
func TestAPoolThatCannotBeFilledSaysWhy(t *testing.T) {
	w := newWorld(t, "h1")
	w.hosts["h1"].set(func(h *fakeHost) { h.fails = errs.E("", errkind.Internal, "", "the image is broken") })
	w.start()
	must(t, w.apply(six))
	w.until("it says why", func() bool { return strings.Contains(w.show("default").GetUnhealthy(), "the image is broken") })
	w.until("an event tells it", func() bool { return strings.Contains(w.told(), "unhealthy") })
	w.hosts["h1"].set(func(h *fakeHost) {
		if h.asked > 12 {
			t.Errorf("it was asked %d times", h.asked)
		}
		h.fails = nil
	})
	w.until("it is filled when that is over", func() bool { return w.ready() == 6 })
}

// The store is gone for 4 to 8 s when a node of the bus dies; opens must not notice.
func TestAReservationIsAnsweredFromMemory(t *testing.T) {
	w := newWorld(t, "h1", "h2")
	i := w.start()
	must(t, w.apply(six))
	w.until("six wait", func() bool { return w.show("default").GetWarm() == 6 })
	i.kv.set(true, false)
	time.Sleep(2 * w.cfg.Lease) // that is what is tested: the lease has run out
	before := w.hosts["h1"].prepared() + w.hosts["h2"].prepared()
	for n := range 3 {
		r, err := w.reserve("acme")
		must(t, err)
		if r.GetVerdict() != poolv1.Verdict_VERDICT_RESERVED || w.hosts[r.GetHost()] == nil {
			t.Fatalf("reservation %d: %v", n, r)
		}
		warm := w.hosts[r.GetHost()].claim()
		_, err = bus.Invoke[*poolv1.SettleReply](bustest.Context(t), w.sched, "pool", "settle", &poolv1.SettleRequest{Reservation: r.GetReservation(), Tenant: "acme",
			Session: "s1", Template: "default", Tier: corev1.Tier_TIER_NULL, Host: r.GetHost(), Warm: warm})
		must(t, err)
	}
	if err := w.apply(six); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("what cannot be stored is declared: %v", err)
	}
	if n := w.hosts["h1"].prepared() + w.hosts["h2"].prepared(); n != before {
		t.Errorf("%d were prepared by a leader whose lease has run out", n-before)
	}
	i.kv.set(false, false)
	w.until("what was claimed is made again", func() bool { return w.ready() == 6 })
	w.until("the claims are told", func() bool { return strings.Count(w.told(), "claimed") >= 3 })
}

func (h *fakeHost) prepared() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked
}

// scheduler tells a pool that waits from one that is not there by an answer to nothing.
func TestAProbeIsAnsweredAtOnce(t *testing.T) {
	w := newWorld(t)
	w.start()
	_, err := bus.Invoke[*poolv1.ReserveReply](bustest.Context(t), w.sched, "pool", "reserve", &poolv1.ReserveRequest{})
	if !errs.Is(err, errkind.Invalid) {
		t.Errorf("%v", err)
	}
	r, err := w.reserve("acme")
	must(t, err)
	if r.GetVerdict() != poolv1.Verdict_VERDICT_NO_POOL {
		t.Errorf("without a pool: %v", r)
	}
}

// A session that waits for a warm one gets the next that is made, and one whose wait is over starts
// cold; who went away holds none up.
func TestAnAskWaitsForTheNext(t *testing.T) {
	w := newWorld(t, "h1")
	w.hosts["h1"].set(func(h *fakeHost) { h.slow = 300 * time.Millisecond })
	w.start()
	must(t, w.apply("pools:\n  - template: default\n    minimum: 1\n    ceiling: 1\n    in_flight: 1\n    share: 1\n    wait: 1s\n"))
	r, err := w.reserve("acme")
	must(t, err)
	if r.GetVerdict() != poolv1.Verdict_VERDICT_RESERVED || r.GetWaited().AsDuration() <= 0 {
		t.Errorf("the first: %v", r)
	}
	r, err = w.reserve("acme")
	must(t, err)
	if r.GetVerdict() != poolv1.Verdict_VERDICT_EXHAUSTED {
		t.Errorf("the second: %v", r)
	}
}

// What waits and is of no pool any more holds memory for nobody.
func TestWhatIsOfNoPoolIsRetired(t *testing.T) {
	w := newWorld(t, "h1")
	id := ids.NewWarmID().String()
	w.hosts["h1"].warm[id] = &hostv1.WarmSandbox{Warm: id, Template: "gone", Tier: corev1.Tier_TIER_NULL, State: hostv1.WarmState_WARM_STATE_READY}
	w.start()
	w.until("the stray is gone", func() bool { return w.ready() == 0 })
}

// A leader whose process stood still must not undo what its successor stored.
func TestAnEarlierLeaderStoresNothing(t *testing.T) {
	w := newWorld(t)
	conn := bustest.Connect(t, w.bus, subjects.Service("pool"))
	bucket, err := conn.OpenBucket(t.Context(), bucketName)
	must(t, err)
	old, next := store{kv: bucket, term: 5}, store{kv: bucket, term: 9}
	_, rev, err := old.open(t.Context(), "caps.default", &value{})
	must(t, err)
	rev, err = old.put(t.Context(), "caps.default", value{Caps: core.Caps{"h1": 3}}, rev)
	must(t, err)
	v, at, err := next.open(t.Context(), "caps.default", &value{})
	must(t, err)
	if v.Caps["h1"] != 3 {
		t.Errorf("the successor reads %v", v)
	}
	if _, err := old.put(t.Context(), "caps.default", value{Caps: core.Caps{"h1": 7}}, rev); !errs.Is(err, errkind.NotLeader) {
		t.Errorf("the earlier one: %v", err)
	}
	if _, _, err := old.open(t.Context(), "caps.default", &value{}); !errs.Is(err, errkind.NotLeader) {
		t.Errorf("the earlier one opens: %v", err)
	}
	lost := &flakyKV{kv: bucket, loses: true}
	next.kv = lost
	if _, err := next.put(t.Context(), "caps.default", value{Caps: core.Caps{"h1": 4}}, at); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("a lost answer: %v", err)
	}
	lost.set(false, false)
	if _, err := next.put(t.Context(), "caps.default", value{Caps: core.Caps{"h1": 5}}, at); err != nil {
		t.Errorf("its own write is in its way: %v", err)
	}
}

// The seat is taken over after a lease of silence and not before, and a renewal whose answer was lost
// ends no leadership.
func TestTheSeatIsTakenAfterALeaseOfSilence(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	conn := bustest.Connect(t, w.bus, subjects.Service("pool"))
	bucket, err := conn.OpenBucket(t.Context(), bucketName)
	must(t, err)
	a := &flakyKV{kv: bucket}
	seat := func(kv kv, name string) *election {
		return &election{kv: kv, instance: name, lease: 2 * time.Second, every: 50 * time.Millisecond, log: bustest.Log(t)}
	}
	first := seat(a, "a")
	ta := first.take(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	lost := make(chan bool, 1)
	go func() { lost <- first.keep(ctx, ta, newSignal()) }()
	taken := make(chan *tenure, 1)
	second := seat(bucket, "b")
	go func() { taken <- second.take(t.Context()) }()
	a.set(false, true)
	time.Sleep(300 * time.Millisecond) // some renewals without an answer
	a.set(false, false)
	select {
	case <-taken:
		t.Fatal("the seat of one that renews was taken")
	case <-lost:
		t.Fatal("a lost answer ended the leadership")
	case <-time.After(2 * first.lease):
	}
	if !ta.holds(first.lease) {
		t.Error("it does not hold what it renewed")
	}
	cancel()
	<-lost
	tb := <-taken
	if tb.term <= ta.term {
		t.Errorf("term %d follows %d", tb.term, ta.term)
	}
	if ta.holds(first.lease) {
		t.Error("the earlier one still holds the seat that another took")
	}
	if !first.keep(t.Context(), ta, newSignal()) {
		t.Error("the earlier one renews another's seat")
	}
	second.leave(tb)
	third := seat(bucket, "c")
	third.lease = time.Hour
	if tc := third.take(bustest.Context(t)); tc == nil || tc.term <= tb.term {
		t.Error("a seat that was left is not taken at once")
	}
}

// Many asks at once are all answered, and no sandbox is reserved twice.
func TestNothingIsReservedTwice(t *testing.T) {
	w := newWorld(t, "h1", "h2", "h3")
	w.start()
	must(t, w.apply(six))
	w.until("six wait", func() bool { return w.show("default").GetWarm() == 6 })
	var mu sync.Mutex
	var wg sync.WaitGroup
	per, ids := map[string]int{}, map[string]bool{}
	for n := range 40 {
		wg.Go(func() {
			r, err := w.reserve(fmt.Sprint("tenant", n%4))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if r.GetVerdict() == poolv1.Verdict_VERDICT_RESERVED {
				per[r.GetHost()]++
				if ids[r.GetReservation()] {
					t.Errorf("%s was given twice", r.GetReservation())
				}
				ids[r.GetReservation()] = true
			}
		})
	}
	wg.Wait()
	for name, n := range per {
		if had := w.hosts[name].ready(); n > had {
			t.Errorf("%s: %d reserved of %d", name, n, had)
		}
	}
}
