package natsblob

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/blob/drivertest"
	"gocloud.dev/gcerrors"
	"pgregory.net/rapid"
)

const store = "BERTH_DISKS"

var host = subjects.Host("h1")

// harness has one bus for all of the suite: the driver is logged in as a host,
// with no more permissions than one.
type harness struct {
	conn, keeper *bus.Conn
	chunk        int
}

func (h *harness) MakeDriver(ctx context.Context) (driver.Bucket, error) {
	return open(ctx, h.conn, store, &Options{ChunkSize: h.chunk, Log: quiet})
}

func (h *harness) MakeDriverForNonexistentBucket(context.Context) (driver.Bucket, error) {
	return newBucket(h.keeper, "BERTH_NOTHING", nil), nil // a host may not even ask for it
}
func (*harness) HTTPClient() *http.Client         { return nil }
func (*harness) SupportsCopy() bool               { return true }
func (*harness) SupportsNonSlashDelimiters() bool { return true }
func (*harness) SkipDownloadAt() bool             { return false }
func (*harness) Close()                           {}

// asTest checks what the driver exposes.
type asTest struct{}

func (asTest) Name() string { return "nats types" }
func (asTest) BucketCheck(b *blob.Bucket) error {
	var nc *nats.Conn
	var conn *bus.Conn
	if !b.As(&nc) || !b.As(&conn) || conn.NATS() != nc {
		return errors.New("the bucket does not expose its connection")
	}
	return nil
}
func (asTest) ErrorCheck(b *blob.Bucket, err error) error {
	var e *errs.Error
	if !b.ErrorAs(err, &e) || e.Kind != errkind.NotFound || !errs.Is(err, errkind.NotFound) {
		return fmt.Errorf("%v has not its kind", err)
	}
	return nil
}
func info(as func(any) bool) error {
	var i jetstream.ObjectInfo
	if !as(&i) || i.NUID == "" {
		return errors.New("no object info")
	}
	return nil
}
func meta(as func(any) bool) error {
	var m *jetstream.ObjectMeta
	if !as(&m) || m.Name == "" {
		return errors.New("no object meta")
	}
	return nil
}
func (asTest) BeforeRead(as func(any) bool) error   { return info(as) }
func (asTest) BeforeWrite(as func(any) bool) error  { return meta(as) }
func (asTest) BeforeCopy(as func(any) bool) error   { return meta(as) }
func (asTest) BeforeDelete(as func(any) bool) error { return info(as) }
func (asTest) BeforeList(func(any) bool) error      { return nil }
func (asTest) BeforeSign(func(any) bool) error      { return nil }
func (asTest) AttributesCheck(a *blob.Attributes) error {
	return info(a.As)
}
func (asTest) ReaderCheck(r *blob.Reader) error { return info(r.As) }
func (asTest) ListObjectCheck(o *blob.ListObject) error {
	if o.IsDir {
		return nil
	}
	return info(o.As)
}

// gocloud's own suite, against a real server with a host's permissions in
// force, with chunks as they are and with chunks of 7 bytes. What the suite
// skips by design: SignedURL, which an object store on the bus does not have.
func TestConformance(t *testing.T) {
	t.Parallel()
	e := bustest.Start(t, host)
	conn, keeper := bustest.Connect(t, e, host), bustest.Connect(t, e, subjects.Keeper())
	for _, chunk := range []int{0, 7} {
		t.Run(fmt.Sprintf("chunk=%d", chunk), func(t *testing.T) {
			if chunk > 0 && testing.Short() {
				t.Skip("-short: the suite ran with chunks as they are")
			}
			drivertest.RunConformanceTests(t, func(context.Context, *testing.T) (drivertest.Harness, error) {
				return &harness{conn, keeper, chunk}, nil
			}, []drivertest.AsTest{asTest{}})
			deleteAll(t, bucketOf(t, conn, chunk)) // the suite leaves objects of its listings
			if n := messages(t, conn); n != 0 {
				t.Errorf("the suite left %d messages in the stream", n)
			}
		})
	}
}

func deleteAll(t testing.TB, b *blob.Bucket) {
	t.Helper()
	ctx := bustest.Context(t)
	for list := b.List(nil); ; {
		o, err := list.Next(ctx)
		if err == io.EOF {
			return
		}
		if err == nil {
			err = b.Delete(ctx, o.Key)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// messages counts everything in the store's stream: records and chunks.
func messages(t testing.TB, conn *bus.Conn) uint64 {
	t.Helper()
	var resp struct {
		State struct {
			Messages uint64 `json:"messages"`
		} `json:"state"`
	}
	if err := conn.API(bustest.Context(t), "STREAM.INFO.OBJ_"+store, nil, &resp); err != nil {
		t.Fatal(err)
	}
	return resp.State.Messages
}

func random(n int) []byte {
	out := make([]byte, n)
	_, _ = rand.Read(out)
	return out
}

func bucketOf(t testing.TB, conn *bus.Conn, chunk int) *blob.Bucket {
	t.Helper()
	b, err := Open(bustest.Context(t), conn, store, &Options{ChunkSize: chunk, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// Any range of an object is what was written, whatever lies between its
// chunks in the stream.
func TestAnyRangeIsWhatWasWritten(t *testing.T) {
	conn := bustest.Connect(t, bustest.Start(t, host), host)
	ctx := bustest.Context(t)
	small, big := bucketOf(t, conn, 100), bucketOf(t, conn, 0)
	content := map[string][]byte{"small": random(5050), "big": random(9<<20 + 17), "empty": nil, "whole": random(4000)}
	done := make(chan error, len(content))
	for key, data := range content {
		go func() {
			b := small
			if key == "big" {
				b = big
			}
			done <- b.WriteAll(ctx, key, data, nil)
		}()
	}
	for range content {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		key := rapid.SampledFrom([]string{"small", "big", "empty", "whole"}).Draw(t, "key")
		data := content[key]
		off := rapid.IntRange(0, len(data)).Draw(t, "offset")
		n := rapid.IntRange(-1, len(data)-off+10).Draw(t, "length")
		r, err := small.NewRangeReader(ctx, key, int64(off), int64(n), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got, err := io.ReadAll(r)
		want := data[off:]
		if n >= 0 {
			want = want[:min(n, len(want))]
		}
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%s [%d,+%d): %d bytes, want %d, %v", key, off, n, len(got), len(want), err)
		}
	})
}

// The store stays a JetStream object store: nats.go reads what is written
// here, and what nats.go wrote is read, ranged, listed and deleted here.
func TestOtherClientsOfTheObjectStoreUnderstandIt(t *testing.T) {
	e := bustest.Start(t, host)
	conn, keeper := bustest.Connect(t, e, host), bustest.Connect(t, e, subjects.Keeper())
	ctx := bustest.Context(t)
	b := bucketOf(t, conn, 1000)
	data := random(123_456)
	if err := b.WriteAll(ctx, "a/ours", data, &blob.WriterOptions{ContentType: "text/x", Metadata: map[string]string{"k": "v"}}); err != nil {
		t.Fatal(err)
	}
	obs, err := keeper.JetStream().ObjectStore(ctx, store) // hosts may make no consumers
	if err != nil {
		t.Fatal(err)
	}
	got, err := obs.GetBytes(ctx, "a/ours")
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("nats.go read %d bytes, %v", len(got), err)
	}
	theirs := foreign(t, conn, "theirs", data, 777)
	all, err := b.ReadAll(ctx, "theirs")
	if err != nil || !bytes.Equal(all, theirs) {
		t.Fatalf("%d bytes, %v", len(all), err)
	}
	r, err := b.NewRangeReader(ctx, "theirs", 50_000, 1234, nil)
	if err != nil {
		t.Fatal(err)
	}
	part, err := io.ReadAll(r)
	_ = r.Close()
	if err != nil || !bytes.Equal(part, data[50_000:51_234]) {
		t.Fatalf("%d bytes, %v", len(part), err)
	}
	if err := b.Delete(ctx, "theirs"); err != nil {
		t.Fatal(err)
	}
	if err := b.Delete(ctx, "a/ours"); err != nil {
		t.Fatal(err)
	}
	if n := messages(t, conn); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

// Of two writers that create the same object one wins, and nothing of the
// other stays; without the condition the last one does.
func TestConcurrentWritersLeaveOneObject(t *testing.T) {
	conn := bustest.Connect(t, bustest.Start(t, host), host)
	ctx := bustest.Context(t)
	b := bucketOf(t, conn, 100)
	for _, once := range []bool{true, false} {
		const writers = 8
		errc := make(chan error, writers)
		for i := range writers {
			go func() {
				errc <- b.WriteAll(ctx, "x", bytes.Repeat([]byte{byte(i)}, 450), &blob.WriterOptions{IfNotExist: once})
			}()
		}
		won := 0
		for range writers {
			switch err := <-errc; {
			case err == nil:
				won++
			case !once || gcerrors.Code(err) != gcerrors.FailedPrecondition || !errs.Is(err, errkind.Exists):
				t.Errorf("got %v", err)
			}
		}
		if want := map[bool]int{true: 1, false: writers}[once]; won != want {
			t.Errorf("once=%t: %d won", once, won)
		}
		if n := messages(t, conn); n != 6 {
			t.Errorf("%d messages, want a record and 5 chunks", n)
		}
		if err := b.Delete(ctx, "x"); err != nil {
			t.Fatal(err)
		}
	}
}

// A page costs no more than its objects, and a listing is in order whatever
// is deleted meanwhile.
func TestListingGoesOnWhileObjectsAreDeleted(t *testing.T) {
	conn := bustest.Connect(t, bustest.Start(t, host), host)
	ctx := bustest.Context(t)
	b := bucketOf(t, conn, 0)
	for i := range 30 {
		if err := b.WriteAll(ctx, fmt.Sprintf("v1/t/%02d", i), []byte("x"), nil); err != nil {
			t.Fatal(err)
		}
	}
	page, token, err := b.ListPage(ctx, blob.FirstPageToken, 10, &blob.ListOptions{Prefix: "v1/t/"})
	if err != nil || len(page) != 10 {
		t.Fatalf("%d, %v", len(page), err)
	}
	for i := range 15 {
		if err := b.Delete(ctx, fmt.Sprintf("v1/t/%02d", i)); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for len(token) > 0 {
		if page, token, err = b.ListPage(ctx, token, 10, &blob.ListOptions{Prefix: "v1/t/"}); err != nil {
			t.Fatal(err)
		}
		for _, o := range page {
			got = append(got, o.Key)
		}
	}
	if len(got) != 15 || got[0] != "v1/t/15" || got[14] != "v1/t/29" {
		t.Errorf("got %q", got)
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	e := bustest.Start(t, host)
	_, err := Open(bustest.Context(t), bustest.Connect(t, e, host), "NOTHING", nil)
	if !errs.Is(err, errkind.Denied) { // hosts may not even ask for others
		t.Errorf("got %v", err)
	}
	_, err = Open(bustest.Context(t), bustest.Connect(t, e, subjects.Keeper()), "NOTHING", nil)
	if !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
}

// Nobody but hosts opens the store.
func TestFrontendsServicesAndOperatorsAreRefused(t *testing.T) {
	fe := subjects.Frontend("acme", "web")
	e := bustest.Start(t, host, fe)
	for _, c := range []subjects.Caller{fe, subjects.Operator(), subjects.Service("identity"), subjects.Service("lifecycle"),
		subjects.Service("scheduler"), subjects.Service("credentials")} {
		if _, err := Open(bustest.Context(t), bustest.Connect(t, e, c), store, nil); !errs.Is(err, errkind.Denied) {
			t.Errorf("%s: got %v", c, err)
		}
	}
	bucketOf(t, bustest.Connect(t, e, host), 0)
}

func FuzzRuns(f *testing.F) {
	f.Add("17+3,25+1")
	f.Add("1+99999999")
	f.Fuzz(func(t *testing.T, s string) {
		seqs, err := parseRuns(s)
		if err != nil {
			return
		}
		again, err := parseRuns(formatRuns(seqs))
		if err != nil || fmt.Sprint(again) != fmt.Sprint(seqs) {
			t.Fatalf("%q: %v, %v", s, again, err)
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"name":"k","bucket":"B","nuid":"n","size":5,"headers":{"Berth-Chunks":["3+1"]},"options":{"max_chunk_size":7}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := decodeRecord("k", 1, time.Time{}, data)
		if err == nil && o.seqs != nil && uint64(len(o.seqs))*uint64(o.chunkSize()) < o.Size {
			t.Fatalf("%s: %d chunks", data, len(o.seqs))
		}
	})
}
