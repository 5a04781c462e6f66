// Package vault keeps secrets in key-value buckets. Each record is encrypted
// with a key of its own (AES-256-GCM, bound to bucket and name) that the
// platform key wraps; the platform key is in no bucket. It guarantees that a
// record which was changed, or moved to another name, is refused as data loss;
// that nothing is written unless it could be read back; that a record which
// was destroyed is not made again while its mark is there; and that records
// of format 1, encrypted with the key file directly, stay readable.
package vault

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/credentials/internal/platform"
)

// Vault is one bucket of encrypted records.
type Vault struct {
	bucket   *bus.Bucket
	name     string
	platform *platform.Key
	old      map[uint32]cipher.AEAD // by version of the key file: format 1
}

// Open opens a bucket; the platform key stays the caller's.
func Open(ctx context.Context, conn *bus.Conn, name string, key *platform.Key) (*Vault, error) {
	v := &Vault{name: name, platform: key, old: map[uint32]cipher.AEAD{}}
	for _, k := range key.FileKeys() {
		aead, err := newAEAD(k.Secret)
		if err != nil {
			return nil, err
		}
		v.old[k.Version] = aead
	}
	var err error
	v.bucket, err = conn.OpenBucket(ctx, name)
	return v, err
}

func newAEAD(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, errs.E("read record key", errkind.DataLoss, "", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, errs.E("read record key", errkind.Internal, "", err)
	}
	return aead, nil
}

// Get reads a secret. The kind is NotFound if there is none, DataLoss if its
// record is not what was written, Unavailable if the platform key is away.
func (v *Vault) Get(ctx context.Context, key string) ([]byte, error) {
	raw, _, err := v.bucket.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	return v.open(ctx, key, raw)
}

// GetAny is Get from any replica of the bucket; see bus.Bucket.GetAny.
func (v *Vault) GetAny(ctx context.Context, key string) ([]byte, error) {
	raw, _, err := v.bucket.GetAny(ctx, key)
	if err != nil {
		return nil, err
	}
	return v.open(ctx, key, raw)
}

func (v *Vault) open(ctx context.Context, key string, raw []byte) ([]byte, error) {
	const op = "read encrypted record"
	id := v.name + "/" + key
	if len(raw) > 0 && raw[0] == formatDirect {
		return v.openDirect(key, raw)
	}
	rec, err := decode(raw)
	if err != nil {
		return nil, errs.E(op, errkind.DataLoss, id, err)
	}
	k, err := v.platform.Unwrap(ctx, rec.by, rec.wrapped)
	if err != nil {
		return nil, errs.Wrap(op, id, err)
	}
	defer clear(k)
	aead, err := newAEAD(k)
	if err != nil {
		return nil, errs.Wrap(op, id, err)
	}
	plain, err := aead.Open(nil, nil, rec.body, v.bound(rec.by, key))
	if err != nil {
		return nil, errs.E(op, errkind.DataLoss, id, errChanged)
	}
	return plain, nil
}

// openDirect opens a record of format 1.
func (v *Vault) openDirect(key string, raw []byte) ([]byte, error) {
	const op = "read encrypted record"
	if len(raw) < directHead || len(raw) > maxRecord {
		return nil, errs.E(op, errkind.DataLoss, v.name+"/"+key, errFormat)
	}
	version := binary.BigEndian.Uint32(raw[1:directHead])
	aead := v.old[version]
	if aead == nil {
		return nil, errs.Errorf(op, errkind.DataLoss, "%s/%s was encrypted with version %d of the platform key, which is in no key file", v.name, key, version)
	}
	plain, err := aead.Open(nil, nil, raw[directHead:], []byte(directAAD+v.name+"/"+key))
	if err != nil {
		return nil, errs.E(op, errkind.DataLoss, v.name+"/"+key, errChanged)
	}
	return plain, nil
}

// bound is what a record is bound to. A name holds no slash.
func (v *Vault) bound(by platform.By, key string) []byte {
	return []byte(recordAAD + string(rune(by)) + "/" + v.name + "/" + key)
}

// Sealed is an encrypted record that is not stored yet.
type Sealed struct {
	key string
	raw []byte
}

// Seal encrypts a secret for a name. All that may take long, which is the
// platform key's part, is here and not in Add.
func (v *Vault) Seal(ctx context.Context, key string, plain []byte) (Sealed, error) {
	const op = "encrypt record"
	k, wrapped, err := v.platform.Wrapped(ctx)
	if err != nil {
		return Sealed{}, errs.Wrap(op, v.name+"/"+key, err)
	}
	defer clear(k)
	aead, err := newAEAD(k)
	if err != nil {
		return Sealed{}, errs.Wrap(op, v.name+"/"+key, err)
	}
	by := v.platform.By()
	return Sealed{key, record{by, wrapped, aead.Seal(nil, nil, plain, v.bound(by, key))}.encode()}, nil
}

// Add stores a record under a name that was never used: not one that exists,
// and not one that was destroyed and whose mark is still there. Else the kind
// is Exists.
func (v *Vault) Add(ctx context.Context, s Sealed) error {
	_, err := v.bucket.Update(ctx, s.key, s.raw, 0)
	if errs.Is(err, errkind.Conflict) {
		return errs.E("add record", errkind.Exists, v.name+"/"+s.key, err)
	}
	return err
}

// Note stores what is no secret, whatever was there. It needs no platform key.
func (v *Vault) Note(ctx context.Context, key string, text []byte) error {
	_, err := v.bucket.Put(ctx, key, append([]byte{formatNote}, text...))
	return err
}

// NoteIf stores what is no secret if the note there is of revision last; 0: there must be none. Else the kind
// is Conflict. It returns the new revision, which no other note of the bucket ever has.
func (v *Vault) NoteIf(ctx context.Context, key string, text []byte, last uint64) (uint64, error) {
	raw := append([]byte{formatNote}, text...)
	var revision uint64
	var err error
	if last > 0 {
		revision, err = v.bucket.Update(ctx, key, raw, last)
	} else {
		revision, err = v.bucket.Create(ctx, key, raw) // also where one was destroyed
	}
	if errs.Is(err, errkind.Exists) {
		err = errs.E("write note", errkind.Conflict, v.name+"/"+key, err)
	}
	return revision, err
}

// NoteAt reads a note with its revision.
func (v *Vault) NoteAt(ctx context.Context, key string) ([]byte, uint64, error) {
	raw, revision, err := v.bucket.Get(ctx, key)
	if err != nil {
		return nil, 0, err
	}
	if len(raw) == 0 || raw[0] != formatNote {
		return nil, 0, errs.E("read note", errkind.DataLoss, v.name+"/"+key, errFormat)
	}
	return raw[1:], revision, nil
}

// ReadNote reads what Note stored, or a record in which it was encrypted
// before there were notes. Get refuses a note: none can stand in for a secret.
func (v *Vault) ReadNote(ctx context.Context, key string) ([]byte, error) {
	raw, _, err := v.bucket.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	if len(raw) > 0 && raw[0] == formatNote {
		return raw[1:], nil
	}
	return v.open(ctx, key, raw)
}

// Destroy overwrites a record in the file and removes it; a mark stays until
// Compact. One that does not exist is no error. It needs no platform key.
func (v *Vault) Destroy(ctx context.Context, key string) error {
	return v.bucket.SecureDelete(ctx, key)
}

// Keys lists the records.
func (v *Vault) Keys(ctx context.Context) ([]string, error) { return v.bucket.Keys(ctx) }

// Compact removes the marks of records that were destroyed longer than age
// ago, so that a bucket does not fill up with them.
func (v *Vault) Compact(ctx context.Context, age time.Duration) error {
	err := v.bucket.KV().PurgeDeletes(ctx, jetstream.DeleteMarkersOlderThan(age))
	if err != nil && !errors.Is(err, jetstream.ErrNoKeysFound) {
		return errs.E("compact bucket", errkind.Unavailable, v.name, err)
	}
	return nil
}
