package natsblob

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go/jetstream"
)

// Headers of an object's record that other clients of the store ignore.
const (
	headerMD5    = "Content-Md5"
	headerChunks = "Berth-Chunks" // sequences of the chunks: "17+3,25+1"
	headerKey    = "Berth-Key"    // of every chunk: which object it belongs to
)

const maxChunks = 1 << 20

// object is an object's record as it stands in the stream.
type object struct {
	jetstream.ObjectInfo
	seq  uint64   // of the record
	seqs []uint64 // of its chunks; nil if its writer did not note them
}

func (o *object) contentType() string {
	if ct := http.Header(o.Headers).Get("Content-Type"); ct != "" {
		return ct
	}
	return "application/octet-stream"
}

func (o *object) md5() []byte {
	sum, err := base64.StdEncoding.DecodeString(http.Header(o.Headers).Get(headerMD5))
	if err != nil || len(sum) == 0 {
		return nil
	}
	return sum
}

func (o *object) chunkSize() int64 {
	if o.Opts == nil {
		return 0
	}
	return int64(o.Opts.ChunkSize)
}

// as exposes a *jetstream.ObjectInfo.
func (o *object) as(i any) bool {
	p, ok := i.(*jetstream.ObjectInfo)
	if ok {
		*p = o.ObjectInfo
	}
	return ok
}

// asMeta exposes what a writer may change before it writes.
func asMeta(m *jetstream.ObjectMeta) func(any) bool {
	return func(i any) bool {
		p, ok := i.(**jetstream.ObjectMeta)
		if ok {
			*p = m
		}
		return ok
	}
}

// stored is a message as JetStream's API hands it out.
type stored struct {
	Message struct {
		Subject string    `json:"subject"`
		Seq     uint64    `json:"seq"`
		Header  []byte    `json:"hdrs"`
		Data    []byte    `json:"data"`
		Time    time.Time `json:"time"`
	} `json:"message"`
}

// lookup reads an object's record at the leader. One that is marked deleted,
// as other clients do, is not found.
func (b *bucket) lookup(ctx context.Context, key string) (*object, error) {
	o, err := b.record(ctx, key)
	if err == nil && o.Deleted {
		return nil, errs.E("look up object", errkind.NotFound, key, "there is no such object")
	}
	return o, err
}

// record is lookup that also returns the mark of a deleted object.
func (b *bucket) record(ctx context.Context, key string) (*object, error) {
	const op = "look up object"
	var m stored
	err := b.conn.Read(ctx, "STREAM.MSG.GET."+b.stream, map[string]any{"last_by_subj": b.metaSubject(key)}, &m)
	if errs.Is(err, errkind.NotFound) {
		if ierr := b.conn.Read(ctx, "STREAM.INFO."+b.stream, nil, nil); errs.Is(ierr, errkind.NotFound) {
			return nil, errs.E(op, errkind.NotFound, key, "the bus has no object store "+b.name)
		}
		return nil, errs.E(op, errkind.NotFound, key, "there is no such object")
	}
	if err != nil {
		return nil, failed(op, key, err)
	}
	return decodeRecord(key, m.Message.Seq, m.Message.Time, m.Message.Data)
}

func decodeRecord(key string, seq uint64, at time.Time, data []byte) (*object, error) {
	o := &object{seq: seq}
	err := json.Unmarshal(data, &o.ObjectInfo)
	if err == nil && o.Name != key {
		err = fmt.Errorf("it is the record of %.100q", o.Name)
	}
	if err == nil {
		o.seqs, err = o.parseChunks()
	}
	if err != nil {
		return nil, errs.E("look up object", errkind.DataLoss, key, fmt.Errorf("its record cannot be read: %w", err))
	}
	o.ModTime = at
	return o, nil
}

// parseChunks reads which messages the chunks are, and holds them to the size.
func (o *object) parseChunks() ([]uint64, error) {
	text := http.Header(o.Headers).Get(headerChunks)
	size := o.chunkSize()
	if text == "" || size <= 0 || o.Deleted || o.isLink() {
		return nil, nil
	}
	seqs, err := parseRuns(text)
	if err != nil {
		return nil, err
	}
	if o.Size > maxChunks*uint64(size) || uint64(len(seqs)) != (o.Size+uint64(size)-1)/uint64(size) {
		return nil, fmt.Errorf("%d chunks of %d bytes do not make %d bytes", len(seqs), size, o.Size)
	}
	return seqs, nil
}

func (o *object) isLink() bool { return o.Opts != nil && o.Opts.Link != nil }

// formatRuns writes ascending sequences as "first+count" runs.
func formatRuns(seqs []uint64) string {
	var s strings.Builder
	for i := 0; i < len(seqs); {
		n := 1
		for i+n < len(seqs) && seqs[i+n] == seqs[i]+uint64(n) {
			n++
		}
		if i > 0 {
			s.WriteByte(',')
		}
		fmt.Fprintf(&s, "%d+%d", seqs[i], n)
		i += n
	}
	return s.String()
}

func parseRuns(text string) ([]uint64, error) {
	var out []uint64
	last := uint64(0)
	for run := range strings.SplitSeq(text, ",") {
		a, b, ok := strings.Cut(run, "+")
		first, err1 := strconv.ParseUint(a, 10, 63)
		n, err2 := strconv.ParseUint(b, 10, 32)
		if !ok || err1 != nil || err2 != nil || n == 0 || first <= last || uint64(len(out))+n > maxChunks {
			return nil, fmt.Errorf("%.40q is no list of chunks", text)
		}
		for i := range n {
			out = append(out, first+i)
		}
		last = first + n - 1
	}
	return out, nil
}
