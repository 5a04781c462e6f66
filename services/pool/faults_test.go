package pool

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

// A host that does not retire what it should, and says so at once, is not asked as fast as it answers.
func TestAHostThatRetiresNothingIsNotAskedWithoutEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h1")
	w.start()
	must(t, w.apply(six))
	w.until("six wait", func() bool { return w.ready() == 6 })
	h := w.hosts["h1"]
	h.set(func(h *fakeHost) { h.keeps = errs.E("", errkind.Internal, "", "its runtime is broken") })
	must(t, w.apply(strings.NewReplacer("ceiling: 8", "ceiling: 2", "minimum: 6", "minimum: 2").Replace(six)))
	w.until("it is told to retire some", func() bool { return h.asks() > 0 })
	began := h.asks()
	time.Sleep(2 * retireAgain) // that is what is tested
	if n := h.asks() - began; n > 8 {
		t.Errorf("it was asked %d times in %s", n, 2*retireAgain)
	}
	h.set(func(h *fakeHost) { h.keeps = nil })
	w.until("two are left when that is over", func() bool { return w.ready() == 2 })
}

func (h *fakeHost) asks() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.told
}

// A pool that is stored and makes no sense to this version is left alone; the others are served.
func TestOneBadRecordKeepsNoOtherPoolAway(t *testing.T) {
	w := newWorld(t, "h1")
	conn := bustest.Connect(t, w.bus, subjects.Service("pool"))
	bucket, err := conn.OpenBucket(t.Context(), bucketName)
	must(t, err)
	bad := `{"template":"other","ceiling":3,"share":0.5,"maxAge":"60s","schedule":[{"from":1,"to":2,"timeZone":"Mars/Olympus"}]}`
	raw, err := json.Marshal(value{Term: 1, Pools: []record{{Spec: json.RawMessage(bad)}, {Spec: json.RawMessage(`{"template":3}`)},
		{Spec: json.RawMessage(`{"template":"other","ceiling":3,"share":0.5,"maxAge":"60s"}`)}}})
	must(t, err)
	_, err = bucket.Create(t.Context(), specsKey, raw)
	must(t, err)
	for _, key := range []string{demandKey + "default", capsKey + "other"} {
		_, err = bucket.Create(t.Context(), key, []byte("{half"))
		must(t, err)
	}
	i := w.start()
	must(t, w.apply(six))
	w.until("six wait", func() bool { return w.ready() == 6 })
	if err := w.apply(strings.Replace(six, "default", "other", 1)); !errs.Is(err, errkind.Unavailable) || !strings.Contains(err.Error(), "the key is damaged") {
		t.Errorf("a pool of which nobody knows what hosts may have is declared: %v", err)
	}
	i.stop()
	left, _, err := bucket.Get(t.Context(), specsKey)
	must(t, err)
	if learned, _, err := bucket.Get(t.Context(), demandKey+"default"); err != nil || !json.Valid(learned) {
		t.Errorf("the demand is not kept again: %s %v", learned, err)
	}
	if !strings.Contains(string(left), "Mars/Olympus") {
		t.Errorf("what could not be read was dropped: %s", left)
	}
}

// A request that is still under way when its process ends has no channel closed under it.
func TestAnEventAfterTheEndIsLost(t *testing.T) {
	w := newWorld(t)
	x := newEvents(bustest.Connect(t, w.bus, subjects.Service("pool")), bustest.Log(t))
	x.close()
	if x.offer(event{body: &poolv1.Event{}}) {
		t.Error("it was queued")
	}
}

// A reason of which only the figures change is told once.
func TestFiguresThatChangeAreNoNews(t *testing.T) {
	e := &entry{l: &leader{server: &server{events: &events{}}, t: &tenure{}}, name: "default",
		core: core.New(core.Spec{Template: "default", Ceiling: 3, Share: 1}, core.Template{}, nil, nil, time.Now())}
	n, now := 0, time.Now()
	for i := range 60 {
		why := "no host can: h1: " + strings.Repeat("7", 1+i%9) + " bytes of memory are free there"
		n += len(e.news(core.Plan{Unhealthy: why}, now.Add(time.Duration(i)*time.Minute)))
	}
	if n != 1 {
		t.Errorf("%d events", n)
	}
	if n := len(e.news(core.Plan{Unhealthy: "there is no host"}, now.Add(2*time.Hour))) + len(e.news(core.Plan{}, now.Add(2*time.Hour))); n != 2 {
		t.Errorf("another reason and the end of it: %d events", n)
	}
}

// A reservation that is given back before any host was asked is another's at once, not after its time.
func TestAReservationThatIsGivenBackIsFree(t *testing.T) {
	w := newWorld(t, "h1")
	w.start()
	must(t, w.apply("pools:\n  - template: default\n    minimum: 1\n    ceiling: 1\n    share: 1\n"))
	w.until("one waits", func() bool { return w.show("default").GetWarm() == 1 })
	for n := range 3 {
		r, err := w.reserve("acme")
		must(t, err)
		if r.GetVerdict() != poolv1.Verdict_VERDICT_RESERVED {
			t.Fatalf("reservation %d: %v", n, r)
		}
		_, err = bus.Invoke[*poolv1.SettleReply](bustest.Context(t), w.sched, "pool", "settle", &poolv1.SettleRequest{Reservation: r.GetReservation(),
			Tenant: "acme", Session: "s1", Template: "default", Tier: corev1.Tier_TIER_NULL, Failed: true})
		must(t, err)
	}
}

// What an earlier declaration had prepared, or still prepares, counts when the pool is declared again.
func TestAPoolThatIsDeclaredAgainNeverExceedsItsCeiling(t *testing.T) {
	w := newWorld(t, "h1", "h2", "h3")
	for _, h := range w.hosts {
		h.set(func(h *fakeHost) { h.slow = 100 * time.Millisecond })
	}
	file := strings.Replace(six, "ceiling: 8", "ceiling: 6", 1)
	now := w.start()
	for n := range 10 {
		must(t, w.apply(file))
		time.Sleep(time.Duration(n) * 20 * time.Millisecond) // any moment will do
		_, err := bus.Invoke[*poolv1.RemoveReply](bustest.Context(t), w.op, "pool", "remove", &poolv1.RemoveRequest{Template: "default"})
		must(t, err)
		if n%3 == 0 {
			now.stop()
			now = w.start()
		}
		time.Sleep(time.Duration(n%4) * 50 * time.Millisecond)
	}
	must(t, w.apply(file))
	w.until("six wait", func() bool { return w.ready() == 6 })
	if most := w.most("default"); most > 6 {
		t.Errorf("%d existed at once, above the ceiling of 6", most)
	}
}
