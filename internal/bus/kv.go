package bus

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go/jetstream"
)

// Bucket is one declared key-value bucket. The errors of its methods are of
// kind NotFound, Conflict (somebody else wrote first), Exists or Unavailable.
type Bucket struct {
	name string
	kv   jetstream.KeyValue
	conn *Conn
}

// OpenBucket opens a bucket of the catalogue; only its owner may.
func (c *Conn) OpenBucket(ctx context.Context, name string) (*Bucket, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx, done := c.failFast(ctx, "$JS.API.STREAM.INFO.KV_"+name)
	defer done()
	kv, err := c.js.KeyValue(ctx, name)
	if err != nil {
		return nil, c.kvFailed("open bucket", name, err)
	}
	return &Bucket{name: name, kv: kv, conn: c}, nil
}

// KV returns the bucket of nats.go below, for watching.
func (b *Bucket) KV() jetstream.KeyValue { return b.kv }

// Get returns a key's value and revision.
func (b *Bucket) Get(ctx context.Context, key string) (value []byte, revision uint64, err error) {
	e, err := b.kv.Get(ctx, key)
	if err != nil {
		return nil, 0, b.conn.kvFailed("get", b.name+"/"+key, err)
	}
	return e.Value(), e.Revision(), nil
}

// Put writes a key whatever it held.
func (b *Bucket) Put(ctx context.Context, key string, value []byte) (revision uint64, err error) {
	revision, err = b.kv.Put(ctx, key, value)
	return revision, b.conn.kvFailed("put", b.name+"/"+key, err)
}

// Create writes a key that must not exist.
func (b *Bucket) Create(ctx context.Context, key string, value []byte) (revision uint64, err error) {
	revision, err = b.kv.Create(ctx, key, value)
	return revision, b.conn.kvFailed("create", b.name+"/"+key, err)
}

// Update writes a key whose revision must be the one given.
func (b *Bucket) Update(ctx context.Context, key string, value []byte, last uint64) (revision uint64, err error) {
	revision, err = b.kv.Update(ctx, key, value, last)
	return revision, b.conn.kvFailed("update", b.name+"/"+key, err)
}

// Delete marks a key deleted; its value is gone from the bucket, yet may
// linger in a file. See SecureDelete.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	return b.conn.kvFailed("delete", b.name+"/"+key, b.kv.Purge(ctx, key))
}

// SecureDelete overwrites the stored value of a key and then removes the key.
// A key that does not exist is no error.
func (b *Bucket) SecureDelete(ctx context.Context, key string) error {
	e, err := b.kv.Get(ctx, key)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil
	}
	if err != nil {
		return b.conn.kvFailed("secure delete", b.name+"/"+key, err)
	}
	if err := b.conn.deleteMsg(ctx, "KV_"+b.name, e.Revision(), true); err != nil {
		return b.conn.kvFailed("secure delete", b.name+"/"+key, err)
	}
	return b.conn.kvFailed("secure delete", b.name+"/"+key, b.kv.Purge(ctx, key))
}

// Keys lists the keys that exist; none is no error.
func (b *Bucket) Keys(ctx context.Context) ([]string, error) {
	keys, err := b.kv.Keys(ctx)
	if errors.Is(err, jetstream.ErrNoKeysFound) {
		return nil, nil
	}
	return keys, b.conn.kvFailed("list keys", b.name, err)
}

func (c *Conn) kvFailed(op, id string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jetstream.ErrKeyExists):
		return errs.E(op, errkind.Exists, id, err)
	case errors.Is(err, jetstream.ErrKeyNotFound), errors.Is(err, jetstream.ErrBucketNotFound):
		return errs.E(op, errkind.NotFound, id, err)
	case errors.Is(err, jetstream.ErrInvalidKey):
		return errs.E(op, errkind.Invalid, id, err)
	}
	err = c.failed("", id, err)
	return errs.E(op, errs.Kind(err), id, err)
}

// purge removes the messages of one subject of a stream.
func (c *Conn) purge(ctx context.Context, stream, subject string) error {
	return c.api(ctx, "STREAM.PURGE."+stream, map[string]any{"filter": subject}, nil)
}

// deleteMsg removes one message; erase overwrites it in the file.
func (c *Conn) deleteMsg(ctx context.Context, stream string, seq uint64, erase bool) error {
	return c.api(ctx, "STREAM.MSG.DELETE."+stream, map[string]any{"seq": seq, "no_erase": !erase}, nil)
}

// API calls a method of JetStream's API ("STREAM.INFO.X") and decodes its
// answer into resp, if that is not nil. A refusal by the server is Denied at
// once, not a time-out.
func (c *Conn) API(ctx context.Context, method string, req, resp any) error {
	return c.api(ctx, method, req, resp)
}

// api calls JetStream's API where nats.go would ask for more permissions than
// a service has.
func (c *Conn) api(ctx context.Context, method string, req, resp any) error {
	subject := "$JS.API." + method
	var body []byte // some methods want none at all
	if req != nil {
		var err error
		if body, err = json.Marshal(req); err != nil {
			return err
		}
	}
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	ctx, done := c.failFast(ctx, subject)
	defer done()
	msg, err := c.nc.RequestWithContext(ctx, subject, body)
	if err != nil {
		return c.failed(method, subject, err)
	}
	var head struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(msg.Data, &head); err != nil {
		return errs.E(method, errkind.Internal, "", err)
	}
	if head.Error != nil {
		return errs.E(method, apiKind(head.Error), "", head.Error)
	}
	if resp == nil {
		return nil
	}
	return json.Unmarshal(msg.Data, resp)
}
