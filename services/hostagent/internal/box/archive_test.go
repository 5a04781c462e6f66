package box

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/internal/layer"
)

const deliver = "_INBOX.fe-acme-app.box.d1"

// wireTap is a bus that hands the frames of one stream to the test.
type wireTap struct {
	frames chan *boxv1.Frame
	opened chan struct{} // the opening was answered
	sealed chan []byte   // with this; may be nil
}

func (w *wireTap) Publish(subject string, data []byte) error {
	if subject != deliver {
		w.opened <- struct{}{} // an answer, sealed
		if w.sealed != nil {
			w.sealed <- data
		}
		return nil
	}
	f := &boxv1.Frame{}
	if err := proto.Unmarshal(data, f); err != nil {
		return err
	}
	w.frames <- f
	return nil
}

func (w *wireTap) Subscribe(string, nats.MsgHandler) (*nats.Subscription, error) { return nil, nil }

// exporting is a gate whose export is the test's.
type exporting struct {
	export func(ctx context.Context, w io.Writer) (layer.Stats, error)
}

func (e exporting) Admit(context.Context) (func(), error)                { return func() {}, nil }
func (e exporting) Checkpoint(context.Context) (*corev1.Manifest, error) { return nil, nil }
func (e exporting) Place() string                                        { return "{}" }
func (e exporting) OutOfMemory() bool                                    { return false }
func (e exporting) Export(ctx context.Context, w io.Writer) (layer.Stats, error) {
	return e.export(ctx, w)
}

// bench is a box with one client.
type bench struct {
	t    *testing.T
	tap  *wireTap
	box  *Box
	call *call
	done chan error
}

func newBench(t *testing.T, guest *hostend.Conn, export func(context.Context, io.Writer) (layer.Stats, error), credit uint32) *bench {
	key, err := seal.NewKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tap := &wireTap{frames: make(chan *boxv1.Frame, 1<<12), opened: make(chan struct{}, 1)}
	srv, err := New(Config{Bus: tap, Host: "h1", Key: key, Grants: deaf()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	b, err := srv.Serve(grant.Binding{Session: "s1"}, guest, exporting{export}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b.subs = nil // of a bus that has none
	return &bench{t: t, tap: tap, box: b, done: make(chan error, 1),
		call: &call{box: b, reply: "_INBOX.fe-acme-app.r", replyKey: string(key.Public()), deliver: deliver, credit: credit,
			claims: grant.Claims{Expires: time.Now().Add(time.Hour).Unix()}}}
}

func (b *bench) start(run func(ctx context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	b.t.Cleanup(cancel)
	go func() { b.done <- run(ctx) }()
}

func (b *bench) next() *boxv1.Frame {
	b.t.Helper()
	select {
	case f := <-b.tap.frames:
		return f
	case <-time.After(30 * time.Second):
		b.t.Fatal("no frame came")
		return nil
	}
}

// stream waits for the one stream that the operation opens.
func (b *bench) stream() *stream {
	b.t.Helper()
	select {
	case <-b.tap.opened:
	case <-time.After(30 * time.Second):
		b.t.Fatal("no stream was opened")
	}
	b.box.mu.Lock()
	defer b.box.mu.Unlock()
	for _, st := range b.box.streams {
		return st
	}
	b.t.Fatal("the stream is gone")
	return nil
}

func (b *bench) give(st *stream, f *boxv1.Frame) {
	b.t.Helper()
	st.in.Lock()
	f.Seq = st.in.seq + 1
	st.in.Unlock()
	if err := st.take(f); err != nil {
		b.t.Fatal(err)
	}
}

// TestExportObeysCredit: no byte goes without credit, and all of them do with it, then the result.
func TestExportObeysCredit(t *testing.T) {
	content := bytes.Repeat([]byte("0123456789"), 20_000)
	var mu sync.Mutex
	written := 0
	b := newBench(t, nil, func(_ context.Context, w io.Writer) (layer.Stats, error) {
		for p := content; len(p) > 0; p = p[min(512, len(p)):] {
			n, err := w.Write(p[:min(512, len(p))])
			mu.Lock()
			written += n
			mu.Unlock()
			if err != nil {
				return layer.Stats{}, err
			}
		}
		return layer.Stats{Entries: 7, Skipped: 1, SkippedNames: []string{"a\xff: odd"}, Attributes: 2}, nil
	}, 1000)
	b.start(func(ctx context.Context) error { return b.box.export(ctx, b.call) })
	st := b.stream()
	var got []byte
	for {
		f := b.next()
		if d := f.GetData(); d != nil {
			if d.GetOffset() != uint64(len(got)) || d.GetChannel() != boxv1.Channel_CHANNEL_FILE {
				t.Fatalf("a piece of %s at %d after %d bytes", d.GetChannel(), d.GetOffset(), len(got))
			}
			got = append(got, d.GetData()...)
			if len(got) == 1000 {
				mu.Lock()
				ahead := written
				mu.Unlock()
				if ahead > 3*MaxChunk {
					t.Errorf("the writer is %d bytes ahead of a client without credit", ahead)
				}
			}
			b.give(st, &boxv1.Frame{Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: uint32(len(d.GetData()))}}})
			continue
		}
		r := f.GetResult()
		if r == nil || r.GetBytes() != uint64(len(content)) || r.GetArchived().GetEntries() != 7 || len(r.GetArchived().GetSkippedNames()) != 1 {
			t.Fatalf("%v", f)
		}
		break
	}
	if err := <-b.done; err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// TestAnExportThatEndsEarly: a client that cancels ends the reading of the disk; a failure of it is
// the stream's last frame.
func TestAnExportThatEndsEarly(t *testing.T) {
	began := make(chan struct{})
	b := newBench(t, nil, func(ctx context.Context, _ io.Writer) (layer.Stats, error) {
		close(began)
		<-ctx.Done()
		return layer.Stats{}, ctx.Err()
	}, MaxCredit)
	b.start(func(ctx context.Context) error { return b.box.export(ctx, b.call) })
	<-began
	b.give(b.stream(), &boxv1.Frame{Body: &boxv1.Frame_Cancel{Cancel: &boxv1.Cancel{}}})
	if err := <-b.done; !errors.Is(err, errCancelled) {
		t.Errorf("%v", err)
	}
	b = newBench(t, nil, func(context.Context, io.Writer) (layer.Stats, error) {
		return layer.Stats{}, errs.E("export files", errkind.Exhausted, "", "no room for a still copy")
	}, MaxCredit)
	b.start(func(ctx context.Context) error { return b.box.export(ctx, b.call) })
	if f := b.next().GetFailure(); f.GetKind() != errkind.Exhausted.String() || !strings.Contains(f.GetReason(), "still copy") {
		t.Errorf("%v", f)
	}
	if err := <-b.done; err == nil {
		t.Error("it ended well")
	}
}

// TestAClientThatTakesNothing does not hold a still copy of a disk for ever.
func TestAClientThatTakesNothing(t *testing.T) {
	st, sent := testStream(3)
	d := newDownload(st, 30*time.Millisecond)
	if _, err := d.Write([]byte("abcdef")); err == nil || errs.Kind(err) != errkind.Deadline {
		t.Errorf("%v", err)
	}
	if last := (*sent)[len(*sent)-1]; last.GetFailure().GetKind() != errkind.Deadline.String() {
		t.Errorf("%v", last)
	}
}

// TestExportsAtOnce: each holds a still copy of the disk, so few are made.
func TestExportsAtOnce(t *testing.T) {
	held := make(chan struct{})
	began := make(chan struct{}, maxExports+1)
	b := newBench(t, nil, func(ctx context.Context, _ io.Writer) (layer.Stats, error) {
		began <- struct{}{}
		select {
		case <-held:
		case <-ctx.Done():
		}
		return layer.Stats{}, ctx.Err()
	}, MaxCredit)
	b.tap.opened = make(chan struct{}, maxExports+1)
	done := make(chan error, maxExports)
	for range maxExports {
		c := *b.call
		go func() { done <- b.box.export(context.Background(), &c) }()
	}
	for range maxExports {
		<-began
	}
	if err := b.box.export(context.Background(), b.call); errs.Kind(err) != errkind.Exhausted {
		t.Errorf("one more: %v", err)
	}
	close(held)
	for range maxExports {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := b.box.export(context.Background(), b.call); err != nil {
		t.Errorf("after they ended: %v", err)
	}
}

func attach(t *testing.T) *hostend.Conn {
	t.Helper()
	a := agent.New(agent.Options{})
	fromHost, toGuest, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	fromGuest, toHost, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(func() {
		cancel()
		for _, f := range []*os.File{fromHost, toGuest, fromGuest, toHost} {
			f.Close()
		}
	})
	go func() { _ = a.Serve(ctx, fromHost, toHost, nil) }()
	c, err := hostend.Attach(ctx, fromGuest, toGuest, hostend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestImportTakesWhatIsSent: credit comes back as the guest takes bytes, and the result counts them.
func TestImportTakesWhatIsSent(t *testing.T) {
	content := bytes.Repeat([]byte("file of the archive "), 200_000) // more than the credit
	var raw bytes.Buffer
	w := tar.NewWriter(&raw)
	for _, h := range []*tar.Header{{Name: "f", Mode: 0o600, Size: int64(len(content))}, {Name: "fifo", Typeflag: tar.TypeFifo}} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = w.Write(content)
		}
	}
	_ = w.Close()
	dir := t.TempDir()
	b := newBench(t, attach(t), nil, MaxCredit)
	b.start(func(ctx context.Context) error { return b.box.importFiles(ctx, b.call, &boxv1.Import{Path: dir}) })
	st, credit := b.stream(), MaxCredit
	total := uint64(raw.Len())
	for at := uint64(0); at < total; {
		for credit == 0 {
			f := b.next()
			if f.GetCredit() == nil {
				t.Fatalf("%v", f)
			}
			credit += int(f.GetCredit().GetBytes())
		}
		p := raw.Next(min(credit, MaxChunk))
		b.give(st, &boxv1.Frame{Body: &boxv1.Frame_Data{Data: &boxv1.Data{Channel: boxv1.Channel_CHANNEL_FILE, Offset: at, Data: p}}})
		at, credit = at+uint64(len(p)), credit-len(p)
	}
	b.give(st, &boxv1.Frame{Body: &boxv1.Frame_CloseInput{CloseInput: &boxv1.CloseInput{Total: total}}})
	f := b.next()
	for f.GetCredit() != nil {
		f = b.next()
	}
	a := f.GetResult().GetArchived()
	if f.GetResult().GetBytes() != total || a.GetEntries() != 1 || a.GetSkipped() != 1 || len(a.GetSkippedNames()) != 1 {
		t.Errorf("%v", f)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := <-b.done; err != nil {
		t.Error(err)
	}
}

// TestABadImportSaysWhy: what is no archive, or goes where nothing is, is the stream's failure.
func TestABadImportSaysWhy(t *testing.T) {
	guest, dir := attach(t), t.TempDir()
	for path, kind := range map[string]errkind.Kind{dir: errkind.Invalid, dir + "/none": errkind.NotFound} {
		b := newBench(t, guest, nil, MaxCredit)
		b.start(func(ctx context.Context) error { return b.box.importFiles(ctx, b.call, &boxv1.Import{Path: path}) })
		st := b.stream()
		p := bytes.Repeat([]byte("no archive "), 200)
		b.give(st, &boxv1.Frame{Body: &boxv1.Frame_Data{Data: &boxv1.Data{Data: p}}})
		b.give(st, &boxv1.Frame{Body: &boxv1.Frame_CloseInput{CloseInput: &boxv1.CloseInput{Total: uint64(len(p))}}})
		f := b.next()
		for f.GetCredit() != nil {
			f = b.next()
		}
		if f.GetFailure().GetKind() != kind.String() || strings.Contains(f.GetFailure().GetReason(), "\n") {
			t.Errorf("%s: %v", path, f)
		}
		<-b.done
	}
	for path, good := range map[string]bool{"": true, "/work": true, "work": false, "/a\x00b": false, "/" + strings.Repeat("x", maxPath): false} {
		op, err := proto.Marshal(&boxv1.Operation{Op: &boxv1.Operation_Import{Import: &boxv1.Import{Path: path}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeOperation(op); (err == nil) != good {
			t.Errorf("%.20q: %v", path, err)
		}
	}
}

// deaf is a feed of a credentials that never answers.
func deaf() *grant.Feed {
	return grant.NewFeed(func(ctx context.Context, _ *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}, nil)
}
