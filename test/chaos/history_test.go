package chaos

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

// past is what the scheduler told of one generation of a session.
type past struct {
	newest          uint64 // revision
	seen            map[uint64]bool
	epoch           ids.Epoch
	deleted, erased bool
	restores        []restore
	active          map[ids.Epoch]bool
}

// history follows the scheduler's events and checks their order.
type history struct {
	mu       sync.Mutex
	lives    map[life]*past
	placed   map[ids.SessionKey]ids.Epoch
	lines    map[ids.SessionKey][]string
	handoffs int
	restored int
	wrong    []string
	owners   *owners
	moved    chan struct{} // closed and made anew at every event
}

func newHistory(o *owners) *history {
	return &history{lives: map[life]*past{}, placed: map[ids.SessionKey]ids.Epoch{}, lines: map[ids.SessionKey][]string{},
		owners: o, moved: make(chan struct{})}
}

// take notes one event. Events of a generation come in the order of their revisions, but each perhaps
// more than once; that it was erased may be told when the next generation lives.
func (h *history) take(ev sdk.Event) {
	b, ok := ev.Body.(*schedulerv1.Event)
	if !ok {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	ref := b.GetSession()
	l := life{ids.SessionKey(ref.GetSession()), grant.GenerationOf(ref.GetGeneration())}
	p := h.lives[l]
	if p == nil {
		p = &past{seen: map[uint64]bool{}, active: map[ids.Epoch]bool{}}
		h.lives[l] = p
	}
	if p.seen[b.GetRevision()] {
		return
	}
	e := grant.EpochOf(ref.GetEpoch())
	line := fmt.Sprintf("%s %-11s revision %d, epoch %s, generation %s: %v", b.GetAt().AsTime().Format(clock), ev.Name, b.GetRevision(), e, l.gen, detail(b))
	h.lines[l.session] = append(h.lines[l.session], line)
	if b.GetRevision() < p.newest {
		h.wrong = append(h.wrong, fmt.Sprintf("%s: after revision %d came for the first time: %s", l.session, p.newest, line))
	}
	if e.Compare(p.epoch) < 0 && b.GetErased() == nil {
		h.wrong = append(h.wrong, fmt.Sprintf("%s: after epoch %s came: %s", l.session, p.epoch, line))
	}
	p.seen[b.GetRevision()], p.newest = true, max(p.newest, b.GetRevision())
	if e.Compare(p.epoch) > 0 {
		p.epoch = e
	}
	h.detail(l, p, e, b)
	close(h.moved)
	h.moved = make(chan struct{})
}

func detail(b *schedulerv1.Event) any {
	switch {
	case b.GetPlaced() != nil:
		return b.GetPlaced().GetHost() + ": " + b.GetPlaced().GetReason()
	case b.GetActive() != nil:
		a := b.GetActive()
		return fmt.Sprintf("on %s, %s, %s, restored as of %s", a.GetHost(), a.GetOrigin(), a.GetCause(), a.GetRestoredAsOf().AsTime().Format(clock))
	case b.GetAdmitted() != nil:
		return b.GetAdmitted().GetCause()
	case b.GetAsleep() != nil:
		return b.GetAsleep().GetHost() + ": " + b.GetAsleep().GetReason()
	}
	return b.GetDetail()
}

func (h *history) detail(l life, p *past, e ids.Epoch, b *schedulerv1.Event) {
	at := b.GetAt().AsTime()
	switch {
	case b.GetPlaced() != nil:
		if e.Compare(h.placed[l.session]) <= 0 {
			h.wrong = append(h.wrong, fmt.Sprintf("%s was placed in epoch %s after epoch %s", l.session, e, h.placed[l.session]))
		}
		h.placed[l.session] = e
		h.owners.placed(l, e, time.Time{})
	case b.GetActive() != nil:
		a := b.GetActive()
		p.active[e] = true
		h.owners.placed(l, e, at)
		if a.GetRestoredAsOf() != nil {
			h.restored++
			p.restores = append(p.restores, restore{a.GetRestoredAsOf().AsTime(), e, at})
		}
	case b.GetDisplaced().GetHandoff():
		h.handoffs++ // a user's open may be quicker than the handoff's own wake
	case b.GetDeleted() != nil:
		p.deleted = true
	case b.GetErased() != nil:
		p.erased = true
	}
}

// restoresOf are the restores of a generation, once it was told that it is active in an epoch.
func (h *history) restoresOf(ctx context.Context, l life, e ids.Epoch) ([]restore, error) {
	for {
		h.mu.Lock()
		p, moved := h.lives[l], h.moved
		if p != nil && p.active[e] {
			defer h.mu.Unlock()
			return slices.Clone(p.restores), nil
		}
		h.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("that %s is active in epoch %s was not told in time", l.session, e)
		case <-moved:
		}
	}
}

// unended are the generations of which not both ends were told.
func (h *history) unended() (out []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l, p := range h.lives {
		if !p.deleted || !p.erased {
			out = append(out, fmt.Sprintf("%s, generation %s: deleted told: %v, erased told: %v", l.session, l.gen, p.deleted, p.erased))
		}
	}
	return out
}

// counts are the handoffs and restores so far.
func (h *history) counts() (handoffs, restored int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.handoffs, h.restored
}

// problems returns what was found since the last call.
func (h *history) problems() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := h.wrong
	h.wrong = nil
	return out
}

// of is what was told of a session, in order.
func (h *history) of(key ids.SessionKey) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.lines[key])
}

// follow reads the stored events until ctx ends; after an interruption it reads them again, and what
// it has seen counts once.
func (h *history) follow(ctx context.Context, op *sdk.Client, since time.Time) {
	for ctx.Err() == nil {
		events, err := op.Events(ctx, sdk.EventFilter{Since: time.Since(since)})
		if err == nil {
			for ev, err := range events {
				if err != nil {
					break
				}
				h.take(ev)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}
