package credentials

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials/internal/platform/platformtest"
	"github.com/nats-io/nats.go/jetstream"
)

const inVault = "hashivault://berth" // a fake of Vault

func (w *world) say(r *schedulerv1.SessionRecord) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.record = r
}

func (w *world) revoke(t *testing.T, gen uint64) error {
	_, err := bus.Invoke[*credentialsv1.RevokeReply](t.Context(), w.sched, "credentials", "revoke",
		&credentialsv1.RevokeRequest{Session: ref(gen, gen+1), Reason: "deleted"})
	return err
}

// forget takes away all that credentials itself knows of a deleted
// generation: the revocation on its list and the mark of the destroyed key.
func (w *world) forget(t *testing.T) {
	t.Helper()
	conn := bustest.Connect(t, w.bus, subjects.Service("credentials"))
	for _, name := range []string{"BERTH_CREDENTIALS", "BERTH_DATAKEYS"} {
		b, err := conn.OpenBucket(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range bucketKeys(t, w.bus, name) {
			if strings.HasPrefix(key, revokedPrefix) {
				if err := b.Delete(t.Context(), key); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := b.KV().PurgeDeletes(t.Context(), jetstream.DeleteMarkersOlderThan(-1)); err != nil {
			t.Fatal(err)
		}
	}
}

func bucketKeys(t *testing.T, e *bus.Embedded, name string) []string {
	t.Helper()
	b, err := bustest.Connect(t, e, subjects.Service("credentials")).OpenBucket(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := b.Keys(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func (w *world) wantNoDataKey(t *testing.T) {
	t.Helper()
	if keys := bucketKeys(t, w.bus, "BERTH_DATAKEYS"); len(keys) != 0 {
		t.Errorf("there are data keys: %v", keys)
	}
}

// Wake and restore ask while waking, snapshots while active, the last
// snapshot while sleeping; nobody else gets the key.
func TestDataKeyInStatesWithComputeOnly(t *testing.T) {
	w := newWorld(t)
	want := map[corev1.State]bool{corev1.State_STATE_WAKING: true, corev1.State_STATE_ACTIVE: true, corev1.State_STATE_SLEEPING: true}
	for n := range corev1.State_name {
		state := corev1.State(n)
		w.say(&schedulerv1.SessionRecord{Session: ref(10, 12), State: state, Host: "h1"})
		_, err := w.dataKey(t, w.host, ref(10, 12))
		if want[state] && err != nil {
			t.Errorf("%s: %v", state, err)
		}
		if !want[state] && !errs.Is(err, errkind.StaleEpoch) {
			t.Errorf("%s: %v", state, err)
		}
	}
}

func TestWithTheKeyServiceAwayDataKeysAreUnavailableAndDeletionWorks(t *testing.T) {
	f := platformtest.Vault(t)
	w := newWorldWith(t, inVault)
	first, err := w.dataKey(t, w.host, ref(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	f.Fail(platformtest.Answer(http.StatusServiceUnavailable, `{"errors":["Vault is sealed"]}`))
	_, err = w.dataKey(t, w.host, ref(10, 12)) // none is kept in memory
	wantKind(t, err, errkind.Unavailable)
	w.say(&schedulerv1.SessionRecord{Session: ref(20, 21), State: corev1.State_STATE_WAKING, Host: "h1"})
	_, err = w.dataKey(t, w.host, ref(20, 21))
	wantKind(t, err, errkind.Unavailable)
	if keys := bucketKeys(t, w.bus, "BERTH_DATAKEYS"); len(keys) != 1 {
		t.Errorf("made or destroyed: %v", keys)
	}
	if _, err := w.mint(t, w.mintReq(20, 21)); err != nil {
		t.Errorf("grants do not need it: %v", err)
	}
	f.Fail(nil)
	w.say(&schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_WAKING, Host: "h1"})
	if again, err := w.dataKey(t, w.host, ref(10, 12)); err != nil || !bytes.Equal(first, again) {
		t.Error("the key is another one", err)
	}
	f.Fail(platformtest.Answer(http.StatusServiceUnavailable, `{"errors":["Vault is sealed"]}`))
	if err := w.revoke(t, 10); err != nil {
		t.Errorf("a session cannot be deleted: %v", err)
	}
	w.wantNoDataKey(t)
}

// The figures of ADR 12.
func TestCallsOfTheKeyServicePerWake(t *testing.T) {
	f := platformtest.Vault(t)
	w := newWorldWith(t, inVault)
	for i, want := range []int64{3, 1, 1} {
		before := f.Calls.Load()
		if _, err := w.dataKey(t, w.host, ref(10, 12)); err != nil {
			t.Fatal(err)
		}
		if got := f.Calls.Load() - before; got != want {
			t.Errorf("request %d made %d calls, want %d", i+1, got, want)
		}
	}
}

// A request is held at the key service while the session is deleted, and
// everything by which credentials would know that is gone when it goes on, as
// after a process that stood still for hours. It makes no new key.
func TestARequestThatOutlivesTheRevocationMakesNoKey(t *testing.T) {
	f := platformtest.Vault(t)
	w := newWorldWith(t, inVault)
	for name, after := range map[string]*schedulerv1.SessionRecord{
		"the session is deleted": {Session: ref(10, 12), State: corev1.State_STATE_DELETED},
		"a new generation lives": {Session: ref(20, 21), State: corev1.State_STATE_WAKING, Host: "h1"},
		"scheduler knows none":   nil,
	} {
		for _, forget := range []bool{false, true} {
			w.say(&schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_WAKING, Host: "h1"})
			w.stop()
			w.forget(t)
			w.run(t)
			f.Fail(func(rw http.ResponseWriter, r *http.Request) {
				f.Fail(nil)
				w.say(after)
				if err := w.revoke(t, 10); err != nil {
					t.Error(err)
				}
				if forget {
					w.forget(t)
				}
				f.Serve(rw, r)
			})
			_, err := w.dataKey(t, w.host, ref(10, 12))
			if !errs.Is(err, errkind.Superseded) {
				t.Errorf("%s, forgotten %v: %v", name, forget, err)
			}
			w.wantNoDataKey(t)
		}
	}
}

// That the epoch moved on does not destroy a key: the next owner may have
// read it.
func TestANewEpochDuringTheFirstRequestKeepsTheKey(t *testing.T) {
	f := platformtest.Vault(t)
	w := newWorldWith(t, inVault)
	f.Fail(func(rw http.ResponseWriter, r *http.Request) {
		f.Fail(nil)
		w.say(&schedulerv1.SessionRecord{Session: ref(10, 14), State: corev1.State_STATE_WAKING, Host: "h2"})
		f.Serve(rw, r)
	})
	if _, err := w.dataKey(t, w.host, ref(10, 12)); err != nil {
		t.Logf("the old owner: %v", err)
	}
	a, err := w.dataKey(t, w.othr, ref(10, 14))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := w.dataKey(t, w.othr, ref(10, 14)); err != nil || !bytes.Equal(a, b) {
		t.Error("the key changed", err)
	}
}

// Requests race with a revoke: what is given out is one key, and nothing is
// given out or left once the revoke was acknowledged.
func TestRequestsRacingWithARevoke(t *testing.T) {
	w := newWorld(t)
	for round := range uint64(20) {
		gen := 10 * (round + 1)
		w.say(&schedulerv1.SessionRecord{Session: ref(gen, gen+1), State: corev1.State_STATE_WAKING, Host: "h1"})
		var (
			mu   sync.Mutex
			keys = map[string]bool{}
			wg   sync.WaitGroup
		)
		for range 8 {
			wg.Go(func() {
				key, err := w.dataKey(t, w.host, ref(gen, gen+1))
				if err != nil {
					wantKind(t, err, errkind.Superseded)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				keys[string(key)] = true
			})
		}
		if err := w.revoke(t, gen); err != nil {
			t.Fatal(err)
		}
		_, err := w.dataKey(t, w.host, ref(gen, gen+1))
		wantKind(t, err, errkind.Superseded)
		wg.Wait()
		if len(keys) > 1 {
			t.Errorf("one generation had %d keys", len(keys))
		}
		w.wantNoDataKey(t)
	}
}

// Long after the delete nothing in credentials tells of it any more;
// scheduler's word refuses, in whichever form it comes.
func TestAKeyIsNotMadeAgainOnceTheRevocationIsForgotten(t *testing.T) {
	w := newWorld(t)
	if _, err := w.dataKey(t, w.host, ref(10, 12)); err != nil {
		t.Fatal(err)
	}
	if err := w.revoke(t, 10); err != nil {
		t.Fatal(err)
	}
	w.stop()
	w.forget(t)
	w.run(t)
	for name, said := range map[string]struct {
		record *schedulerv1.SessionRecord
		want   errkind.Kind
	}{
		"deleted":          {&schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_DELETED, Host: "h1"}, errkind.StaleEpoch},
		"deleting":         {&schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_DELETING, Host: "h1"}, errkind.StaleEpoch},
		"a new generation": {&schedulerv1.SessionRecord{Session: ref(20, 21), State: corev1.State_STATE_ACTIVE, Host: "h1"}, errkind.StaleEpoch},
		"never placed":     {&schedulerv1.SessionRecord{Session: &corev1.SessionRef{Tenant: "acme", Session: string(session)}, State: corev1.State_STATE_NEW}, errkind.NotFound},
		"nothing":          {nil, errkind.NotFound},
	} {
		w.say(said.record)
		if _, err := w.dataKey(t, w.host, ref(10, 12)); !errs.Is(err, said.want) {
			t.Errorf("scheduler says %s: %v", name, err)
		}
	}
	w.wantNoDataKey(t)
}

// The wrapped record is nowhere in the bus's files after a revoke, also with
// other records around it, after a restart and after marks were removed.
func TestDestroyedRecordStaysGoneFromTheFiles(t *testing.T) {
	platformtest.Vault(t)
	w := newWorldWith(t, inVault)
	b, err := bustest.Connect(t, w.bus, subjects.Service("credentials")).OpenBucket(t.Context(), "BERTH_DATAKEYS")
	if err != nil {
		t.Fatal(err)
	}
	records := map[uint64][]byte{}
	for _, gen := range []uint64{10, 20, 30} {
		w.say(&schedulerv1.SessionRecord{Session: ref(gen, gen+1), State: corev1.State_STATE_WAKING, Host: "h1"})
		if _, err := w.dataKey(t, w.host, ref(gen, gen+1)); err != nil {
			t.Fatal(err)
		}
		if records[gen], _, err = b.Get(t.Context(), "acme."+string(session)+"."+genName(gen)); err != nil {
			t.Fatal(err)
		}
		if !found(t, w.store, records[gen]) {
			t.Fatal("the test looks in the wrong place")
		}
	}
	if err := w.revoke(t, 20); err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		// Half a record is enough to be found: the wrapped key is in the first.
		if r := records[20]; found(t, w.store, r[:len(r)/2]) || found(t, w.store, r[len(r)/2:]) {
			t.Errorf("%s the destroyed record is in a file", when)
		}
		for _, gen := range []uint64{10, 30} {
			if !found(t, w.store, records[gen]) {
				t.Errorf("%s generation %d has lost its key", when, gen)
			}
		}
	}
	check("after the revoke")
	w.stop()
	w.run(t)
	check("after a restart")
	w.forget(t)
	check("after its mark was removed")
}

func genName(gen uint64) string {
	return ids.Generation{Incarnation: 1, Index: gen}.String()
}

func BenchmarkDataKey(b *testing.B) {
	w := newWorld(b)
	req := &credentialsv1.DataKeyRequest{Session: ref(10, 12), HostKey: w.box.Public()}
	ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
	defer cancel()
	for b.Loop() {
		if _, err := bus.Invoke[*credentialsv1.DataKeyReply](ctx, w.host, "credentials", "datakey", req); err != nil {
			b.Fatal(err)
		}
	}
}
