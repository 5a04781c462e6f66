package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

// Keys of the bucket, besides leader.
const (
	specsKey  = "specs"
	capsKey   = "caps."
	demandKey = "demand."
)

// storeTime bounds one write of the leader.
const storeTime = 3 * time.Second

// record is one declared pool as it is stored. One that was removed stays until nothing is left of it.
type record struct {
	Spec    json.RawMessage `json:"spec"`
	Removed bool            `json:"removed,omitempty"`
}

// value is what every key of a leader holds: its term, and one of these.
type value struct {
	Term   uint64       `json:"term"`
	Pools  []record     `json:"pools,omitempty"`
	Caps   core.Caps    `json:"caps,omitempty"`
	Demand *core.Demand `json:"demand,omitempty"`
}

// store keeps what outlives a leader. When a term begins each key is written again by the new leader:
// whatever an earlier one still writes fails then, because it goes by revisions.
type store struct {
	kv   kv
	term uint64
}

// errDeposed says that another leader writes.
var errDeposed = errs.E("store", errkind.NotLeader, "", "another instance leads")

// open reads a key, and makes it this term's. What is not there is made by what empty says, or left
// when it is nil.
func (s store) open(ctx context.Context, key string, empty *value) (v value, rev uint64, err error) {
	for {
		v, rev, err = s.get(ctx, key)
		switch {
		case errs.Is(err, errkind.NotFound) && empty == nil:
			return value{}, 0, nil
		case errs.Is(err, errkind.NotFound):
			v, rev = *empty, 0
		case err != nil:
			return v, rev, err // of a damaged one the revision is known, to write over it
		case v.Term > s.term:
			return v, 0, errDeposed
		}
		rev, err = s.write(ctx, key, v, rev)
		if !lostRace(err) {
			return v, rev, err
		}
	}
}

// put writes a key of this term over the revision that it has, and returns the one that it gets. After
// a write whose answer was lost it finds its own value there, and writes over that.
func (s store) put(ctx context.Context, key string, v value, rev uint64) (uint64, error) {
	for {
		next, err := s.write(ctx, key, v, rev)
		if !lostRace(err) {
			return next, err
		}
		old, at, err := s.get(ctx, key)
		switch {
		case errs.Is(err, errkind.NotFound):
			at = 0
		case err != nil:
			return rev, err
		case old.Term != s.term:
			return rev, errDeposed
		}
		if at == rev {
			return rev, errs.E("store", errkind.Unavailable, key, "the key says that it was written, and was not")
		}
		rev = at
	}
}

func lostRace(err error) bool {
	return errs.Is(err, errkind.Conflict) || errs.Is(err, errkind.Exists)
}

func (s store) get(ctx context.Context, key string) (v value, rev uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	raw, rev, err := s.kv.Get(ctx, key)
	if err != nil {
		return v, rev, err
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, rev, errs.E("read "+key, errkind.DataLoss, "", fmt.Errorf("%w: %w", errDamaged, err))
	}
	return v, rev, nil
}

// errDamaged says that a key holds what no leader wrote.
var errDamaged = errors.New("the key is damaged")

func (s store) write(ctx context.Context, key string, v value, rev uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	v.Term = s.term
	raw, err := json.Marshal(v)
	if err != nil {
		return rev, errs.Wrap("write "+key, "", err)
	}
	if rev == 0 {
		return s.kv.Create(ctx, key, raw)
	}
	return s.kv.Update(ctx, key, raw, rev)
}

func recordOf(spec *poolv1.Spec, removed bool) (record, error) {
	raw, err := protojson.Marshal(spec)
	return record{Spec: raw, Removed: removed}, err
}

func (r record) spec() (*poolv1.Spec, error) {
	out := &poolv1.Spec{}
	// A later version may have stored more than this one knows.
	return out, protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(r.Spec, out)
}
