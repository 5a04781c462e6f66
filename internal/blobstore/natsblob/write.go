package natsblob

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"strconv"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"gocloud.dev/blob/driver"
)

var (
	errLost = errors.New("the connection to the bus was lost")
	errLed  = errors.New("the store's stream has another leader, and its former one acknowledged nothing")
)

const opPut = "put object"

// writer sends chunks as they come, a window of them unacknowledged.
type writer struct {
	b          *bucket
	ctx        context.Context
	key        string
	info       jetstream.ObjectInfo
	ifNotExist bool

	chunk  []byte // what is not sent yet
	sha    hash.Hash
	sub    *nats.Subscription
	inbox  string
	acks   chan *nats.Msg
	lost   chan nats.Status
	sent   int
	heard  int      // answers that came
	seqs   []uint64 // acknowledged
	unseen int64    // bytes that are not acknowledged
	sizes  []int64
	times  []time.Time // when each was sent
	err    error
	over   bool
}

// NewTypedWriter implements driver.Bucket.
func (b *bucket) NewTypedWriter(ctx context.Context, key, contentType string, opts *driver.WriterOptions) (driver.Writer, error) {
	if key == "" {
		return nil, errs.E(opPut, errkind.Invalid, "", "an object needs a name")
	}
	w := b.writer(ctx, key)
	w.ifNotExist = opts.IfNotExist
	w.info.Metadata = opts.Metadata
	for name, value := range map[string]string{
		"Content-Type": contentType, "Cache-Control": opts.CacheControl, "Content-Disposition": opts.ContentDisposition,
		"Content-Encoding": opts.ContentEncoding, "Content-Language": opts.ContentLanguage,
	} {
		if value != "" {
			w.info.Headers.Set(name, value)
		}
	}
	if len(opts.ContentMD5) > 0 { // the portable type holds the bytes to it; else SHA-256 is sum enough
		w.info.Headers.Set(headerMD5, base64.StdEncoding.EncodeToString(opts.ContentMD5))
	}
	if opts.BeforeWrite != nil {
		if err := opts.BeforeWrite(asMeta(&w.info.ObjectMeta)); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (b *bucket) writer(ctx context.Context, key string) *writer {
	w := &writer{b: b, ctx: ctx, key: key, sha: sha256.New()}
	w.info.Bucket, w.info.NUID, w.info.Name, w.info.Headers = b.name, nuid.Next(), key, nats.Header{}
	w.info.Opts = &jetstream.ObjectMetaOptions{ChunkSize: uint32(b.chunk)}
	return w
}

// start subscribes to acknowledgements; an object without content never does.
func (w *writer) start() (err error) {
	w.inbox = w.b.nc.NewInbox()
	w.acks = make(chan *nats.Msg, writeWindow/w.b.chunk+2)
	w.lost = w.b.nc.StatusChanged(nats.DISCONNECTED, nats.RECONNECTING, nats.CLOSED)
	if !w.b.nc.IsConnected() {
		err = errLost
	} else {
		w.sub, err = w.b.nc.ChanSubscribe(w.inbox+".*", w.acks)
	}
	return err
}

// Write implements io.Writer.
func (w *writer) Write(p []byte) (n int, err error) {
	for len(p) > 0 && w.err == nil {
		if w.chunk == nil {
			w.chunk = make([]byte, 0, w.b.chunk)
		}
		k := min(len(p), w.b.chunk-len(w.chunk))
		w.chunk = append(w.chunk, p[:k]...)
		n, p = n+k, p[k:]
		if len(w.chunk) == w.b.chunk {
			w.err = w.send()
		}
	}
	if w.err != nil {
		return n, failed(opPut, w.key, w.err)
	}
	return n, nil
}

// send publishes the chunk once there is room in the windows.
func (w *writer) send() error {
	if w.inbox == "" {
		if err := w.start(); err != nil {
			return err
		}
	}
	w.sha.Write(w.chunk)
	size := int64(len(w.chunk))
	for w.sent > len(w.seqs) && w.unseen+size > writeWindow {
		if err := w.ack(w.ctx); err != nil {
			return err
		}
	}
	for !w.b.writes.TryAcquire(size) {
		if w.sent > len(w.seqs) { // others wait for what this one holds
			if err := w.ack(w.ctx); err != nil {
				return err
			}
			continue
		}
		if err := w.b.writes.Acquire(w.ctx, size); err != nil {
			return err
		}
		break
	}
	m := nats.NewMsg(w.b.chunkSubject(w.info.NUID))
	m.Reply = w.inbox + "." + strconv.Itoa(w.sent)
	m.Header.Set(headerKey, base64.URLEncoding.EncodeToString([]byte(w.key)))
	m.Data = w.chunk
	w.sent++
	w.unseen += size
	w.sizes, w.times = append(w.sizes, size), append(w.times, time.Now())
	w.info.Size += uint64(size)
	w.info.Chunks++
	w.chunk = w.chunk[:0] // nats.go has copied or sent it when PublishMsg returns
	return w.b.nc.PublishMsg(m)
}

// ack takes the acknowledgement of the next chunk.
func (w *writer) ack(ctx context.Context) error {
	m, err := w.answer(ctx)
	if err != nil {
		return err
	}
	i := len(w.seqs)
	if m.Subject != w.inbox+"."+strconv.Itoa(i) {
		return fmt.Errorf("chunk %d was not acknowledged in its turn", i)
	}
	seq, err := pubAck(m)
	if err != nil {
		return err
	}
	if i > 0 && seq <= w.seqs[i-1] {
		return fmt.Errorf("chunk %d was stored out of order", i)
	}
	w.seqs = append(w.seqs, seq)
	w.unseen -= w.sizes[i]
	w.b.writes.Release(w.sizes[i])
	return nil
}

// answered notes that the stream answered what was sent at that time.
func (b *bucket) answered(sent time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = answered{time.Now(), sent}
}

// patience is how long an answer to what was sent at that time is still waited for, in a wait that began
// at since. The stream answers in the order of sending: while it answers what was sent earlier, by other
// writers too, it does not stall. Once it answers what was sent later, it skipped this.
func (b *bucket) patience(sent, since time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Writers that publish at once get the connection in any order: a little later is not later.
	if b.last.at.After(since) && b.last.sent.Before(sent.Add(lookAfter)) {
		since = b.last.at
	}
	return time.Until(since.Add(stall))
}

func (w *writer) answer(ctx context.Context) (*nats.Msg, error) {
	began, t := time.Now(), time.NewTimer(stall)
	defer t.Stop()
	look := time.NewTicker(lookAfter)
	defer look.Stop()
	for {
		select {
		case m := <-w.acks:
			w.b.answered(w.times[w.heard])
			w.heard++
			return m, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-w.lost:
			return nil, errLost
		case <-look.C:
			if w.b.ledSince(ctx, w.times[w.heard]) && len(w.acks) == 0 {
				return nil, errLed
			}
		case <-t.C:
			left := w.b.patience(w.times[w.heard], began)
			if left <= 0 {
				return nil, fmt.Errorf("the bus acknowledged nothing within %s", stall)
			}
			t.Reset(left)
		}
	}
}

// ledSince reports whether the stream has got a leader after a time: what its
// former one had in hand then is never answered. By the clock of its node: one
// that goes wrong costs a write that is repeated, or a longer wait.
func (b *bucket) ledSince(ctx context.Context, at time.Time) bool {
	ctx, cancel := context.WithTimeout(ctx, lookAfter)
	defer cancel()
	var info struct {
		Cluster struct {
			Since *time.Time `json:"leader_since"`
		} `json:"cluster"`
	}
	err := b.conn.Read(ctx, "STREAM.INFO."+b.stream, nil, &info)
	return err == nil && info.Cluster.Since != nil && info.Cluster.Since.After(at)
}

func pubAck(m *nats.Msg) (uint64, error) {
	if m.Header.Get("Status") == "503" {
		return 0, nats.ErrNoResponders
	}
	var ack struct {
		Seq   uint64              `json:"seq"`
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &ack); err != nil {
		return 0, err
	}
	if ack.Error != nil {
		return 0, ack.Error
	}
	return ack.Seq, nil
}

// Close makes the object visible, or takes everything of it away.
func (w *writer) Close() error {
	if w.err == nil {
		w.err = w.ctx.Err()
	}
	if w.err == nil && len(w.chunk) > 0 {
		w.err = w.send()
	}
	for w.err == nil && len(w.seqs) < w.sent {
		w.err = w.ack(w.ctx)
	}
	if w.err != nil {
		w.abort()
		return failed(opPut, w.key, w.err)
	}
	w.end()
	w.info.Digest = jetstream.GetObjectDigestValue(w.sha)
	w.info.Headers.Del(headerChunks)
	if len(w.seqs) > 0 {
		w.info.Headers.Set(headerChunks, formatRuns(w.seqs))
	}
	return w.commit()
}

// commit publishes the record, on condition that the one it replaces is still
// the last, and then removes the chunks of that.
func (w *writer) commit() error {
	body, err := json.Marshal(w.info)
	if err == nil && len(body) > bus.MaxPayload-16<<10 {
		err = errs.Errorf(opPut, errkind.TooLarge, "its metadata makes a record of %d bytes", len(body))
	}
	for err == nil {
		var old *object
		if old, err = w.b.record(w.ctx, w.key); errs.Is(err, errkind.NotFound) || errs.Is(err, errkind.DataLoss) {
			old, err = w.unreadable(err)
		}
		if err != nil {
			break
		}
		if w.ifNotExist && old.seq > 0 && !old.Deleted {
			err = errs.E(opPut, errkind.Exists, w.key, "it exists already")
			break
		}
		if err = w.publish(body, old.seq); errs.Is(err, errkind.Conflict) {
			err = nil
			continue
		}
		if err == nil && old.NUID != "" && old.NUID != w.info.NUID {
			w.b.clear(old.NUID)
		}
		if err == nil || errs.Is(err, errkind.Deadline) {
			return err // in doubt: Tidy finds the chunks if there is no record
		}
		break
	}
	if err == nil {
		return nil
	}
	w.b.clear(w.info.NUID)
	return failed(opPut, w.key, err)
}

// unreadable is what stands under the key where there is no record, or one
// that nobody can read: it may be replaced.
func (w *writer) unreadable(err error) (*object, error) {
	if errs.Is(err, errkind.NotFound) {
		return &object{}, nil
	}
	var m stored
	err = w.b.conn.Read(w.ctx, "STREAM.MSG.GET."+w.b.stream, map[string]any{"last_by_subj": w.b.metaSubject(w.key)}, &m)
	if err != nil && !errs.Is(err, errkind.NotFound) {
		return nil, err
	}
	return &object{seq: m.Message.Seq}, nil
}

// publish stores the record. The error is of kind Deadline if it is not known
// whether it was stored.
func (w *writer) publish(body []byte, last uint64) error {
	m := nats.NewMsg(w.b.metaSubject(w.key))
	m.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
	m.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(last, 10))
	m.Data = body
	lost := w.b.nc.StatusChanged(nats.DISCONNECTED, nats.RECONNECTING, nats.CLOSED)
	defer w.b.nc.RemoveStatusListener(lost)
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	sent := time.Now()
	go func() {
		defer cancel()
		look, t := time.NewTicker(lookAfter), time.NewTimer(stall)
		defer look.Stop()
		defer t.Stop()
		for {
			select {
			case <-lost:
				return
			case <-ctx.Done():
				return
			case <-t.C:
				left := w.b.patience(sent, sent)
				if left <= 0 {
					return
				}
				t.Reset(left)
			case <-look.C:
				if w.b.ledSince(ctx, sent) {
					return
				}
			}
		}
	}()
	reply, err := w.b.nc.RequestMsgWithContext(ctx, m)
	switch {
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrNoResponders):
		return failed(opPut, w.key, err)
	case err != nil:
		return errs.E(opPut, errkind.Deadline, w.key, fmt.Errorf("whether it was stored is not known: %w", err))
	}
	w.b.answered(sent)
	if _, err = pubAck(reply); err != nil {
		return failed(opPut, w.key, err)
	}
	return nil
}

// end gives back what the writer holds.
func (w *writer) end() {
	if w.over {
		return
	}
	w.over = true
	if w.sub != nil {
		_ = w.sub.Unsubscribe()
	}
	if w.lost != nil {
		w.b.nc.RemoveStatusListener(w.lost)
	}
	w.b.writes.Release(w.unseen)
}

// abort waits for the chunks that are on their way, so that none is stored
// after the purge, and removes them.
func (w *writer) abort() {
	if w.over {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), cleanupTime)
	defer cancel()
	for w.heard < w.sent && !errors.Is(w.err, errLost) {
		if _, err := w.answer(ctx); err != nil {
			break
		}
	}
	w.end()
	if w.sent > 0 {
		w.b.clear(w.info.NUID)
	}
}
