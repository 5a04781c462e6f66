package credentials

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/credentials/internal/core"
	"github.com/berth-dev/berth/services/credentials/internal/vault"
)

// Records are named signing.<key id>, revoked.<generation> and, in the
// bucket of data keys, <generation>; a generation is <tenant>.<session>.<n-n>.
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

// load reads every signing key and revocation.
func (s store) load(ctx context.Context) (map[ids.KeyID]ed25519.PrivateKey, []core.SigningKey, map[core.Generation]time.Time, error) {
	secrets, revoked := map[ids.KeyID]ed25519.PrivateKey{}, map[core.Generation]time.Time{}
	var keys []core.SigningKey
	names, err := s.records.Keys(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	for _, n := range names {
		if id, ok := strings.CutPrefix(n, signingPrefix); ok {
			from, secret, err := s.signingKey(ctx, ids.KeyID(id))
			if err != nil {
				return nil, nil, nil, err
			}
			secrets[ids.KeyID(id)] = secret
			keys = append(keys, core.SigningKey{ID: ids.KeyID(id), From: from})
		}
		if rest, ok := strings.CutPrefix(n, revokedPrefix); ok {
			g, err := parseName(rest)
			if err != nil {
				return nil, nil, nil, err
			}
			if revoked[g], err = s.revoked(ctx, g); err != nil {
				return nil, nil, nil, err
			}
		}
	}
	return secrets, keys, revoked, nil
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
	err = s.records.Create(ctx, signingPrefix+string(want.ID), raw)
	if err != nil && !errs.Is(err, errkind.Exists) {
		return want, nil, err
	}
	from, secret, err := s.signingKey(ctx, want.ID)
	return core.SigningKey{ID: want.ID, From: from}, secret, err
}

func (s store) dropSigningKey(ctx context.Context, id ids.KeyID) error {
	return s.records.Destroy(ctx, signingPrefix+string(id))
}

func (s store) revoke(ctx context.Context, g core.Generation, until time.Time) error {
	raw, err := json.Marshal(revokedRecord{until.UTC()})
	if err != nil {
		return err
	}
	return s.records.Put(ctx, revokedPrefix+name(g), raw)
}

// revoked returns until when a generation is on the list; NotFound if it is not.
func (s store) revoked(ctx context.Context, g core.Generation) (time.Time, error) {
	raw, err := s.records.Get(ctx, revokedPrefix+name(g))
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
// request. A revoke at the same moment wins: it writes the revocation before
// it destroys the key, and here the revocation is read after the key is made.
func (s store) dataKey(ctx context.Context, g core.Generation) ([]byte, error) {
	fresh := make([]byte, dataKeyBytes)
	_, _ = rand.Read(fresh) // never fails: crypto/rand ends the process instead
	err := s.dataKeys.Create(ctx, name(g), fresh)
	if err != nil && !errs.Is(err, errkind.Exists) {
		return nil, err
	}
	switch _, err := s.revoked(ctx, g); {
	case err == nil:
		if err := s.dataKeys.Destroy(ctx, name(g)); err != nil {
			return nil, err
		}
		return nil, errs.E("data key", errkind.Superseded, name(g), "the session was deleted")
	case !errs.Is(err, errkind.NotFound):
		return nil, err
	}
	key, err := s.dataKeys.Get(ctx, name(g))
	if err == nil && len(key) != dataKeyBytes {
		return nil, errs.E("data key", errkind.DataLoss, name(g), "it is malformed")
	}
	return key, err
}

func (s store) destroyDataKey(ctx context.Context, g core.Generation) error {
	return s.dataKeys.Destroy(ctx, name(g))
}
