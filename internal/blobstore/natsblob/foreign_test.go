package natsblob

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"io"
	"log/slog"
	"testing"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/nats-io/nats.go/jetstream"
)

var quiet = slog.New(slog.DiscardHandler)

// foreign writes an object as nats.go's Put does: chunks of any size, and no
// word of where they are. A host may write it, so the test needs no more.
func foreign(t *testing.T, conn *bus.Conn, key string, data []byte, chunk int) []byte {
	t.Helper()
	b := newBucket(conn, store, &Options{Log: quiet})
	ctx := bustest.Context(t)
	info := jetstream.ObjectInfo{Bucket: store, NUID: "foreign-" + key, Size: uint64(len(data))}
	info.Name = key
	info.Opts = &jetstream.ObjectMetaOptions{ChunkSize: 128 << 10}
	h := sha256.New()
	for r := bytes.NewReader(data); ; info.Chunks++ {
		buf := make([]byte, chunk)
		n, err := io.ReadFull(r, buf)
		if n == 0 || err == io.EOF {
			break
		}
		h.Write(buf[:n])
		if _, err := conn.JetStream().Publish(ctx, b.chunkSubject(info.NUID), buf[:n]); err != nil {
			t.Fatal(err)
		}
	}
	info.Digest = jetstream.GetObjectDigestValue(h)
	body, err := json.Marshal(info)
	if err == nil {
		_, err = conn.JetStream().Publish(ctx, b.metaSubject(key), body)
	}
	if err != nil {
		t.Fatal(err)
	}
	return data
}
