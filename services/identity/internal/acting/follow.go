package acting

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

func sorted(found map[string]*identityv1.ActedFor) []*identityv1.ActedFor {
	out := make([]*identityv1.ActedFor, 0, len(found))
	for _, f := range slices.Sorted(maps.Keys(found)) {
		out = append(out, found[f])
	}
	return out
}

// follow keeps a watch on what was revoked, a new one every relist.
func (l *Ledger) follow(ctx context.Context) {
	for ctx.Err() == nil {
		life, cancel := context.WithTimeout(ctx, relist)
		err := l.watch(life)
		over := life.Err() != nil
		cancel()
		if over {
			continue
		}
		l.log.Warn("the watch of who may act for users is begun anew", "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

func (l *Ledger) watch(ctx context.Context) error {
	l.mu.RLock()
	before := l.last
	l.mu.RUnlock()
	w, err := l.bucket.KV().Watch(ctx, revokedKey+">")
	if err != nil {
		return err
	}
	defer func() { _ = w.Stop() }()
	held, whole := map[string]state{}, false
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-w.Updates():
			switch {
			case !ok:
				return errs.E("watch", errkind.Unavailable, "", "the watch ended")
			case e == nil:
				l.takeWhole(held, before)
				whole = true
			default:
				pair := strings.TrimPrefix(e.Key(), revokedKey)
				now := state{e.Revision(), e.Operation() == jetstream.KeyValuePut}
				if whole {
					l.take(map[string]state{pair: now})
				} else {
					held[pair] = now
				}
			}
		}
	}
}

// take takes in what is newer.
func (l *Ledger) take(news map[string]state) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(news)
}

// takeWhole takes in all that the bucket holds. When that ends before what was known as the watch began,
// the bucket was put back, and only it counts. What this replica wrote since is no sign of that.
func (l *Ledger) takeWhole(held map[string]state, before uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var last uint64
	for _, s := range held {
		last = max(last, s.rev)
	}
	if last < before {
		l.revoked, l.last = map[string]state{}, 0
	}
	l.add(held)
	select {
	case <-l.ready:
	default:
		close(l.ready)
	}
}

// add takes in what is newer; the lock is held.
func (l *Ledger) add(news map[string]state) {
	for pair, s := range news {
		if s.rev > l.revoked[pair].rev {
			l.revoked[pair] = s
		}
		l.last = max(l.last, s.rev)
	}
}

// Acted notes that the frontend of the actor acted for its user. It waits for
// nobody: when too much is to be written, the next request notes it.
func (l *Ledger) Acted(a *corev1.Actor, at time.Time) {
	pair := pairOf(a, a.GetFrontend())
	now := written{at.Unix() / 3600, a.GetActing()}
	l.mu.RLock()
	had, ok := l.recent[pair]
	l.mu.RUnlock()
	if ok && had.hour == now.hour && (had.acting == now.acting || now.acting == "") {
		return
	}
	select {
	case l.in <- note{pair, a.GetFrontend(), a.GetActing(), at}:
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.recent) >= mostRecent {
			clear(l.recent)
		}
		l.recent[pair] = now
	default:
	}
}

// write writes what was noted, until ctx ends.
func (l *Ledger) write(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case n := <-l.in:
			err := l.put(ctx, n)
			if err == nil || ctx.Err() != nil {
				continue
			}
			l.log.Warn("who acted for a user cannot be written now", "frontend", n.frontend, "error", err)
			l.mu.Lock()
			delete(l.recent, n.pair) // the pair's next request tries again
			l.mu.Unlock()
		}
	}
}

// put writes one note; another replica may write the same pair at once. That a
// frontend comes with the user's own token as well does not erase as whom it
// acted with exchanged ones.
func (l *Ledger) put(ctx context.Context, n note) (err error) {
	for range 5 {
		raw, rev, gerr := l.bucket.Get(ctx, actedKey+n.pair)
		if gerr != nil && !errs.Is(gerr, errkind.NotFound) {
			return gerr
		}
		r := &identityv1.ActedFor{Frontend: n.frontend, FirstAt: timestamppb.New(n.at)}
		if gerr == nil {
			if err := proto.Unmarshal(raw, r); err != nil {
				return errs.E("note who acted", errkind.DataLoss, "", err)
			}
		}
		if n.acting == "" {
			n.acting = r.GetActing()
		}
		hour := n.at.Truncate(time.Hour)
		if gerr == nil && !r.GetLastAt().AsTime().Before(hour) && r.GetActing() == n.acting {
			return nil
		}
		r.LastAt, r.Acting = timestamppb.New(hour), n.acting
		if raw, err = proto.Marshal(r); err != nil {
			return errs.E("note who acted", errkind.Internal, "", err)
		}
		if gerr != nil {
			_, err = l.bucket.Create(ctx, actedKey+n.pair, raw)
		} else {
			_, err = l.bucket.Update(ctx, actedKey+n.pair, raw, rev)
		}
		if err == nil || !errs.Is(err, errkind.Exists) && !errs.Is(err, errkind.Conflict) {
			return err
		}
	}
	return err
}
