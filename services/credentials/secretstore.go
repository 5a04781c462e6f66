package credentials

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/credentials/internal/core"
	"github.com/berth-dev/berth/services/credentials/internal/vault"
)

// In the bucket of secrets a note secret.<tenant>.<name> says which record holds the value, so that secrets
// can be listed without the platform key; its revision is the version. The record
// value.<tenant>.<name>.<id> is encrypted and holds the hosts too: who can write the bucket can make a
// secret go to no other host. A value is stored before the note names it and destroyed once it does not, so
// that a stop in between leaves the old secret or the new one, and a value that sweep destroys.
const (
	secretPrefix = "secret."
	valuePrefix  = "value."
	// tries is how often a change meets another one before it gives up.
	tries = 8
)

// secretNote is stored in the clear.
type secretNote struct {
	ID      string    `json:"id"`
	Hosts   []string  `json:"hosts"`
	Changed time.Time `json:"changed"`
}

// secretRecord is encrypted.
type secretRecord struct {
	Value []byte   `json:"value"`
	Hosts []string `json:"hosts"`
}

// secretStore keeps tenants' secrets.
type secretStore struct {
	vault *vault.Vault

	mu   sync.Mutex // held while something changes
	lost map[string]bool
}

// secretVersion is a note with its revision.
type secretVersion struct {
	name string
	secretNote
	version uint64
}

func secretKey(t ids.Tenant, name string) string { return secretPrefix + string(t) + "." + name }

func valueKey(t ids.Tenant, name, id string) string {
	return valuePrefix + string(t) + "." + name + "." + id
}

// put stores a secret and destroys the value that it replaces. It returns the version.
func (s *secretStore) put(ctx context.Context, e core.StoreSecret, value []byte, now time.Time) (uint64, error) {
	raw, err := json.Marshal(secretRecord{value, e.Hosts})
	if err != nil {
		return 0, errs.E("store secret", errkind.Internal, e.Name, "it cannot be encoded")
	}
	defer clear(raw)
	note := secretNote{newGrantID(), e.Hosts, now.UTC()}
	sealed, err := s.vault.Seal(ctx, valueKey(e.Tenant, e.Name, note.ID), raw)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for range tries {
		before, err := s.note(ctx, e.Tenant, e.Name)
		if errs.Is(err, errkind.NotFound) {
			err = s.room(ctx, e.Tenant)
		}
		if err != nil {
			return 0, err
		}
		if err = s.vault.Add(ctx, sealed); err != nil && !errs.Is(err, errkind.Exists) {
			return 0, err
		}
		version, err := s.name(ctx, e, note, before.version)
		if errs.Is(err, errkind.Conflict) {
			continue
		}
		if err != nil || before.ID == "" {
			return version, err
		}
		return version, s.vault.Destroy(ctx, valueKey(e.Tenant, e.Name, before.ID))
	}
	return 0, errs.E("store secret", errkind.Conflict, e.Name, "it was changed by others again and again; try again")
}

// name writes the note of a value.
func (s *secretStore) name(ctx context.Context, e core.StoreSecret, note secretNote, last uint64) (uint64, error) {
	raw, err := json.Marshal(note)
	if err != nil {
		return 0, err
	}
	return s.vault.NoteIf(ctx, secretKey(e.Tenant, e.Name), raw, last)
}

// room refuses more secrets than a tenant may have.
func (s *secretStore) room(ctx context.Context, t ids.Tenant) error {
	names, err := s.names(ctx, t)
	if err == nil && len(names) >= core.MaxSecrets {
		err = errs.Errorf("store secret", errkind.Exhausted, "tenant %s has %d secrets, which is the most", t, len(names))
	}
	return err
}

func (s *secretStore) names(ctx context.Context, t ids.Tenant) ([]string, error) {
	keys, err := s.vault.Keys(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, k := range keys {
		if name, ok := strings.CutPrefix(k, secretKey(t, "")); ok {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, nil
}

// list are the secrets of a tenant by name, without their values.
func (s *secretStore) list(ctx context.Context, t ids.Tenant) ([]secretVersion, error) {
	names, err := s.names(ctx, t)
	if err != nil {
		return nil, err
	}
	out := make([]secretVersion, 0, len(names))
	for _, n := range names {
		v, err := s.note(ctx, t, n)
		if errs.Is(err, errkind.NotFound) {
			continue // removed just now
		}
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

func (s *secretStore) note(ctx context.Context, t ids.Tenant, name string) (secretVersion, error) {
	raw, version, err := s.vault.NoteAt(ctx, secretKey(t, name))
	if err != nil {
		return secretVersion{}, err
	}
	out := secretVersion{name: name, version: version}
	if err := json.Unmarshal(raw, &out.secretNote); err != nil || out.ID == "" {
		return secretVersion{}, errs.E("read secret", errkind.DataLoss, secretKey(t, name), "it is malformed")
	}
	return out, nil
}

// read returns a secret with its version. The kind is NotFound if there is none. What was removed is not
// read any more: the leader of the bucket is asked.
func (s *secretStore) read(ctx context.Context, t ids.Tenant, name string) (secretRecord, uint64, error) {
	for range tries {
		note, err := s.note(ctx, t, name)
		if errs.Is(err, errkind.NotFound) {
			err = noSecret(t, name)
		}
		if err != nil {
			return secretRecord{}, 0, err
		}
		raw, err := s.vault.Get(ctx, valueKey(t, name, note.ID))
		if errs.Is(err, errkind.NotFound) {
			continue // replaced or removed just now
		}
		if err != nil {
			return secretRecord{}, 0, err
		}
		var rec secretRecord
		err = json.Unmarshal(raw, &rec)
		clear(raw)
		if err != nil || len(rec.Value) == 0 || len(rec.Hosts) == 0 {
			return secretRecord{}, 0, errs.E("read secret", errkind.DataLoss, secretKey(t, name), "it is malformed")
		}
		return rec, note.version, nil
	}
	return secretRecord{}, 0, errs.E("read secret", errkind.DataLoss, secretKey(t, name), "its value is not there")
}

func noSecret(t ids.Tenant, name string) error {
	return errs.Errorf("read secret", errkind.NotFound, "tenant %s has no secret %s", t, name)
}

// remove destroys a secret. The kind is NotFound if there is none.
func (s *secretStore) remove(ctx context.Context, t ids.Tenant, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	note, err := s.note(ctx, t, name)
	if errs.Is(err, errkind.NotFound) {
		return noSecret(t, name)
	}
	if err != nil {
		return err
	}
	if err := s.vault.Destroy(ctx, secretKey(t, name)); err != nil {
		return err
	}
	return s.vault.Destroy(ctx, valueKey(t, name, note.ID))
}

// sweep destroys values that no note names, once they were found so twice: what is just being stored has no
// note yet.
func (s *secretStore) sweep(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys, err := s.vault.Keys(ctx)
	if err != nil {
		return err
	}
	lost := map[string]bool{}
	for _, k := range keys {
		rest, ok := strings.CutPrefix(k, valuePrefix)
		p := strings.Split(rest, ".")
		if !ok || len(p) != 3 {
			continue
		}
		note, err := s.note(ctx, ids.Tenant(p[0]), p[1])
		switch {
		case err != nil && !errs.Is(err, errkind.NotFound):
			return err
		case err == nil && note.ID == p[2]:
		case s.lost[k]:
			if err := s.vault.Destroy(ctx, k); err != nil {
				return err
			}
		default:
			lost[k] = true
		}
	}
	s.lost = lost
	return nil
}
