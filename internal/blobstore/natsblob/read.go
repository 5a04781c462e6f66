package natsblob

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"gocloud.dev/blob/driver"
)

const opGet = "get object"

// reader hands out a range of an object. It asks for chunks in batches, the
// next while one is read.
type reader struct {
	b      *bucket
	ctx    context.Context
	key    string
	o      *object
	skip   int64 // bytes of the next chunk to leave out
	left   int64 // bytes to hand out
	chunks int   // chunks that may be asked for
	digest hash.Hash
	err    error
	cur    []byte

	sub   *nats.Subscription
	inbox string
	lost  chan nats.Status
	first int // index of the first chunk that is needed
	next  int // index of the chunk that is read next
	ask   int // index of the chunk that is asked for next
	per   int // chunks of a batch

	mu   sync.Mutex
	got  map[uint64][]byte // chunks that came, by sequence
	over map[int]bool      // batches that ended
	fail error
	news chan struct{}
	held int64 // bytes taken from the bucket's semaphore
}

// NewRangeReader implements driver.Bucket.
func (b *bucket) NewRangeReader(ctx context.Context, key string, offset, length int64, opts *driver.ReaderOptions) (driver.Reader, error) {
	o, err := b.lookup(ctx, key)
	if err != nil {
		return nil, err
	}
	if o.isLink() {
		return nil, errs.E(opGet, errkind.Unimplemented, key, "it is a link to another object")
	}
	if opts.BeforeRead != nil {
		if err := opts.BeforeRead(o.as); err != nil {
			return nil, err
		}
	}
	return b.reader(ctx, key, o, offset, length), nil
}

func (b *bucket) reader(ctx context.Context, key string, o *object, offset, length int64) *reader {
	r := &reader{b: b, ctx: ctx, key: key, o: o, got: map[uint64][]byte{}, over: map[int]bool{}, news: make(chan struct{}, 1)}
	r.left = max(int64(o.Size)-offset, 0)
	if length >= 0 {
		r.left = min(r.left, length)
	}
	if offset == 0 && r.left == int64(o.Size) {
		r.digest = sha256.New()
	}
	r.skip, r.chunks, r.per = offset, len(o.seqs), 1
	if o.seqs != nil {
		size := o.chunkSize()
		r.next = int(offset / size)
		r.skip = offset % size
		r.chunks = int((offset + r.left + size - 1) / size)
		r.per = int(max(batchBytes/size, 1))
	}
	r.first, r.ask = r.next, r.next
	return r
}

// Attributes implements driver.Reader.
func (r *reader) Attributes() *driver.ReaderAttributes {
	return &driver.ReaderAttributes{ContentType: r.o.contentType(), ModTime: r.o.ModTime, Size: int64(r.o.Size)}
}

// As exposes a *jetstream.ObjectInfo.
func (r *reader) As(i any) bool { return r.o.as(i) }

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, r.err
	}
	n := 0
	for n < len(p) {
		if err := r.load(); err != nil {
			if n > 0 {
				return n, nil // and the error next time
			}
			return 0, err
		}
		k := copy(p[n:], r.cur)
		r.cur = r.cur[k:]
		n += k
	}
	return n, nil
}

// Download implements driver.Downloader.
func (r *reader) Download(w io.Writer) error {
	for {
		err := r.load()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := w.Write(r.cur); err != nil {
			return err
		}
		r.cur = nil
	}
}

// load makes cur hold what comes next, or returns the end.
func (r *reader) load() error {
	for len(r.cur) == 0 && r.err == nil {
		if r.left == 0 {
			r.err = r.verify()
			break
		}
		data, err := r.chunk()
		if err != nil {
			r.err = failed(opGet, r.key, err)
			break
		}
		if cut := min(r.skip, int64(len(data))); cut > 0 {
			r.skip -= cut
			data = data[cut:]
		}
		r.cur = data[:min(r.left, int64(len(data)))]
		r.left -= int64(len(r.cur))
		if r.digest != nil {
			r.digest.Write(r.cur)
		}
	}
	if len(r.cur) > 0 {
		return nil
	}
	return r.err
}

func (r *reader) verify() error {
	if r.digest == nil || r.o.Digest == "" || jetstream.GetObjectDigestValue(r.digest) == r.o.Digest {
		return io.EOF
	}
	return errs.E(opGet, errkind.DataLoss, r.key, "its bytes do not match its SHA-256")
}

// chunk returns the next chunk.
func (r *reader) chunk() ([]byte, error) {
	if r.o.seqs == nil {
		return r.step()
	}
	if r.next >= r.chunks {
		return nil, errs.E(opGet, errkind.DataLoss, r.key, "it is shorter than its record says")
	}
	if err := r.request(); err != nil {
		return nil, err
	}
	seq := r.o.seqs[r.next]
	for {
		r.mu.Lock()
		data, ok := r.got[seq]
		delete(r.got, seq)
		missing, err := r.over[(r.next-r.first)/r.per], r.fail
		r.mu.Unlock()
		if !ok && (missing || err != nil) {
			if err != nil {
				return nil, err
			}
			if data, err = r.fromLeader(seq); err != nil {
				return nil, err
			}
			ok = true
		}
		if ok {
			want := min(r.o.chunkSize(), int64(r.o.Size)-int64(r.next)*r.o.chunkSize())
			if int64(len(data)) != want {
				return nil, errs.E(opGet, errkind.DataLoss, r.key, fmt.Sprintf("chunk %d has %d bytes instead of %d", r.next, len(data), want))
			}
			r.next++
			return data, nil
		}
		if err := r.wait(); err != nil {
			return nil, err
		}
	}
}

// wait waits for news. A replica that says nothing may be dead: what is left
// of its batch then comes from the leader.
func (r *reader) wait() error {
	t := time.NewTimer(replicaStall)
	defer t.Stop()
	select {
	case <-r.news:
		return nil
	case <-r.ctx.Done():
		return r.ctx.Err()
	case <-r.lost:
		return errLost
	case <-t.C:
		r.mu.Lock()
		r.over[(r.next-r.first)/r.per] = true
		r.mu.Unlock()
		return nil
	}
}

// request asks for batches until two are on their way or waiting to be read.
func (r *reader) request() error {
	if r.sub == nil {
		r.inbox = r.b.nc.NewInbox()
		r.lost = r.b.nc.StatusChanged(nats.DISCONNECTED, nats.RECONNECTING, nats.CLOSED)
		sub, err := r.b.nc.Subscribe(r.inbox+".*", r.receive)
		if err != nil {
			return err
		}
		r.sub = sub
	}
	for r.ask < r.chunks && r.ask-r.next <= r.per {
		n := min(r.per, r.chunks-r.ask)
		size := int64(n) * r.o.chunkSize()
		if r.ask == r.next {
			if err := r.b.reads.Acquire(r.ctx, size); err != nil {
				return err
			}
		} else if !r.b.reads.TryAcquire(size) {
			return nil // reading ahead must not wait
		}
		r.mu.Lock()
		r.held += size
		r.mu.Unlock()
		body, err := json.Marshal(map[string]any{"seq": r.o.seqs[r.ask], "next_by_subj": r.b.chunkSubject(r.o.NUID), "batch": n})
		if err != nil {
			return err
		}
		reply := r.inbox + "." + strconv.Itoa((r.ask-r.first)/r.per)
		if err := r.b.nc.PublishRequest("$JS.API.DIRECT.GET."+r.b.stream, reply, body); err != nil {
			return err
		}
		r.ask += n
	}
	return nil
}

// receive takes what the server sends, so that nothing waits in nats.go.
func (r *reader) receive(m *nats.Msg) {
	end, err := isEnd(m)
	r.mu.Lock()
	switch {
	case err != nil && !errors.Is(err, nats.ErrNoResponders):
		r.fail = err
	case end: // also where no replica answers, as during an election: the leader is asked, and waited for
		batch, _ := strconv.Atoi(m.Subject[len(r.inbox)+1:])
		r.over[batch] = true
	default:
		seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
		if err != nil || m.Header.Get("Nats-Subject") != r.b.chunkSubject(r.o.NUID) {
			r.fail = fmt.Errorf("the bus sent %.100q instead of a chunk", m.Header.Get("Nats-Subject"))
			break
		}
		r.got[seq] = m.Data
		r.release(r.o.chunkSize())
	}
	r.mu.Unlock()
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// release gives bytes back that were taken before they were asked for.
func (r *reader) release(n int64) {
	n = min(n, r.held)
	r.held -= n
	r.b.reads.Release(n)
}

// fromLeader reads a chunk that a replica did not have.
func (r *reader) fromLeader(seq uint64) ([]byte, error) {
	var m stored
	err := r.b.conn.Read(r.ctx, "STREAM.MSG.GET."+r.b.stream, map[string]any{"seq": seq}, &m)
	if err == nil && m.Message.Subject == r.b.chunkSubject(r.o.NUID) {
		return m.Message.Data, nil
	}
	if err != nil && !errs.Is(err, errkind.NotFound) {
		return nil, err
	}
	return nil, r.missing(strconv.Itoa(r.next))
}

// missing tells an object that was replaced while it was read from one that
// lost a chunk.
func (r *reader) missing(which string) error {
	now, err := r.b.lookup(r.ctx, r.key)
	if err != nil {
		return err
	}
	if now.NUID != r.o.NUID {
		return errs.E(opGet, errkind.Conflict, r.key, "it was replaced while it was read")
	}
	return errs.E(opGet, errkind.DataLoss, r.key, "chunk "+which+" is missing")
}

// step reads the next chunk of an object whose writer did not note where its
// chunks are, one at a time from the first.
func (r *reader) step() ([]byte, error) {
	var data []byte
	found := false
	from := uint64(max(r.ask, 1))
	req := map[string]any{"seq": from, "next_by_subj": r.b.chunkSubject(r.o.NUID), "batch": 1}
	err := r.b.batch(r.ctx, req, func(m *nats.Msg, seq uint64) { data, r.ask, found = m.Data, int(seq)+1, true })
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, r.missing("after message " + strconv.FormatUint(from, 10))
	}
	r.next++
	return data, nil
}

// Close implements io.Closer.
func (r *reader) Close() error {
	if r.sub != nil {
		_ = r.sub.Unsubscribe()
		r.sub = nil
		r.b.nc.RemoveStatusListener(r.lost)
		r.mu.Lock()
		r.release(r.held)
		r.mu.Unlock()
	}
	if r.err == nil {
		r.err = errors.New("the reader is closed")
	}
	return nil
}
