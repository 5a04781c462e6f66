package registry

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// BucketName is the bucket; identity alone reads and writes it.
const BucketName = "BERTH_REGISTRY"

// Store is the registry as this replica knows it. It is safe for concurrent use.
type Store struct {
	bucket *bus.Bucket
	static Static
	log    *slog.Logger
	look   time.Duration // between two looks whether the watch keeps up
	done   chan struct{}

	mu      sync.Mutex
	now     *Snapshot
	changed chan struct{}
	entries map[string]entry
	faults  []string
	loaded  bool
	seen    uint64 // last revision that the watch brought
	anew    bool   // what is known counts no more once the bucket was read again
}

// entry is the newest that is known of one key. One that was deleted stays, so that nothing older of it
// comes back.
type entry struct {
	rev uint64
	msg proto.Message // nil: deleted, or not to be used
	bad bool
}

// Fixed is a store of what never changes: for tests of what judges by a snapshot. It takes no changes.
func Fixed(s *Snapshot) *Store { return &Store{now: s, changed: make(chan struct{})} }

// Of is the snapshot of a configuration alone.
func Of(st Static) (*Snapshot, error) {
	if err := st.Check(); err != nil {
		return nil, err
	}
	s, _ := build(st, nil)
	return s, nil
}

// lookEvery is how long a watch that has stopped goes unnoticed.
const lookEvery = 500 * time.Millisecond

// Open opens the bucket, waits within ctx until all of it was read, and follows it until ctx of follow
// ends; Wait then returns. An identity that has not read it must let nobody in: it would not know who is
// suspended.
func Open(ctx, follow context.Context, conn *bus.Conn, st Static, log *slog.Logger) (*Store, error) {
	if err := st.Check(); err != nil {
		return nil, err
	}
	bucket, err := openBucket(ctx, conn)
	if err != nil {
		return nil, err
	}
	s := &Store{bucket: bucket, static: st, log: log, look: lookEvery, done: make(chan struct{}), changed: make(chan struct{}), entries: map[string]entry{}}
	s.now, _ = build(st, nil)
	first := s.Changed()
	go s.follow(follow)
	select {
	case <-first:
		return s, nil
	case <-ctx.Done():
	case <-follow.Done():
	}
	return nil, errs.E("read the registry", errkind.Unavailable, "", "it could not be read in time")
}

// openBucket waits, within ctx, for a bucket that was not declared yet.
func openBucket(ctx context.Context, conn *bus.Conn) (*bus.Bucket, error) {
	for {
		b, err := conn.OpenBucket(ctx, BucketName)
		if !errs.Is(err, errkind.NotFound) {
			return b, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// Wait returns once nothing of the store runs any more.
func (s *Store) Wait() { <-s.done }

// Current is the registry now.
func (s *Store) Current() *Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// Changed is closed at the next change. To miss none, take it before Current.
func (s *Store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// follow keeps a watch on the bucket, and begins a new one when it ends or falls behind.
func (s *Store) follow(ctx context.Context) {
	defer close(s.done)
	for pause := 50 * time.Millisecond; ctx.Err() == nil; pause = min(2*pause, 2*time.Second) {
		began := time.Now()
		err := s.watch(ctx)
		if errors.Is(err, errRestored) {
			s.mu.Lock()
			s.anew = true
			s.mu.Unlock()
		}
		if ctx.Err() != nil {
			return
		}
		s.log.Warn("the watch of the registry is begun anew", "error", err)
		if time.Since(began) > time.Minute {
			pause = 50 * time.Millisecond
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// watch takes in what the bucket holds, and then what changes, until the watch ends or has missed
// something.
func (s *Store) watch(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	at, err := s.stream(ctx) // before the watch: a bucket that is replaced in between is found by guard
	if err != nil {
		return err
	}
	w, err := s.bucket.KV().WatchAll(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = w.Stop() }()
	behind := make(chan error, 1)
	go s.guard(ctx, at.Created, behind)
	held := map[string]entry{} // what the bucket holds, until it was read whole
	for whole := false; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-behind:
			return err
		case e, ok := <-w.Updates():
			switch {
			case !ok:
				return errs.E("watch the registry", errkind.Unavailable, "", "the watch ended")
			case e == nil:
				whole = true
				s.take(batch{entries: held, seen: last(held), whole: true})
			case whole:
				some := s.more(w, e)
				s.take(batch{entries: some, seen: last(some)})
			default:
				held[e.Key()] = s.read(e)
			}
		}
	}
}

// more is an update with those that have come behind it.
func (s *Store) more(w jetstream.KeyWatcher, e jetstream.KeyValueEntry) map[string]entry {
	some := map[string]entry{e.Key(): s.read(e)}
	for {
		select {
		case e, ok := <-w.Updates():
			if !ok || e == nil {
				return some // the caller finds a closed channel again
			}
			some[e.Key()] = s.read(e)
		default:
			return some
		}
	}
}

// guard checks whether the watch of the bucket created at that time keeps up, and reports once when it does not.
func (s *Store) guard(ctx context.Context, created time.Time, behind chan<- error) {
	tick := time.NewTicker(s.look)
	defer tick.Stop()
	for late := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := s.missing(ctx, created)
		if late++; err == nil {
			late = 0
		}
		if late >= mostLate {
			behind <- err
			return
		}
	}
}

// mostLate looks that find the watch behind begin a new one.
const mostLate = 3

func last(of map[string]entry) (rev uint64) {
	for _, e := range of {
		rev = max(rev, e.rev)
	}
	return rev
}

// errRestored: the bucket is another one than before, or an older state of it. What was known of it counts
// no more.
var errRestored = errs.E("watch the registry", errkind.Conflict, "", "the bucket was put back to an earlier state")

// missing tells whether the bucket has something that the watch has not brought. While the bucket cannot
// be asked it has nothing to say: the watch begins again by itself when the bus is back.
func (s *Store) missing(ctx context.Context, created time.Time) error {
	at, err := s.stream(ctx)
	if err != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch have := at.State.LastSeq; {
	case have < s.seen, !at.Created.Equal(created): // a new bucket may have as many revisions as the watch has seen
		return errRestored
	case have > s.seen || !s.loaded:
		return errs.Errorf("watch the registry", errkind.Unavailable, "the bucket is at revision %d and the watch at %d", have, s.seen)
	}
	return nil
}

// stream describes the stream of the bucket as it is now.
func (s *Store) stream(ctx context.Context) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	st, err := s.bucket.KV().Status(ctx)
	if err != nil {
		return nil, err
	}
	b, ok := st.(*jetstream.KeyValueBucketStatus)
	if !ok {
		return nil, errs.Errorf("read the registry", errkind.Internal, "the status of the bucket is a %T", st)
	}
	return b.StreamInfo(), nil
}

// read decodes one value. What cannot be read counts as not there, but for a suspension, which then shuts
// its whole tenant out.
func (s *Store) read(e jetstream.KeyValueEntry) entry {
	if e.Operation() != jetstream.KeyValuePut {
		return entry{rev: e.Revision()}
	}
	msg, err := decode(e.Key(), e.Value())
	if err != nil {
		s.log.Error("a record of the registry cannot be used", "key", e.Key(), "revision", e.Revision(), "error", err)
		return entry{rev: e.Revision(), bad: true}
	}
	return entry{rev: e.Revision(), msg: stamped(msg, e.Revision())}
}

// decode reads and checks a value, which must be what belongs under its key.
func decode(key string, value []byte) (proto.Message, error) {
	var msg proto.Message
	switch kind, _, _ := strings.Cut(key, "."); kind + "." {
	case tenantKey:
		msg = &identityv1.Tenant{}
	case issuerKey:
		msg = &identityv1.Issuer{}
	case loginKey:
		msg = &identityv1.Login{}
	case suspendedKey:
		msg = &identityv1.Suspension{}
	default:
		return nil, invalid("nothing of the registry has such a key")
	}
	// A later version may have stored more than this one knows.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(value, msg); err != nil {
		return nil, invalid("the value is no record")
	}
	want, err := check(msg)
	if err == nil && want != key {
		err = invalid("the record belongs under another key")
	}
	return msg, err
}

// check says what is wrong with a record, and under which key it belongs.
func check(msg proto.Message) (key string, err error) {
	switch m := msg.(type) {
	case *identityv1.Tenant:
		return tenantKey + m.GetTenant(), CheckTenant(m)
	case *identityv1.Issuer:
		return keyOfIssuer(m.GetIssuer(), m.GetAudience()), CheckIssuer(m)
	case *identityv1.Login:
		return loginKey + m.GetName(), CheckLogin(m)
	case *identityv1.Suspension:
		return keyOfSuspension(m), CheckSuspension(m)
	}
	return "", errs.Errorf("registry", errkind.Internal, "%T is no record", msg)
}

// stamped has the revision that the record was read with.
func stamped(msg proto.Message, rev uint64) proto.Message {
	switch m := msg.(type) {
	case *identityv1.Tenant:
		m.Revision, m.Configured, m.Suspended, m.SuspendedWhy = rev, false, false, ""
	case *identityv1.Issuer:
		m.Revision, m.Configured = rev, false
	case *identityv1.Login:
		m.Revision, m.Configured = rev, false
	}
	return msg
}

// batch is news of the bucket.
type batch struct {
	entries map[string]entry
	seen    uint64 // how far the watch has come; 0 when it was not the watch that brought it
	whole   bool   // all that the bucket holds
}

// take takes in what is newer than what is known, and makes the snapshot of it.
func (s *Store) take(b batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	news := b.whole && !s.loaded
	if b.whole && s.anew {
		s.entries, s.seen, s.anew, news = map[string]entry{}, 0, false, true
	}
	for key, e := range b.entries {
		if had, ok := s.entries[key]; !ok || e.rev > had.rev {
			s.entries[key], news = e, true
		}
	}
	s.seen = max(s.seen, b.seen)
	if !news {
		return
	}
	s.loaded = true
	next, faults := build(s.static, recordsOf(s.entries))
	for _, f := range faults {
		if !slices.Contains(s.faults, f) {
			s.log.Error("the registry contradicts itself; what came later is left out", "fault", f)
		}
	}
	s.now, s.faults = next, faults
	close(s.changed)
	s.changed = make(chan struct{})
}

// recordsOf are entries by kind, in the order of their keys.
func recordsOf(entries map[string]entry) *records {
	r := &records{}
	for _, key := range slices.Sorted(maps.Keys(entries)) {
		e := entries[key]
		if rest, suspended := strings.CutPrefix(key, suspendedKey); e.bad && suspended {
			tenant, _, _ := strings.Cut(rest, ".")
			r.locked = append(r.locked, tenant)
		}
		switch m := e.msg.(type) {
		case *identityv1.Tenant:
			r.tenants = append(r.tenants, m)
		case *identityv1.Issuer:
			r.issuers = append(r.issuers, m)
		case *identityv1.Login:
			r.logins = append(r.logins, m)
		case *identityv1.Suspension:
			r.suspended = append(r.suspended, m)
		}
	}
	return r
}
