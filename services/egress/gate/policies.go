package gate

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/internal/scope"
	"github.com/berth-dev/berth/services/egress/policy"
)

// policies is what the cell's bucket holds, as the gate last heard of it. While the bucket cannot be watched
// what was last heard holds on.
type policies struct {
	conn *bus.Conn
	log  *slog.Logger
	// changed is called, by one goroutine, after each change; applied with the time since a policy was applied.
	changed func()
	applied func(time.Duration)

	mu     sync.RWMutex
	known  bool
	docs   map[string]document
	seen   uint64 // revision
	heard  time.Time
	round  uint64             // of take
	merged map[string]*merged // by their documents
}

// merged is a policy that sessions have in common, and the last round in which one had it.
type merged struct {
	*policy.Policy
	round atomic.Uint64
}

// document is one policy, read; nil if this gate cannot read it.
type document struct {
	*policy.Document
	scope      *egressv1.Scope
	generation uint64
	at         time.Time
}

// lookEvery is how often it is looked whether the connection was lost, askEvery how many looks later the
// bucket is asked whether the watch keeps up, and mostLate how often it may not.
const (
	lookEvery = 250 * time.Millisecond
	askEvery  = 8
	mostLate  = 1
)

func newPolicies(conn *bus.Conn, log *slog.Logger) *policies {
	return &policies{conn: conn, log: log, docs: map[string]document{}, merged: map[string]*merged{}}
}

// Known implements session.Policies.
func (p *policies) Known() bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.known
}

// nothing denies everything.
var nothing = policy.Merge(nil)

// Of implements session.Policies.
func (p *policies) Of(b *egressv1.Binding) *policy.Policy {
	keys := scope.Of(b)
	p.mu.RLock()
	name, layers := p.layers(keys)
	m, round := p.merged[name], p.round
	p.mu.RUnlock()
	if len(layers) == 0 {
		return nothing
	}
	if m != nil {
		m.round.Store(round)
		return m.Policy
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	name, layers = p.layers(keys) // they may have changed
	if m = p.merged[name]; m == nil {
		m = &merged{Policy: policy.Merge(layers)}
		for _, l := range layers {
			if l.Document == nil {
				m.Policy = nothing // it may hold what denies
			}
		}
		p.merged[name] = m
	}
	m.round.Store(p.round)
	return m.Policy
}

// layers are the documents of some scopes, with a name for all of them together; a lock is held.
func (p *policies) layers(keys [5]string) (string, []policy.Layered) {
	var name strings.Builder
	var out []policy.Layered
	for _, k := range keys {
		if d, ok := p.docs[k]; ok {
			name.WriteString(k + "@" + strconv.FormatUint(d.generation, 10) + " ")
			out = append(out, policy.Layered{Scope: d.scope, Generation: d.generation, Document: d.Document})
		}
	}
	return name.String(), out
}

// state is what metrics show.
func (p *policies) state() (generation uint64, count int, silent time.Duration) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for _, d := range p.docs {
		generation = max(generation, d.generation)
	}
	return generation, len(p.docs), time.Since(p.heard)
}

// follow keeps a watch on the bucket until ctx ends, and begins a new one when it ends or falls behind.
func (p *policies) follow(ctx context.Context) {
	for pause := 50 * time.Millisecond; ctx.Err() == nil; {
		began := time.Now()
		err := p.watch(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > 10*time.Second {
			pause = 50 * time.Millisecond
		}
		_, _, silent := p.state()
		p.log.Warn("the watch of the policies is begun anew; what was last known holds", "known", p.Known(), "silent", silent.Round(time.Millisecond), "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, time.Second)
	}
}

// watch takes in what the bucket holds, and then what changes.
func (p *policies) watch(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	bucket, err := p.conn.OpenBucket(ctx, scope.Bucket)
	if err != nil {
		return err
	}
	at, err := streamOf(ctx, bucket) // before the watch: a bucket that is replaced in between is found by guard
	if err != nil {
		return err
	}
	w, err := bucket.KV().WatchAll(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = w.Stop() }()
	behind := make(chan error, 1)
	go p.guard(ctx, bucket, at.Created, behind)
	held := map[string]document{}
	seen, whole := uint64(0), false
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-behind:
			return err
		case e, ok := <-w.Updates():
			switch {
			case !ok:
				return errors.New("the watch ended")
			case e == nil:
				whole = true
				p.take(held, seen)
				continue
			}
			seen = max(seen, e.Revision())
			if d, there := p.read(e); there {
				held[e.Key()] = d
			} else {
				delete(held, e.Key())
			}
			if whole && len(w.Updates()) == 0 {
				p.take(held, seen)
			}
		}
	}
}

// guard reports when the watch does not keep up with the bucket created at that time, when that bucket was
// replaced, and when the connection was lost meanwhile.
func (p *policies) guard(ctx context.Context, bucket *bus.Bucket, created time.Time, behind chan<- error) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	began := p.conn.NATS().Stats().Reconnects
	late := 0
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if p.conn.NATS().Stats().Reconnects != began {
			behind <- errors.New("the connection to the bus was lost")
			return
		}
		if n%askEvery != 0 {
			continue
		}
		at, err := streamOf(ctx, bucket)
		if err != nil {
			continue // while it cannot be asked there is nothing to be late for
		}
		if !at.Created.Equal(created) { // it may have as many revisions as the watch has seen
			behind <- errs.E("", errkind.Conflict, "", "the bucket was replaced")
			return
		}
		last := at.State.LastSeq
		p.mu.Lock()
		if p.known && p.seen == last {
			late, p.heard = 0, time.Now()
		} else {
			late++
		}
		p.mu.Unlock()
		if late > mostLate {
			behind <- errs.Errorf("", errkind.Unavailable, "the bucket is at revision %d, the watch is not", last)
			return
		}
	}
}

// streamOf describes the stream of a bucket as it is now.
func streamOf(ctx context.Context, bucket *bus.Bucket) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	st, err := bucket.KV().Status(ctx)
	if err != nil {
		return nil, err
	}
	b, ok := st.(*jetstream.KeyValueBucketStatus)
	if !ok {
		return nil, errors.New("the state of the bucket cannot be read")
	}
	return b.StreamInfo(), nil
}

// take makes what the bucket holds what is in force.
func (p *policies) take(held map[string]document, seen uint64) {
	now := time.Now()
	p.mu.Lock()
	was := p.known
	var fresh []time.Duration
	for k, d := range held {
		if was && p.docs[k].generation != d.generation {
			fresh = append(fresh, now.Sub(d.at))
		}
	}
	p.docs, p.seen, p.known, p.heard = maps.Clone(held), seen, true, now
	p.round++
	p.mu.Unlock()
	p.changed() // every session asks for its own
	p.mu.Lock()
	maps.DeleteFunc(p.merged, func(_ string, m *merged) bool { return m.round.Load() < p.round })
	p.mu.Unlock()
	for _, d := range fresh {
		p.applied(d)
	}
}

// read reads one value; false: there is none any more. What cannot be read denies everything to whom it
// concerns, because it may hold what denies.
func (p *policies) read(e jetstream.KeyValueEntry) (document, bool) {
	if e.Operation() != jetstream.KeyValuePut {
		return document{}, false
	}
	d := document{generation: e.Revision()}
	var err error
	if d.scope, err = scope.Parse(e.Key()); err != nil {
		return document{}, false // concerns nobody
	}
	p.mu.RLock()
	old, ok := p.docs[e.Key()]
	p.mu.RUnlock()
	if ok && old.generation == e.Revision() {
		return old, true
	}
	var m egressv1.Policy
	if err = proto.Unmarshal(e.Value(), &m); err == nil {
		d.at = m.GetAppliedAt().AsTime()
		d.Document, err = policy.Parse(m.GetDocument())
	}
	if err != nil {
		p.log.Error("a policy cannot be read: nothing leaves the sessions that it concerns", "scope", e.Key(), "generation", e.Revision(), "error", err)
	}
	return d, true
}
