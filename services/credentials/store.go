package credentials

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"errors"
	"hash/fnv"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/credentials/internal/core"
	"github.com/berth-dev/berth/services/credentials/internal/vault"
)

// Records are named signing.<key id>, revoked.<generation>, ended.<tenant>.<hash>
// and, in the bucket of data keys, <generation>; a generation is <tenant>.<session>.<n-n>.
const (
	signingPrefix = "signing."
	revokedPrefix = "revoked."
	dataKeyBytes  = 32
)

type signingRecord struct {
	From time.Time `json:"from"`
	Seed []byte    `json:"seed"`
}

type revokedRecord struct {
	Until time.Time `json:"until"`
}

type store struct {
	records, dataKeys *vault.Vault
	locks             *locks
}

func name(g core.Generation) string {
	return string(g.Tenant) + "." + string(g.Session) + "." + g.Generation.String()
}

func parseName(s string) (core.Generation, error) {
	p := strings.Split(s, ".")
	if len(p) != 3 {
		return core.Generation{}, errs.E("read record", errkind.DataLoss, s, "its name is malformed")
	}
	t, err1 := ids.ParseTenant(p[0])
	k, err2 := ids.ParseSessionKey(p[1])
	g, err3 := ids.ParseGeneration(p[2])
	for _, err := range []error{err1, err2, err3} {
		if err != nil {
			return core.Generation{}, errs.E("read record", errkind.DataLoss, s, err)
		}
	}
	return core.Generation{Tenant: t, Session: k, Generation: g}, nil
}

// loaded is what the service keeps in memory.
type loaded struct {
	secrets map[ids.KeyID]ed25519.PrivateKey
	keys    []core.SigningKey
	revoked map[core.Generation]time.Time
	ended   grant.Endings
}

// load reads every signing key, revocation and ending.
func (s store) load(ctx context.Context) (loaded, error) {
	out := loaded{secrets: map[ids.KeyID]ed25519.PrivateKey{}, revoked: map[core.Generation]time.Time{}, ended: grant.Endings{}}
	names, err := s.records.Keys(ctx)
	if err != nil {
		return out, err
	}
	for _, n := range names {
		if err := s.loadOne(ctx, n, &out); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (s store) loadOne(ctx context.Context, n string, out *loaded) error {
	if id, ok := strings.CutPrefix(n, signingPrefix); ok {
		from, secret, err := s.signingKey(ctx, ids.KeyID(id))
		out.secrets[ids.KeyID(id)] = secret
		out.keys = append(out.keys, core.SigningKey{ID: ids.KeyID(id), From: from})
		return err
	}
	if rest, ok := strings.CutPrefix(n, revokedPrefix); ok {
		g, err := parseName(rest)
		if err == nil {
			out.revoked[g], err = s.revoked(ctx, g)
		}
		return err
	}
	if strings.HasPrefix(n, endedPrefix) {
		e, err := s.ended(ctx, n)
		if err == nil {
			out.ended.Add(e)
		}
		return err
	}
	return nil
}

func (s store) signingKey(ctx context.Context, id ids.KeyID) (time.Time, ed25519.PrivateKey, error) {
	raw, err := s.records.Get(ctx, signingPrefix+string(id))
	if err != nil {
		return time.Time{}, nil, err
	}
	var rec signingRecord
	if err := json.Unmarshal(raw, &rec); err != nil || len(rec.Seed) != ed25519.SeedSize {
		return time.Time{}, nil, errs.E("read signing key", errkind.DataLoss, string(id), "it is malformed")
	}
	return rec.From, ed25519.NewKeyFromSeed(rec.Seed), nil
}

// makeSigningKey stores a new key, or returns the one of this name that is
// there already.
func (s store) makeSigningKey(ctx context.Context, want core.SigningKey) (core.SigningKey, ed25519.PrivateKey, error) {
	rec := signingRecord{From: want.From.UTC(), Seed: make([]byte, ed25519.SeedSize)}
	_, _ = rand.Read(rec.Seed) // never fails: crypto/rand ends the process instead
	raw, err := json.Marshal(rec)
	if err != nil {
		return want, nil, err
	}
	sealed, err := s.records.Seal(ctx, signingPrefix+string(want.ID), raw)
	if err != nil {
		return want, nil, err
	}
	if err := s.records.Add(ctx, sealed); err != nil && !errs.Is(err, errkind.Exists) {
		return want, nil, err
	}
	from, secret, err := s.signingKey(ctx, want.ID)
	return core.SigningKey{ID: want.ID, From: from}, secret, err
}

func (s store) dropSigningKey(ctx context.Context, id ids.KeyID) error {
	return s.records.Destroy(ctx, signingPrefix+string(id))
}

// revoke puts a generation on the list. That needs no platform key, so that a
// session can be deleted while its service is away.
func (s store) revoke(ctx context.Context, g core.Generation, until time.Time) error {
	raw, err := json.Marshal(revokedRecord{until.UTC()})
	if err != nil {
		return err
	}
	return s.records.Note(ctx, revokedPrefix+name(g), raw)
}

// revoked returns until when a generation is on the list; NotFound if it is not.
func (s store) revoked(ctx context.Context, g core.Generation) (time.Time, error) {
	raw, err := s.records.ReadNote(ctx, revokedPrefix+name(g))
	if err != nil {
		return time.Time{}, err
	}
	var rec revokedRecord
	if err := json.Unmarshal(raw, &rec); err != nil {
		return time.Time{}, errs.E("read revocation", errkind.DataLoss, name(g), err)
	}
	return rec.Until, nil
}

func (s store) dropRevocation(ctx context.Context, g core.Generation) error {
	return s.records.Destroy(ctx, revokedPrefix+name(g))
}

// dataKey returns the data key of a generation and makes it at the first
// request. over is asked again once a new key is stored: nil while scheduler
// still says that the generation lives. What was destroyed is never made
// again, by four rules of which each suffices while it lasts:
//   - in this process, under the lock of the generation, the revocation is
//     looked for before the key is made, and a revoke writes it before it
//     destroys the key;
//   - the mark of a destroyed key refuses a new one;
//   - the revocation on the list refuses it;
//   - scheduler, asked after the key was made, does not own the generation.
func (s store) dataKey(ctx context.Context, g core.Generation, over func(context.Context) error) ([]byte, error) {
	// From any replica of the bucket: a session that is restored on another host
	// must not wait until the bucket has a leader, 4 to 8 s after its node died.
	// A key never changes, so what such a replica may be late with is that the
	// key was made, which its leader is asked for next, or that it was destroyed,
	// which scheduler knows.
	key, err := s.dataKeys.GetAny(ctx, name(g))
	if errs.Is(err, errkind.NotFound) {
		key, err = s.dataKeys.Get(ctx, name(g))
	}
	if errs.Is(err, errkind.NotFound) {
		if err := s.makeDataKey(ctx, g, over); err != nil {
			return nil, err
		}
		key, err = s.dataKeys.Get(ctx, name(g))
		if errs.Is(err, errkind.NotFound) {
			err = errs.E("data key", errkind.Superseded, name(g), "the session was deleted and its data key destroyed")
		}
	}
	if err != nil {
		return nil, err
	}
	if len(key) != dataKeyBytes {
		return nil, errs.E("data key", errkind.DataLoss, name(g), "it is malformed")
	}
	// A revoke that was acknowledged while the key was read counts: scheduler
	// asks for one only after it has committed the deletion.
	return key, over(ctx)
}

func (s store) makeDataKey(ctx context.Context, g core.Generation, over func(context.Context) error) error {
	if err := s.alive(ctx, g); err != nil {
		return err
	}
	fresh := make([]byte, dataKeyBytes)
	_, _ = rand.Read(fresh) // never fails: crypto/rand ends the process instead
	defer clear(fresh)
	sealed, err := s.dataKeys.Seal(ctx, name(g), fresh)
	if err != nil {
		return err
	}
	err = s.addDataKey(ctx, g, sealed)
	if errs.Is(err, errkind.Exists) {
		return nil // another request was first, or a mark is there and the next read finds nothing
	}
	if err != nil {
		return err
	}
	err = over(ctx)
	if errs.Is(err, errkind.Superseded) {
		return errors.Join(err, s.destroyDataKey(ctx, g))
	}
	return err
}

// addDataKey stores a new key unless the generation was revoked.
func (s store) addDataKey(ctx context.Context, g core.Generation, sealed vault.Sealed) error {
	unlock := s.locks.lock(g)
	defer unlock()
	if err := s.alive(ctx, g); err != nil {
		return err
	}
	return s.dataKeys.Add(ctx, sealed)
}

// alive is of kind Superseded if a generation is on the list of revocations.
func (s store) alive(ctx context.Context, g core.Generation) error {
	switch _, err := s.revoked(ctx, g); {
	case err == nil:
		return errs.E("data key", errkind.Superseded, name(g), "the session was deleted")
	case !errs.Is(err, errkind.NotFound):
		return err
	}
	return nil
}

// end makes a revocation durable and destroys the data key after it.
func (s store) end(ctx context.Context, g core.Generation, until time.Time) error {
	unlock := s.locks.lock(g)
	defer unlock()
	if err := s.revoke(ctx, g, until); err != nil {
		return err
	}
	return s.destroyDataKey(ctx, g)
}

func (s store) destroyDataKey(ctx context.Context, g core.Generation) error {
	return s.dataKeys.Destroy(ctx, name(g))
}

// locks are few, and generations share them.
type locks [64]sync.Mutex

func (l *locks) lock(g core.Generation) (unlock func()) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name(g))) // never fails
	m := &l[h.Sum32()%uint32(len(l))]
	m.Lock()
	return m.Unlock
}
