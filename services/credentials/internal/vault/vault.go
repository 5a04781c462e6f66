// Package vault keeps secrets in key-value buckets, each record encrypted by
// itself with a platform key that is in no bucket (AES-256-GCM, a random
// nonce each, bound to bucket and key). It guarantees that a record which was
// changed, or moved to another key, is refused as data loss, and that records
// of older versions of the platform key stay readable while those versions
// are in the key file.
package vault

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	format     = 1
	headBytes  = 1 + 4 // format, version of the platform key
	aadPrefix  = "berth/v1/record/"
	maxRecords = 16 << 10
)

// Vault is one bucket of encrypted records.
type Vault struct {
	bucket *bus.Bucket
	name   string
	newest uint32
	aeads  map[uint32]cipher.AEAD
}

// Open opens a bucket with the versions of the platform key.
func Open(ctx context.Context, conn *bus.Conn, name string, keys keyfile.Keys) (*Vault, error) {
	v := &Vault{name: name, newest: keys.Newest().Version, aeads: map[uint32]cipher.AEAD{}}
	for _, k := range keys {
		block, err := aes.NewCipher(k.Secret)
		if err != nil {
			return nil, errs.E("read platform key", errkind.DataLoss, "", err)
		}
		if v.aeads[k.Version], err = cipher.NewGCMWithRandomNonce(block); err != nil {
			return nil, errs.E("read platform key", errkind.Internal, "", err)
		}
	}
	var err error
	v.bucket, err = conn.OpenBucket(ctx, name)
	return v, err
}

func (v *Vault) seal(key string, plain []byte) []byte {
	out := binary.BigEndian.AppendUint32([]byte{format}, v.newest)
	return v.aeads[v.newest].Seal(out, nil, plain, []byte(aadPrefix+v.name+"/"+key))
}

func (v *Vault) open(key string, record []byte) ([]byte, error) {
	const op = "read encrypted record"
	if len(record) < headBytes || len(record) > maxRecords || record[0] != format {
		return nil, errs.E(op, errkind.DataLoss, v.name+"/"+key, "it has no known format")
	}
	version := binary.BigEndian.Uint32(record[1:headBytes])
	aead := v.aeads[version]
	if aead == nil {
		return nil, errs.Errorf(op, errkind.DataLoss, "%s/%s was encrypted with version %d of the platform key, which is not in the key file", v.name, key, version)
	}
	plain, err := aead.Open(nil, nil, record[headBytes:], []byte(aadPrefix+v.name+"/"+key))
	if err != nil {
		return nil, errs.E(op, errkind.DataLoss, v.name+"/"+key, "it was changed, or encrypted with another platform key")
	}
	return plain, nil
}

// Get reads a record; a missing one is of kind NotFound.
func (v *Vault) Get(ctx context.Context, key string) ([]byte, error) {
	record, _, err := v.bucket.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	return v.open(key, record)
}

// Put writes a record whatever was there.
func (v *Vault) Put(ctx context.Context, key string, plain []byte) error {
	_, err := v.bucket.Put(ctx, key, v.seal(key, plain))
	return err
}

// Create writes a record that must not exist; else the kind is Exists.
func (v *Vault) Create(ctx context.Context, key string, plain []byte) error {
	_, err := v.bucket.Create(ctx, key, v.seal(key, plain))
	return err
}

// Destroy overwrites a record in the file and removes it. One that does not
// exist is no error.
func (v *Vault) Destroy(ctx context.Context, key string) error {
	return v.bucket.SecureDelete(ctx, key)
}

// Keys lists the records.
func (v *Vault) Keys(ctx context.Context) ([]string, error) { return v.bucket.Keys(ctx) }

// Compact removes the marks that destroyed records leave behind, once they
// are an hour old, so that a bucket does not fill up with them.
func (v *Vault) Compact(ctx context.Context) error {
	err := v.bucket.KV().PurgeDeletes(ctx, jetstream.DeleteMarkersOlderThan(time.Hour))
	if err != nil {
		return errs.E("compact bucket", errkind.Unavailable, v.name, err)
	}
	return nil
}
