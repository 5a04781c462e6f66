// Package acting keeps which frontends acted for which user, and from which
// of them the user took that right. It guarantees that a right that was taken
// is durable before Revoke returns, is known here from then on and in every
// other replica as soon as its watch tells it; and that who acted is written
// beside the path of requests: a bus that cannot be written delays and refuses
// nothing, and what was not written is written with the pair's next request.
// Keys hold a hash of the principal, so that the bucket lists no users.
package acting

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// BucketName is the bucket; identity alone reads and writes it.
const BucketName = "BERTH_DELEGATIONS"

// Kinds of keys: <kind>.<principal>.<frontend>.
const (
	actedKey   = "acted."
	revokedKey = "revoked."
)

const (
	queued = 1024
	// mostRecent bounds the pairs that are known to be written.
	mostRecent = 1 << 16
	// relist is how long one watch lives: a watch that has stopped without a
	// word is replaced by then.
	relist = 2 * time.Minute
)

// Ledger is what this replica knows. It is safe for concurrent use.
type Ledger struct {
	bucket *bus.Bucket
	log    *slog.Logger
	in     chan note
	ready  chan struct{}
	wg     sync.WaitGroup

	mu      sync.RWMutex
	revoked map[string]state // by "<principal>.<frontend>"
	last    uint64           // newest revision in revoked
	recent  map[string]written
}

// state is the newest that is known of one pair; one that was given back
// stays, so that nothing older of it comes back.
type state struct {
	rev   uint64
	taken bool
}

// written is what the bucket has of a pair.
type written struct {
	hour   int64
	acting string
}

type note struct {
	pair, frontend, acting string
	at                     time.Time
}

// Open opens the bucket, waits within ctx until every right that was taken is
// known, and follows it until follow ends; Wait then returns.
func Open(ctx, follow context.Context, conn *bus.Conn, log *slog.Logger) (*Ledger, error) {
	bucket, err := conn.OpenBucket(ctx, BucketName)
	if err != nil {
		return nil, err
	}
	l := &Ledger{bucket: bucket, log: log, in: make(chan note, queued), ready: make(chan struct{}),
		revoked: map[string]state{}, recent: map[string]written{}}
	l.wg.Go(func() { l.follow(follow) })
	l.wg.Go(func() { l.write(follow) })
	select {
	case <-l.ready:
		return l, nil
	case <-ctx.Done():
	case <-follow.Done():
	}
	return nil, errs.E("read who may act for users", errkind.Unavailable, "", "it could not be read in time")
}

// Wait returns once nothing of the ledger runs any more.
func (l *Ledger) Wait() { l.wg.Wait() }

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// principal is the part of a key that stands for a user.
func principal(a *corev1.Actor) string {
	h := sha256.New()
	for _, s := range []string{a.GetTenant(), a.GetIssuer(), a.GetSubject()} {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(s))))
		h.Write([]byte(s))
	}
	return encoding.EncodeToString(h.Sum(nil))
}

func pairOf(a *corev1.Actor, f string) string { return principal(a) + "." + f }

// Revoked reports whether the user took from the frontend of the actor the
// right to act for them.
func (l *Ledger) Revoked(a *corev1.Actor) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if len(l.revoked) == 0 {
		return false
	}
	return l.revoked[pairOf(a, a.GetFrontend())].taken
}

// Revoke takes the right from a frontend, or gives it back (allow).
func (l *Ledger) Revoke(ctx context.Context, a *corev1.Actor, f ids.Frontend, allow bool, at time.Time) error {
	pair := pairOf(a, string(f))
	l.mu.RLock()
	had := l.revoked[pair].taken
	l.mu.RUnlock()
	if had && !allow {
		return nil // the time of the first one stands
	}
	if allow {
		if err := l.bucket.Delete(ctx, revokedKey+pair); err != nil {
			return err
		}
		// The watch tells it: the mark's revision is not known here.
		return l.until(ctx, pair, false)
	}
	raw, err := proto.Marshal(&identityv1.ActedFor{Frontend: string(f), RevokedAt: timestamppb.New(at)})
	if err != nil {
		return errs.E("revoke frontend", errkind.Internal, "", err)
	}
	rev, err := l.bucket.Put(ctx, revokedKey+pair, raw)
	if err == nil {
		l.take(map[string]state{pair: {rev, true}})
	}
	return err
}

// until waits, a little, for the watch to tell what was just written; that it
// does not is no fault of the write.
func (l *Ledger) until(ctx context.Context, pair string, taken bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		l.mu.RLock()
		now := l.revoked[pair].taken
		l.mu.RUnlock()
		if now == taken {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Known reports whether the frontend ever acted for the user, as far as is
// written.
func (l *Ledger) Known(ctx context.Context, a *corev1.Actor, f ids.Frontend) (bool, error) {
	_, _, err := l.bucket.Get(ctx, actedKey+pairOf(a, string(f)))
	if errs.Is(err, errkind.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// List is everyone who acted for the user or may not any more, by name.
func (l *Ledger) List(ctx context.Context, a *corev1.Actor) ([]*identityv1.ActedFor, error) {
	const op = "list who acted"
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	w, err := l.bucket.KV().Watch(ctx, "*."+principal(a)+".*", jetstream.IgnoreDeletes())
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, "", err)
	}
	defer func() { _ = w.Stop() }()
	found := map[string]*identityv1.ActedFor{}
	for {
		select {
		case <-ctx.Done():
			return nil, errs.E(op, errkind.Unavailable, "", ctx.Err())
		case e, ok := <-w.Updates():
			if !ok {
				return nil, errs.E(op, errkind.Unavailable, "", "the list ended early")
			}
			if e == nil {
				return sorted(found), nil
			}
			if err := merge(found, e); err != nil {
				return nil, errs.E(op, errkind.DataLoss, "", err)
			}
		}
	}
}

// merge joins the two records that there may be of a frontend.
func merge(found map[string]*identityv1.ActedFor, e jetstream.KeyValueEntry) error {
	var r identityv1.ActedFor
	if err := proto.Unmarshal(e.Value(), &r); err != nil {
		return err
	}
	if r.GetLastAt() != nil && r.GetLastAt().AsTime().Before(r.GetFirstAt().AsTime()) {
		r.LastAt = r.GetFirstAt() // it is written to the hour, and the first to the second
	}
	had := found[r.GetFrontend()]
	if had == nil {
		found[r.GetFrontend()] = &r
		return nil
	}
	if strings.HasPrefix(e.Key(), revokedKey) {
		had.RevokedAt = r.GetRevokedAt()
		return nil
	}
	r.RevokedAt = had.GetRevokedAt()
	found[r.GetFrontend()] = &r
	return nil
}
