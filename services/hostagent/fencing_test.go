package hostagent

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// What keeps a place from acting for somebody who does not own the session.
const (
	byLease   = "the lease is asked"
	byPlaces  = "each of its places is listed by itself"
	byTaking  = "it only takes compute away, or what is deleted for good"
	byReading = "it reads, or tells what happened; scheduler compares the epoch"
)

// places are all places of this host that act on a session or for one: commands (rpc), steps of a wake
// and of a sleep, calls of others, and what asks the lease by itself. A new one fails the test until it
// has a row here; one that is fenced by the lease is tried without it in TestNoEffectWithoutALease.
var places = map[string]string{
	"rpc.wake": byPlaces, "rpc.sleep": byPlaces, "rpc.grow": byPlaces, "rpc.delete": byTaking,
	"rpc.activity": byReading, "rpc.inventory": byReading, "rpc.snapshots": byReading,
	"rpc.prepare": byPlaces, "rpc.retire": byTaking, "rpc.warm": byReading, // of these: also the term of the pool
	"rpc.notice": byPlaces,
	"rpc.verify": byReading, // it may note that the local image is to be kept, which is never wrong

	"prepare": byLease,
	"wake":    byLease, "sleep": byLease, "grow": byLease, "admit": byLease, "checkpoint": byLease, "snapshot": byLease,
	"disk.drop": byLease, "commit_manifest": byLease, "data_key": byLease, "store.sweep": byLease,

	"bind": byLease, "notice": byLease, // and by the exact generation and epoch of the sandbox
	"host.network": byLease, "host.bind": byLease, "host.claim.network": byLease,
	"call.gate.bind": byPlaces, "call.gate.sync": byReading, "call.gate.unbind": byTaking, // all with the end of the lease

	"host.claim": byLease, "host.claim.place": byLease, "host.claim.bind": byLease, "host.claim.guest": byLease,
	"host.image": byLease, "host.disk.attach": byLease, "host.place": byLease, "host.driver.create": byLease, "host.guest.hello": byLease,
	"host.store": byLease, "host.guest.quiesce": byLease, "host.driver.stop": byTaking, "host.disk.seal": byLease,

	"call.scheduler.join": byReading, "call.scheduler.lease": byReading, "call.scheduler.report": byReading,
	"call.scheduler.commit_manifest": byPlaces, "call.credentials.jwks": byReading, "call.credentials.datakey": byPlaces,
}

// TestEveryPlaceThatActsIsListed.
func TestEveryPlaceThatActsIsListed(t *testing.T) {
	found := map[string]bool{}
	files, err := filepath.Glob("*.go")
	must(t, err)
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		b, err := os.ReadFile(f)
		must(t, err)
		for form, name := range map[string]string{
			`bus\.Handle\(s, "([a-z_]+)"`: "rpc.$1", `\.may\("([^"]+)"\)`: "$1",
			`bus\.Invoke\[[^\]]*\]\(ctx, h\.conn, "([a-z_]+)", "([a-z_]+)"`: "call.$1.$2",
			`bus\.InvokeGate\[[^\]]*\]\(t?ctx, h\.conn, h\.id, "([a-z_]+)"`: "call.gate.$1",
		} {
			re := regexp.MustCompile(form)
			for _, m := range re.FindAllStringSubmatchIndex(string(b), -1) {
				found[string(re.ExpandString(nil, name, string(b), m))] = true
			}
		}
	}
	h := &host{}
	s := &session{h: h, key: key("u")}
	m := &making{s: s, req: &hostv1.WakeRequest{}}
	for _, stage := range append(m.table(), m.claimTable()...) {
		for _, step := range stage {
			found[step.Name] = true
		}
	}
	for _, step := range s.sleepTable(&operation{}, &saver.Result{}) {
		found[step.name] = true
		if step.takesAway != (places[step.name] == byTaking) {
			t.Errorf("the step %s takes away: %v; its row says: %s", step.name, step.takesAway, places[step.name])
		}
	}
	for name := range found {
		if places[name] == "" {
			t.Errorf("%s has no row: say what fences it", name)
		}
	}
	for name := range places {
		if !found[name] {
			t.Errorf("%s is listed and does not exist", name)
		}
	}
}

// leaseRig is a rig whose clock the test moves, with one session awake.
func leaseRig(t *testing.T) (*rig, *procs, *corev1.SessionRef) {
	t.Helper()
	ready := newReadyProcs(t)
	drv := ready.procs
	r := newRig(t, ready)
	r.clock = &movedClock{}
	r.sched.lease = time.Minute // nothing is lost before the test says so
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	return r, drv, one
}

func (r *rig) gate(ref *corev1.SessionRef) *gate {
	s := r.run.h.session(ids.SessionKey(ref.GetSession()))
	s.mu.Lock()
	defer s.mu.Unlock()
	return &gate{s: s, sb: s.sb, generation: s.st.Generation, epoch: s.st.Epoch}
}

// TestNoEffectWithoutALease tries what the lease fences without one: it is refused and counted, and goes
// well once the host knows again what it owns. Steps are tried in the tests below.
func TestNoEffectWithoutALease(t *testing.T) {
	r, _, one := leaseRig(t)
	h := r.run.h
	c := r.client(one)
	c.exec("x0", "true")
	g := r.gate(one)
	g.s.mu.Lock()
	rec := g.s.rec
	g.s.mu.Unlock()
	k := disk.Key{Session: rec.Session, Generation: rec.Generation}
	short := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		return f(ctx)
	}
	stored := &host{lease: h.lease, meters: h.meters, log: h.log, ctx: t.Context(), vault: askingVault{}, sweeping: make(chan struct{}, 1)}
	linked := &host{cfg: h.cfg, lease: h.lease, meters: h.meters, log: h.log, ready: h.ready, sessions: map[ids.SessionKey]*session{}}
	mem := newMemLinks()
	link, err := mem.Make(t.Context(), "b1", false)
	must(t, err)
	linked.net = &nets{h: linked, links: mem, all: map[ids.SandboxID]*binding{}}
	acts := map[string]func() error{
		"wake": func() error { _, err := r.wake(ref("bob", 7, 8), nil); return err },
		"sleep": func() error {
			_, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", &hostv1.SleepRequest{Session: one, IdleSince: timestampIn(-time.Hour)})
			return err
		},
		"grow": func() error {
			_, err := h.rpcGrow(t.Context(), bus.Request{}, &hostv1.GrowRequest{Session: one, SizeBytes: 2 << 30})
			return err
		},
		"prepare": func() error {
			_, err := h.rpcPrepare(t.Context(), bus.Request{}, prepareOf(ids.NewWarmID(), 1))
			return err
		},
		"admit": func() error {
			done, err := g.Admit(t.Context())
			if err == nil {
				done()
			}
			return err
		},
		"checkpoint": func() error { _, err := g.Checkpoint(t.Context()); return err },
		"snapshot":   func() error { return h.save(t.Context(), h.saving(rec), g.sb) },
		"disk.drop":  func() error { return h.dropStale(t.Context(), ref("gone", 1, 2), h.lease.now()) },
		"commit_manifest": func() error {
			return short(func(ctx context.Context) error {
				return h.commitManifest(ctx, one, &corev1.Manifest{Id: r.sched.head(one)}, false)
			})
		},
		"data_key": func() error {
			return short(func(ctx context.Context) error { _, err := h.dataKey(ctx, h.saving(rec)); return err })
		},
		"bind": func() error { return linked.net.admit(t.Context(), &binding{id: "b1", link: link}) },
		"notice": func() error {
			linked.net.put(link, &egressv1.Binding{Session: one}, false)
			must(t, makeRunFolder(linked.runFolder("b1")))
			_, err := linked.rpcNotice(t.Context(), bus.Request{}, &egressv1.NoticeRequest{Session: one, Sandbox: "b1", Notice: []byte("{}")})
			return err
		},
		"store.sweep": func() error { stored.sweepStored(h.saving(rec), "m"); return nil },
	}
	for name := range places {
		if places[name] == byLease && !strings.HasPrefix(name, "host.") && acts[name] == nil {
			t.Errorf("%s is not tried", name)
		}
	}
	r.suspend()
	for name, act := range acts {
		r.noted.clear()
		before := r.commits()
		if err := act(); err == nil && name != "store.sweep" {
			t.Errorf("%s went well without a lease", name)
		}
		if !r.noted.have("unleased", name) {
			t.Errorf("%s: the refusal is not counted: %v", name, r.noted.all)
		}
		if r.commits() != before {
			t.Errorf("%s: a manifest was committed", name)
		}
	}
	r.resumed(t)
	for name, act := range acts {
		r.noted.clear()
		if err := act(); err != nil {
			t.Errorf("%s with a lease again: %v", name, err)
		}
		if r.noted.have("unleased", name) {
			t.Errorf("%s was refused with a lease", name)
		}
	}
	if _, err := h.disks.Get(k); err != nil {
		t.Error(err)
	}
}

type askingVault struct{ vault }

func (askingVault) Sweep(_ context.Context, _ archive.Disk, _ ids.Epoch, _ string, alive func() error, _ ...string) (out archive.Swept, err error) {
	return out, alive()
}

func (r *rig) commits() (n int) {
	r.sched.with(func() { n = r.sched.commits })
	return n
}

// TestSuspendedInTheMiddleOfAWake: after each step the machine is suspended beyond the lease. The next
// step is refused, nothing is left, and the same epoch goes well once the host goes on.
func TestSuspendedInTheMiddleOfAWake(t *testing.T) {
	r, drv, _ := leaseRig(t)
	stages := [][]string{{"host.image"}, {"host.disk.attach"}, {"host.claim"}, {"host.place"}, {"host.network"}, {"host.driver.create"}, {"host.guest.hello", "host.bind"}}
	for i, stage := range stages[1:] {
		r.noted.clear()
		r.run.h.steps.Fault = func(step string) error {
			if step == stages[i][0] {
				r.suspend()
			}
			return nil
		}
		next := ref("bob"+stage[0], 7, 8)
		if _, err := r.wake(next, nil); !errs.Is(err, errkind.Unavailable) {
			t.Errorf("%s: the wake gave %v", stage, err)
		}
		for _, name := range stage {
			if !r.noted.have("unleased", name) {
				t.Errorf("%s was not refused: %v", name, r.noted.all)
			}
		}
		if drv.count() != 1 {
			t.Errorf("%s: %d sandboxes", stage, drv.count())
		}
		r.run.h.steps.Fault = nil
		r.resumed(t)
		r.mustWake(next, nil)
		must(t, r.delete(next))
	}
}

// TestSuspendedInTheMiddleOfASleep: nothing is committed without a lease, also not what is on its way to
// the commit; the sleep goes on once the host knows that it still owns the session.
func TestSuspendedInTheMiddleOfASleep(t *testing.T) {
	for _, at := range []string{"host.store", "host.guest.quiesce", "host.driver.stop"} {
		t.Run(at, func(t *testing.T) {
			r, drv, one := leaseRig(t)
			r.client(one).exec("x1", "true")
			r.run.h.steps.Fault = func(step string) error {
				if step == at {
					r.suspend()
				}
				return nil
			}
			if _, err := r.sleep(one, time.Time{}, true); err == nil {
				t.Fatal("a sleep without a lease was acknowledged")
			}
			if r.commits() != 0 {
				t.Error("a manifest was committed")
			}
			r.run.h.steps.Fault = nil
			r.sched.set(one, corev1.State_STATE_SLEEPING)
			r.resumed(t)
			if got, err := r.sleep(one, time.Time{}, true); err != nil || got.GetManifest().GetId() == "" {
				t.Errorf("%v %v", got, err)
			}
			if drv.count() != 0 {
				t.Errorf("%d sandboxes", drv.count())
			}
		})
	}
}

// heldSaves suspends the machine while a snapshot is on its way to the store.
type heldSaves struct {
	saves
	upload func()
	h      *host
}

func (s heldSaves) Save(ctx context.Context, on saver.Session) (saver.Result, error) {
	s.upload()
	return s.saves.Save(ctx, on)
}

// TestSuspendedInTheMiddleOfAnUpload: the snapshot is not committed without a lease.
func TestSuspendedInTheMiddleOfAnUpload(t *testing.T) {
	r, _, one := leaseRig(t)
	h := r.run.h
	g := r.gate(one)
	g.s.mu.Lock()
	rec := g.s.rec
	g.s.mu.Unlock()
	h.saves = heldSaves{h.saves, r.suspend, h}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := h.save(ctx, h.saving(rec), g.sb); err == nil || r.commits() != 0 {
		t.Errorf("%v, %d commits", err, r.commits())
	}
	h.saves = h.saves.(heldSaves).saves
	r.resumed(t)
	must(t, h.save(t.Context(), h.saving(rec), g.sb))
}

// TestWhatNamesAnotherEpochIsRefusedAndCounted, with the generation or the epoch wrong.
func TestWhatNamesAnotherEpochIsRefusedAndCounted(t *testing.T) {
	r, _, _ := leaseRig(t)
	h := r.run.h
	r.mustWake(ref("ann", 5, 7), func(w *hostv1.WakeRequest) { w.Fresh, w.LastActiveEpoch = false, ref("ann", 5, 6).GetEpoch() })
	old := ref("ann", 5, 6)
	g := r.gate(ref("ann", 5, 7))
	g.epoch = grant.EpochOf(old.GetEpoch())
	for name, act := range map[string]func() error{
		"wake": func() error {
			_, err := bus.InvokeHost[*hostv1.WakeReply](r.context(), r.ask, testHost, "wake", &hostv1.WakeRequest{Session: old, Terms: terms()})
			return err
		},
		"sleep": func() error {
			_, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", &hostv1.SleepRequest{Session: old, Force: true})
			return err
		},
		"host.grow": func() error {
			_, err := h.rpcGrow(t.Context(), bus.Request{}, &hostv1.GrowRequest{Session: old, SizeBytes: 2 << 30})
			return err
		},
		"host.activity": func() error {
			_, err := h.rpcActivity(t.Context(), bus.Request{}, &hostv1.ActivityRequest{Session: old})
			return err
		},
		"notice": func() error {
			_, err := h.rpcNotice(t.Context(), bus.Request{}, &egressv1.NoticeRequest{Session: old, Sandbox: string(driverID(old)), Notice: []byte("{}")})
			return err
		},
		"delete":          func() error { _ = r.delete(ref("ann", 4, 6)); return nil },
		"admit":           func() error { _, err := g.Admit(t.Context()); return err },
		"commit_manifest": func() error { return h.commitManifest(t.Context(), old, &corev1.Manifest{Id: "m"}, false) },
	} {
		r.noted.clear()
		if err := act(); err != nil && !errs.Is(err, errkind.StaleEpoch) || err == nil && name != "delete" {
			t.Errorf("%s: %v", name, err)
		}
		if !r.noted.have("fenced", name) {
			t.Errorf("%s: the refusal is not counted: %v", name, r.noted.all)
		}
	}
}
