package bus

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go"
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
	ctx, cancel := withTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx, done := c.failFast(ctx, "$JS.API.STREAM.INFO.KV_"+name)
	defer done()
	var kv jetstream.KeyValue
	err := whileAway(ctx, readWait, func(ctx context.Context) (err error) {
		kv, err = c.js.KeyValue(ctx, name)
		return err
	})
	if err != nil {
		return nil, c.kvFailed("open bucket", name, err)
	}
	return &Bucket{name: name, kv: kv, conn: c}, nil
}

// KV returns the bucket of nats.go below, for watching.
func (b *Bucket) KV() jetstream.KeyValue { return b.kv }

// Get returns a key's value and revision as the bucket's leader has them: what
// was written before is seen. After the loss of the leader it waits, within
// ctx, until there is another, which takes 4 to 8 s.
func (b *Bucket) Get(ctx context.Context, key string) (value []byte, revision uint64, err error) {
	var m *jetstream.RawStreamMsg
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	err = whileAway(ctx, readWait, func(ctx context.Context) error {
		m, err = b.conn.lastMsg(ctx, "KV_"+b.name, "$KV."+b.name+"."+key)
		return err
	})
	if errs.Is(err, errkind.NotFound) || err == nil && m.Header.Get("KV-Operation") != "" || err == nil && m.Header.Get("Nats-Marker-Reason") != "" {
		return nil, 0, b.conn.kvFailed("get", b.name+"/"+key, jetstream.ErrKeyNotFound)
	}
	if err != nil {
		return nil, 0, b.conn.kvFailed("get", b.name+"/"+key, err)
	}
	return m.Data, m.Sequence, nil
}

// GetAny is Get from any replica, also while the bucket has no leader. It may
// miss what was written lately and show what was deleted lately.
func (b *Bucket) GetAny(ctx context.Context, key string) (value []byte, revision uint64, err error) {
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	var e jetstream.KeyValueEntry
	err = whileAway(ctx, anyWait, func(ctx context.Context) error {
		e, err = b.kv.Get(ctx, key)
		return err
	})
	if err != nil {
		return nil, 0, b.conn.kvFailed("get", b.name+"/"+key, err)
	}
	return e.Value(), e.Revision(), nil
}

const (
	readWait = 2 * time.Second        // for an answer of a leader that may be dead
	anyWait  = 500 * time.Millisecond // for one of several replicas, of which one may be dead
)

// Put writes a key whatever it held.
func (b *Bucket) Put(ctx context.Context, key string, value []byte) (revision uint64, err error) {
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	err = whileAway(ctx, ackWait, func(ctx context.Context) error {
		revision, err = b.kv.Put(ctx, key, value)
		return err
	})
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

// SecureDelete overwrites the stored value of a key on every replica and then
// removes the key. A key that does not exist is no error. With replicas the
// value also went through the log of the group, whose files keep it until
// they are compacted: what must be unreadable at once is stored encrypted.
func (b *Bucket) SecureDelete(ctx context.Context, key string) error {
	id := b.name + "/" + key
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	_, rev, err := b.Get(ctx, key)
	if errs.Is(err, errkind.NotFound) {
		return nil
	}
	if err != nil {
		return errs.Wrap("secure delete", id, err)
	}
	err = whileAway(ctx, ackWait, func(ctx context.Context) error {
		err := b.conn.deleteMsg(ctx, "KV_"+b.name, rev, true)
		if gone(err) {
			return nil // by an attempt whose answer was lost
		}
		return err
	})
	if err == nil {
		err = whileAway(ctx, ackWait, func(ctx context.Context) error { return b.kv.Purge(ctx, key) })
	}
	return b.conn.kvFailed("secure delete", id, err)
}

// gone tells whether a message is not there to be deleted.
func gone(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.Code == 404 || api.ErrorCode == jetstream.JSErrCodeMessageNotFound || api.ErrorCode == 10043)
}

// lastMsg reads the last message of a subject from the stream's leader.
func (c *Conn) lastMsg(ctx context.Context, stream, subject string) (*jetstream.RawStreamMsg, error) {
	var resp struct {
		Message struct {
			Seq    uint64    `json:"seq"`
			Header []byte    `json:"hdrs"`
			Data   []byte    `json:"data"`
			Time   time.Time `json:"time"`
		} `json:"message"`
	}
	if err := c.api(ctx, "STREAM.MSG.GET."+stream, map[string]string{"last_by_subj": subject}, &resp); err != nil {
		return nil, err
	}
	m := resp.Message
	out := &jetstream.RawStreamMsg{Subject: subject, Sequence: m.Seq, Data: m.Data, Time: m.Time, Header: nats.Header{}}
	if len(m.Header) > 0 {
		h, err := nats.DecodeHeadersMsg(m.Header)
		if err != nil {
			return nil, errs.E("read message", errkind.DataLoss, subject, err)
		}
		out.Header = h
	}
	return out, nil
}

// Keys lists the keys that exist; none is no error.
func (b *Bucket) Keys(ctx context.Context) ([]string, error) {
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	var keys []string
	err := whileAway(ctx, 10*time.Second, func(ctx context.Context) (err error) {
		keys, err = b.kv.Keys(ctx)
		return err
	})
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
	var e *errs.Error
	if errors.As(err, &e) {
		return errs.E(op, e.Kind, id, err)
	}
	err = c.failed("", id, err)
	return errs.E(op, errs.Kind(err), id, err)
}

// purge removes the messages of one subject of a stream.
func (c *Conn) purge(ctx context.Context, stream, subject string) error {
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	return whileAway(ctx, ackWait, func(ctx context.Context) error {
		return c.api(ctx, "STREAM.PURGE."+stream, map[string]any{"filter": subject}, nil)
	})
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

// Read is API for methods that change nothing: it asks again, within ctx, while
// the stream has no leader to answer.
func (c *Conn) Read(ctx context.Context, method string, req, resp any) error {
	ctx, cancel := withTimeout(ctx, defaultTimeout)
	defer cancel()
	return whileAway(ctx, readWait, func(ctx context.Context) error { return c.api(ctx, method, req, resp) })
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
