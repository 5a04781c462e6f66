package inventory

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

func key(i int) ids.SessionKey {
	return ids.DeriveSessionKey([]byte("k"), "iss", "acme", string(rune('a'+i)), "default")
}

func full() Record {
	return Record{
		Version: 1, Tenant: "acme", Session: key(0), Generation: ids.Generation{Incarnation: 1, Index: 2},
		Epoch: ids.Epoch{Incarnation: 1, Index: 3}, Name: "default", Phase: "awake", Spent: true, Slept: true,
		LastActivity: time.Unix(5, 6).UTC(), Sandbox: "b1", Tier: "gvisor", Activated: true,
		Terms: json.RawMessage(`{"plan":"free"}`), Reply: json.RawMessage(`{"origin":1}`),
		Place: json.RawMessage(`{"network":"none"}`), Changed: time.Unix(7, 0).UTC(),
	}
}

func TestRecordsSurviveReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "inventory.db")
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	want := full()
	if err := s.Put(want); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); !errs.Is(err, errkind.Busy) {
		t.Errorf("a second open gave %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(want); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("a put after close gave %v", err)
	}
	s, err = Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	got, err := s.All()
	if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Fatalf("got %+v, %v", got, err)
	}
	if err := s.Remove(want.Session); err != nil {
		t.Fatal(err)
	}
	if got, err := s.All(); err != nil || len(got) != 0 {
		t.Fatalf("after the removal: %v, %v", got, err)
	}
}

func TestEveryFieldIsKnown(t *testing.T) {
	raw, err := json.Marshal(full())
	if err != nil {
		t.Fatal(err)
	}
	r, err := decode(raw)
	if err != nil || len(r.extra) != 0 {
		t.Errorf("not listed in fields: %v, %v", r.extra, err)
	}
}

func TestFieldsOfANewerVersionAreKept(t *testing.T) {
	s, err := Open(filepath.Join(t.TempDir(), "inventory.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	raw, _ := json.Marshal(full())
	newer := strings.Replace(string(raw), `"version":1`, `"version":9,"later":{"a":1}`, 1)
	put := func(k ids.SessionKey, v string) {
		err := s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(sessionsBucket).Put([]byte(k), []byte(v)) })
		if err != nil {
			t.Fatal(err)
		}
	}
	put(key(0), newer)
	all, err := s.All()
	if err != nil {
		t.Fatal(err)
	}
	all[0].Phase = "absent"
	if err := s.Put(all[0]); err != nil {
		t.Fatal(err)
	}
	all, err = s.All()
	if err != nil || all[0].Version != 9 || string(all[0].extra["later"]) != `{"a":1}` || all[0].Phase != "absent" {
		t.Errorf("got %+v, %v", all, err)
	}
	put(key(1), "{")
	if _, err := s.All(); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a broken record gave %v", err)
	}
}

func TestPutsShareASync(t *testing.T) {
	s, err := Open(filepath.Join(t.TempDir(), "inventory.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	var wg sync.WaitGroup
	for i := range 26 {
		wg.Go(func() {
			r := full()
			r.Session = key(i)
			for range 20 {
				if err := s.Put(r); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if all, err := s.All(); err != nil || len(all) != 26 {
		t.Errorf("%d records, %v", len(all), err)
	}
}

// TestAnOrderlyEndStoresWhatNobodyWaitedFor.
func TestAnOrderlyEndStoresWhatNobodyWaitedFor(t *testing.T) {
	for range 20 {
		path := filepath.Join(t.TempDir(), "inventory.db")
		s, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.PutSoon(full()); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		again, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if all, err := again.All(); err != nil || len(all) != 1 {
			t.Fatalf("%v %v", all, err)
		}
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
