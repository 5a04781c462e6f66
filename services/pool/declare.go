package pool

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

// declare makes pools what the specs say, all or none: they are stored first. Those that the specs do
// not name stay as they are.
func (l *leader) declare(ctx context.Context, specs []*poolv1.Spec) error {
	l.declaring.Lock()
	defer l.declaring.Unlock()
	fresh := map[string]*entry{}
	for _, s := range specs {
		e := l.entry(s.GetTemplate())
		if err := l.fits(e, s); err != nil {
			return err
		}
		if e != nil {
			continue
		}
		e, err := l.open(ctx, s, false)
		if err != nil {
			return l.notStored(err)
		}
		fresh[e.name] = e
	}
	if err := l.save(ctx, specs, ""); err != nil {
		return err
	}
	for _, s := range specs {
		if e := fresh[s.GetTemplate()]; e != nil {
			l.begin(e)
		} else if err := l.entry(s.GetTemplate()).declare(s); err != nil {
			return err
		}
	}
	return nil
}

// fits refuses what a pool that is there cannot become.
func (l *leader) fits(e *entry, s *poolv1.Spec) error {
	if _, err := core.NewSpec(s, time.LoadLocation); err != nil {
		return errs.E("", errkind.Invalid, "", err)
	}
	if e == nil || e.tier == s.GetTier() {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	was, is := core.TierWord(e.tier), core.TierWord(s.GetTier())
	if e.removed {
		// It passes by itself.
		return errs.E("", errkind.Busy, "", fmt.Sprintf("the pool of template %q in tier %s was removed and is being emptied; declare the one in tier %s when it is gone", e.name, was, is))
	}
	return errs.E("", errkind.Conflict, "", fmt.Sprintf("the pool of template %q is in tier %s; remove it before you declare one in tier %s", e.name, was, is))
}

// declare makes the pool what the spec says.
func (e *entry) declare(s *poolv1.Spec) error {
	read, err := core.NewSpec(s, time.LoadLocation)
	if err != nil {
		return err
	}
	e.mu.Lock()
	e.core.Declare(read, e.tpl)
	e.spec, e.removed = s, false
	e.mu.Unlock()
	e.poke.now()
	return nil
}

// undeclare ends a pool.
func (l *leader) undeclare(ctx context.Context, name string) error {
	l.declaring.Lock()
	defer l.declaring.Unlock()
	e := l.entry(name)
	if e == nil || e.isRemoved() {
		return noPool(name)
	}
	if err := l.save(ctx, nil, name); err != nil {
		return err
	}
	e.mu.Lock()
	e.removed = true
	e.core.Remove()
	e.grant(time.Now())
	e.mu.Unlock()
	e.poke.now()
	return nil
}

func (e *entry) isRemoved() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.removed
}

// forget ends a removed pool of which nothing is left. It reports false when it must be tried again,
// or was declared again meanwhile.
func (l *leader) forget(ctx context.Context, e *entry) bool {
	l.declaring.Lock()
	defer l.declaring.Unlock()
	e.mu.Lock()
	over, rev := e.removed && e.core.Gone(), e.capsRev
	e.mu.Unlock()
	if !over {
		return false
	}
	rev, err := l.store.put(ctx, capsKey+e.name, value{}, rev)
	if err == nil {
		e.mu.Lock()
		e.caps, e.capsRev = nil, rev
		e.mu.Unlock()
		var next uint64
		if next, err = l.store.put(ctx, specsKey, value{Pools: l.records(nil, "", e.name)}, l.specsRev); err == nil {
			l.specsRev = next
		}
	}
	if err != nil {
		e.unstored(err)
		return false
	}
	l.mu.Lock()
	delete(l.pools, e.name)
	l.mu.Unlock()
	return true
}

// save stores what is declared, with these specs in place of those of the same template, and one pool
// as removed. declaring is held.
func (l *leader) save(ctx context.Context, specs []*poolv1.Spec, removed string) error {
	rev, err := l.store.put(ctx, specsKey, value{Pools: l.records(specs, removed, "")}, l.specsRev)
	if err != nil {
		return l.notStored(err)
	}
	l.specsRev = rev
	return nil
}

// records is what is to be stored: every pool but the one that is over.
func (l *leader) records(specs []*poolv1.Spec, removed, over string) []record {
	named := map[string]*poolv1.Spec{}
	for _, s := range specs {
		named[s.GetTemplate()] = s
	}
	out := slices.Clone(l.unread)
	add := func(s *poolv1.Spec, removed bool) {
		r, err := recordOf(s, removed)
		if err != nil {
			l.log.Error("a pool cannot be written", "template", s.GetTemplate(), "error", err)
			return
		}
		out = append(out, r)
	}
	for _, e := range l.entries() {
		if e.name == over || named[e.name] != nil {
			continue
		}
		e.mu.Lock()
		s, gone := e.spec, e.removed
		e.mu.Unlock()
		add(s, gone || e.name == removed)
	}
	for _, s := range specs {
		add(s, false)
	}
	return out
}

// notStored says what a failed write means to who asked.
func (l *leader) notStored(err error) error {
	if errs.Is(err, errkind.NotLeader) {
		l.doubt.now()
		return err
	}
	return errs.E("", errkind.Unavailable, "", fmt.Errorf("it cannot be told whether this was stored; do it again: %w", err))
}

// preview says how pools would stand and what would follow, and changes nothing.
func (l *leader) preview(specs []*poolv1.Spec) (out []*poolv1.Status, err error) {
	for _, s := range specs {
		e := l.entry(s.GetTemplate())
		if err := l.fits(e, s); err != nil {
			return nil, err
		}
		var caps core.Caps
		var demand *core.Demand
		if e != nil {
			e.mu.Lock()
			d := e.core.Demand()
			caps, demand = e.caps, &d
			e.mu.Unlock()
		}
		would, err := l.newEntry(s, caps, demand)
		if err != nil {
			return nil, err
		}
		out = append(out, would.status())
	}
	return out, nil
}
