// Package inventory is the one list of the sessions on a host and of what was made for them. It
// guarantees that a record is on stable storage when Put returns (puts that arrive together share
// one sync), that a crash leaves the old or the new record whole, and that fields written by a
// newer version survive an update by this one. It decides nothing: what a record means is core's.
package inventory

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/bbolt"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Record is one session on this host. Times are of the host's wall clock.
type Record struct {
	Version    int            `json:"version"`
	Tenant     ids.Tenant     `json:"tenant"`
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Epoch      ids.Epoch      `json:"epoch"`
	Name       string         `json:"name,omitempty"`
	// Phase, Spent and Slept are core's.
	Phase        string    `json:"phase"`
	Spent        bool      `json:"spent,omitempty"`
	Slept        bool      `json:"slept,omitempty"`
	LastActivity time.Time `json:"last_activity"`
	// Sandbox is the name of the compute, empty when none was begun.
	Sandbox string `json:"sandbox,omitempty"`
	Tier    string `json:"tier,omitempty"`
	// Activated: the disk's record says that this epoch may have written.
	Activated bool `json:"activated,omitempty"`
	// Terms and Reply are protojson of the wake's terms and of the answer that settled the epoch.
	Terms json.RawMessage `json:"terms,omitempty"`
	Reply json.RawMessage `json:"reply,omitempty"`
	// Actor is protojson of who had the session woken.
	Actor json.RawMessage `json:"actor,omitempty"`
	// Place is the text of /run/berth/session.json.
	Place   json.RawMessage `json:"place,omitempty"`
	Changed time.Time       `json:"changed"`

	extra map[string]json.RawMessage
}

// Version is the version of the records that this package writes.
const Version = 1

var (
	sessionsBucket = []byte("sessions")
	errClosed      = errors.New("the inventory is closed")
)

// Store is an open inventory; one process at a time. Safe for concurrent use.
type Store struct {
	db   *bbolt.DB
	mu   sync.Mutex
	next *batch
	busy bool
	shut bool
	idle sync.Cond // of mu: nobody flushes
}

// batch is the writes that share one transaction.
type batch struct {
	writes []func(*bbolt.Bucket) error
	done   chan struct{}
	err    error
}

// lockWait bounds how long Open waits for another process to let go of the file.
const lockWait = 3 * time.Second

// Open opens or makes the inventory at path. Kinds: Busy when another process has it open,
// DataLoss when it cannot be read.
func Open(path string) (*Store, error) {
	const op = "open inventory"
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, errs.E(op, errkind.Internal, path, err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockWait, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType})
	if errors.Is(err, bbolt.ErrTimeout) {
		return nil, errs.E(op, errkind.Busy, path, "another hostagent has it open")
	}
	if err != nil {
		return nil, errs.E(op, errkind.DataLoss, path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(sessionsBucket)
		return err
	})
	if err != nil {
		return nil, errors.Join(errs.E(op, errkind.Internal, path, err), db.Close())
	}
	s := &Store{db: db}
	s.idle.L = &s.mu
	return s, nil
}

// Close waits for writes under way; later ones fail.
func (s *Store) Close() error {
	s.mu.Lock()
	s.shut = true
	for s.busy {
		s.idle.Wait()
	}
	s.mu.Unlock()
	return s.db.Close()
}

// Put stores r in place of the session's record.
func (s *Store) Put(r Record) error {
	r.Version = max(r.Version, Version)
	raw, err := encode(r)
	if err != nil {
		return errs.E("store record", errkind.Internal, r.Session.String(), err)
	}
	return s.write("store record", r.Session, func(b *bbolt.Bucket) error { return b.Put([]byte(r.Session), raw) })
}

// PutSoon stores r with the next sync, without waiting for it. A later write that returned, of any
// session, says that this one is stored too.
func (s *Store) PutSoon(r Record) error {
	r.Version = max(r.Version, Version)
	raw, err := encode(r)
	if err != nil {
		return errs.E("store record", errkind.Internal, r.Session.String(), err)
	}
	_, leader, err := s.enqueue("store record", r.Session, func(b *bbolt.Bucket) error { return b.Put([]byte(r.Session), raw) })
	if leader {
		go s.flush()
	}
	return err
}

// Remove forgets a session. Idempotent.
func (s *Store) Remove(k ids.SessionKey) error {
	return s.write("remove record", k, func(b *bbolt.Bucket) error { return b.Delete([]byte(k)) })
}

// All returns every record in the order of their keys. A record that cannot be read fails the
// whole: what is not known must not be taken for nothing.
func (s *Store) All() ([]Record, error) {
	var out []Record
	err := s.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(sessionsBucket).ForEach(func(k, v []byte) error {
			r, err := decode(v)
			if err == nil && string(r.Session) != string(k) {
				err = fmt.Errorf("it is of session %s", r.Session)
			}
			if err != nil {
				return errs.E("read record", errkind.DataLoss, string(k), err)
			}
			out = append(out, r)
			return nil
		})
	})
	return out, err
}

// write adds a change to the next transaction and waits for it.
func (s *Store) write(op string, k ids.SessionKey, change func(*bbolt.Bucket) error) error {
	b, leader, err := s.enqueue(op, k, change)
	if err != nil {
		return err
	}
	if leader {
		s.flush()
	}
	<-b.done
	return errs.Wrap(op, k.String(), b.err)
}

// enqueue adds a change to the next transaction. The leader has to flush.
func (s *Store) enqueue(op string, k ids.SessionKey, change func(*bbolt.Bucket) error) (b *batch, leader bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shut {
		return nil, false, errs.E(op, errkind.Unavailable, k.String(), errClosed)
	}
	if s.next == nil {
		s.next = &batch{done: make(chan struct{})}
	}
	s.next.writes = append(s.next.writes, change)
	leader, s.busy = !s.busy, true
	return s.next, leader, nil
}

// flush commits batches until none is waiting. Whoever found nobody flushing runs it.
func (s *Store) flush() {
	for {
		s.mu.Lock()
		b := s.next
		s.next = nil
		if b == nil {
			s.busy = false
			s.idle.Broadcast()
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		b.err = s.db.Update(func(tx *bbolt.Tx) error {
			for _, w := range b.writes {
				if err := w(tx.Bucket(sessionsBucket)); err != nil {
					return err
				}
			}
			return nil
		})
		close(b.done)
	}
}

func encode(r Record) ([]byte, error) {
	raw, err := json.Marshal(r)
	if err != nil || len(r.extra) == 0 {
		return raw, err
	}
	all := map[string]json.RawMessage{}
	for k, v := range r.extra {
		all[k] = v
	}
	known := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &known); err != nil {
		return nil, err
	}
	for k, v := range known {
		all[k] = v
	}
	return json.Marshal(all)
}

// fields are the names that this version knows.
var fields = map[string]bool{
	"version": true, "tenant": true, "session": true, "generation": true, "epoch": true, "name": true,
	"phase": true, "spent": true, "slept": true, "last_activity": true, "sandbox": true, "tier": true,
	"activated": true, "terms": true, "reply": true, "place": true, "changed": true, "actor": true,
}

func decode(raw []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(raw, &r); err != nil {
		return r, err
	}
	all := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &all); err != nil {
		return r, err
	}
	for k, v := range all {
		if fields[k] {
			continue
		}
		if r.extra == nil {
			r.extra = map[string]json.RawMessage{}
		}
		r.extra[k] = v
	}
	return r, nil
}
