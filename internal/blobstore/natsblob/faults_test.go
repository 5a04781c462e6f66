package natsblob

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/testport"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"
)

// TestMain makes the test binary a bus server where a test starts it as one,
// so that the server can be killed.
func TestMain(m *testing.M) {
	bustest.Child()
	spec := os.Getenv("BERTH_TEST_BUS")
	if spec == "" {
		os.Exit(m.Run())
	}
	dir, port, _ := net.SplitHostPort(spec)
	n, err := strconv.Atoi(port)
	if err == nil {
		_, err = bus.StartEmbedded(context.Background(), bus.EmbeddedConfig{Dir: dir, Port: n, Callers: []subjects.Caller{host}, Log: quiet})
	}
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	select {}
}

type busProcess struct {
	t   testing.TB
	dir string
	at  string
	cmd *exec.Cmd
}

func startProcess(t testing.TB) *busProcess {
	p := &busProcess{t: t, dir: t.TempDir()}
	p.at = net.JoinHostPort(p.dir, fmt.Sprint(testport.Reserve(t, 1)[0]))
	t.Cleanup(p.kill)
	p.start()
	return p
}

func (p *busProcess) start() {
	p.t.Helper()
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), "BERTH_TEST_BUS="+p.at)
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		p.t.Fatal(err)
	}
	if sc := bufio.NewScanner(out); !sc.Scan() || sc.Text() != "ready" {
		p.t.Fatalf("the bus says %q", sc.Text())
	}
}

func (p *busProcess) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *busProcess) connect() *bus.Conn {
	p.t.Helper()
	l, err := bus.ReadLogin(bus.LoginPath(p.dir, host))
	if err != nil {
		p.t.Fatal(err)
	}
	conn, err := bus.Connect(bustest.Context(p.t), l, bus.WithLogger(quiet))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(conn.Close)
	return conn
}

// eventually waits for what happens in the background; no verdict depends on
// how long it takes.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// count is messages, or -1 where the bus does not answer.
func count(conn *bus.Conn) int {
	var resp struct {
		State struct {
			Messages int `json:"messages"`
		} `json:"state"`
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := conn.API(ctx, "STREAM.INFO.OBJ_"+store, nil, &resp); err != nil {
		return -1
	}
	return resp.State.Messages
}

// The server is killed while an object is put: the put fails at once, what
// was acknowledged before is whole after the restart, and nothing of the
// failed object stays.
func TestServerKilledInTheMiddleOfAPut(t *testing.T) {
	p := startProcess(t)
	conn := p.connect()
	b := bucketOf(t, conn, 0)
	ctx := bustest.Context(t)
	kept := random(3<<20 + 5)
	if err := b.WriteAll(ctx, "kept", kept, nil); err != nil {
		t.Fatal(err)
	}
	before := count(conn)
	w, err := b.NewWriter(ctx, "torn", &blob.WriterOptions{ContentType: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(random(5 << 20)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "some chunks are stored", func() bool { return count(conn) > before })
	p.kill()
	for err == nil { // until the connection is known to be lost
		_, err = w.Write(random(1 << 20))
	}
	if !errs.Is(err, errkind.Unavailable) {
		t.Errorf("got %v", err)
	}
	if err := w.Close(); err == nil {
		t.Error("the put was acknowledged")
	}
	p.start()
	eventually(t, "the chunks of the torn object are gone", func() bool { return count(conn) == before })
	if got, err := b.ReadAll(ctx, "kept"); err != nil || !bytes.Equal(got, kept) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := b.Attributes(ctx, "torn"); gcerrors.Code(err) != gcerrors.NotFound {
		t.Errorf("got %v", err)
	}
	if err := b.WriteAll(ctx, "torn", kept, nil); err != nil {
		t.Errorf("it cannot be put again: %v", err)
	}
}

// A connection that is lost while an object is read or written ends that at
// once, also without a deadline.
func TestConnectionLostDoesNotBlock(t *testing.T) {
	t.Attr("wait", "30s: the store gives up a stream without an answer")
	t.Parallel()
	p := startProcess(t)
	conn := p.connect()
	b := bucketOf(t, conn, 64<<10)
	ctx := context.Background()
	if err := b.WriteAll(ctx, "x", random(12<<20), nil); err != nil {
		t.Fatal(err)
	}
	r, err := b.NewReader(ctx, "x", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := io.ReadFull(r, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	w, err := b.NewWriter(ctx, "y", &blob.WriterOptions{ContentType: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(random(1 << 20)); err != nil {
		t.Fatal(err)
	}
	p.kill()
	if _, err := io.Copy(io.Discard, r); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("read: %v", err)
	}
	if err := w.Close(); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("write: %v", err)
	}
	eventually(t, "the loss is known", func() bool { return !conn.NATS().IsConnected() })
	if err := b.WriteAll(ctx, "z", []byte("z"), nil); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("put while disconnected: %v", err)
	}
	if _, err := b.ReadAll(ctx, "x"); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("get while disconnected: %v", err)
	}
}

// What was acknowledged is there after the server was killed right after.
func TestAcknowledgedObjectsOutliveAKilledServer(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	conn := p.connect()
	b := bucketOf(t, conn, 0)
	ctx := bustest.Context(t)
	acked := map[string][]byte{}
	for round := range 3 {
		for i := range 20 {
			key, data := fmt.Sprintf("%d/%d", round, i), random(1+i*50_000)
			if err := b.WriteAll(ctx, key, data, nil); err != nil {
				t.Fatal(err)
			}
			acked[key] = data
		}
		p.kill()
		p.start()
		eventually(t, "the connection is back", func() bool { return count(conn) >= 0 })
	}
	for key, data := range acked {
		if got, err := b.ReadAll(ctx, key); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes of %d, %v", key, len(got), len(data), err)
		}
	}
}

// A write that its context cancels leaves nothing, though chunks were stored.
func TestCancelledPutLeavesNothing(t *testing.T) {
	conn := bustest.Connect(t, bustest.Start(t, host), host)
	b := bucketOf(t, conn, 1000)
	ctx, cancel := context.WithCancel(bustest.Context(t))
	w, err := b.NewWriter(ctx, "x", &blob.WriterOptions{ContentType: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(random(100_500)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "chunks are stored", func() bool { return count(conn) > 0 })
	cancel()
	if err := w.Close(); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if n := messages(t, conn); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

// A full store refuses with NoCapacity, shows and keeps nothing of what it
// refused, loses nothing that it had, and can still delete.
func TestFullStoreRefusesAndKeepsWhatItHas(t *testing.T) {
	decl := bus.Declaration{ObjectStores: []subjects.ObjectStore{{Name: store, MaxBytes: 8 << 20}}}
	e, err := bus.StartEmbedded(bustest.Context(t), bus.EmbeddedConfig{Dir: t.TempDir(), Port: -1, Callers: []subjects.Caller{host}, Declaration: &decl, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	conn := bustest.Connect(t, e, host)
	b := bucketOf(t, conn, 0)
	ctx := bustest.Context(t)
	first := random(5 << 20)
	if err := b.WriteAll(ctx, "first", first, nil); err != nil {
		t.Fatal(err)
	}
	before := messages(t, conn)
	err = b.WriteAll(ctx, "second", random(5<<20), nil)
	if !errs.Is(err, errkind.NoCapacity) || gcerrors.Code(err) != gcerrors.ResourceExhausted {
		t.Errorf("got %v", err)
	}
	t.Log(err)
	if n := messages(t, conn); n != before {
		t.Errorf("%d messages, %d before", n, before)
	}
	if got, err := b.ReadAll(ctx, "first"); err != nil || !bytes.Equal(got, first) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	for i := 0; err == nil || i == 0; i++ { // to the last byte
		err = b.WriteAll(ctx, fmt.Sprint("fill", i), random(300<<10), nil)
	}
	if err := b.Delete(ctx, "first"); err != nil {
		t.Errorf("a full store cannot delete: %v", err)
	}
	if err := b.WriteAll(ctx, "second", random(4<<20), nil); err != nil {
		t.Errorf("there is room again: %v", err)
	}
}

// Tidy removes what a killed writer left and nothing else: neither objects of
// any client, nor what is being written.
func TestTidyRemovesOnlyWhatAKilledWriterLeft(t *testing.T) {
	conn := bustest.Connect(t, bustest.Start(t, host), host)
	ctx := bustest.Context(t)
	raw, err := open(ctx, conn, store, &Options{ChunkSize: 1000, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	b := bucketOf(t, conn, 1000)
	data := random(10_000)
	for _, key := range []string{"a", "b"} {
		if err := b.WriteAll(ctx, key, data, nil); err != nil {
			t.Fatal(err)
		}
	}
	foreign(t, conn, "c", data, 500)
	keep := messages(t, conn)
	for _, key := range []string{"a", "torn"} { // killed: neither closed nor aborted
		w := raw.writer(ctx, key)
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "their chunks are stored", func() bool { return messages(t, conn) == keep+20 })
	if n, err := (&Store{raw}).Tidy(ctx, time.Hour); n != 0 || err != nil {
		t.Fatalf("it took %d young writes away, %v", n, err)
	}
	if n, err := (&Store{raw}).Tidy(ctx, 0); n != 2 || err != nil {
		t.Fatalf("it took %d writes away, %v", n, err)
	}
	if n := messages(t, conn); n != keep {
		t.Errorf("%d messages, want %d", n, keep)
	}
	for _, key := range []string{"a", "b", "c"} {
		if got, err := b.ReadAll(ctx, key); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// A chunk that is missing or was changed is DataLoss, never other bytes.
func TestMissingOrFlippedChunkIsDataLoss(t *testing.T) {
	e := bustest.Start(t, host)
	conn, keeper := bustest.Connect(t, e, host), bustest.Connect(t, e, subjects.Keeper())
	ctx := bustest.Context(t)
	b := bucketOf(t, conn, 1000)
	if err := b.WriteAll(ctx, "x", random(5500), nil); err != nil {
		t.Fatal(err)
	}
	raw, _ := open(ctx, conn, store, nil)
	o, err := raw.lookup(ctx, "x")
	if err != nil {
		t.Fatal(err)
	}
	if err := keeper.API(ctx, "STREAM.MSG.DELETE.OBJ_"+store, map[string]any{"seq": o.seqs[2]}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := b.ReadAll(ctx, "x"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("missing: got %v", err)
	}
	foreign(t, conn, "y", random(5000), 1000)
	o, err = raw.lookup(ctx, "y")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.JetStream().Publish(ctx, raw.chunkSubject(o.NUID), []byte("z")); err != nil {
		t.Fatal(err)
	}
	o.Size++ // as if the record spoke of other bytes
	if _, err := io.ReadAll(raw.reader(ctx, "y", o, 0, -1)); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("changed: got %v", err)
	}
}

// Around an election there may be no replica that hands out chunks: a reader
// then takes them from the leader, or waits.
func TestAReadOutlivesATimeWithoutReplicas(t *testing.T) {
	e := bustest.Start(t, host)
	conn, keeper := bustest.Connect(t, e, host), bustest.Connect(t, e, subjects.Keeper())
	ctx := bustest.Context(t)
	b := bucketOf(t, conn, 1000)
	data := random(5500)
	if err := b.WriteAll(ctx, "x", data, nil); err != nil {
		t.Fatal(err)
	}
	foreign(t, conn, "y", data, 1000) // of which only replicas know where its chunks are
	replicas := func(answer bool) {
		t.Helper()
		s, err := keeper.JetStream().Stream(ctx, "OBJ_"+store)
		if err == nil {
			conf := s.CachedInfo().Config
			conf.AllowDirect = answer
			_, err = keeper.JetStream().UpdateStream(ctx, conf)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	replicas(false)
	if got, err := b.ReadAll(ctx, "x"); err != nil || !bytes.Equal(got, data) {
		t.Errorf("got %d of %d bytes from the leader: %v", len(got), len(data), err)
	}
	out := make(chan error, 1)
	go func() {
		got, err := b.ReadAll(ctx, "y")
		if err == nil && !bytes.Equal(got, data) {
			err = fmt.Errorf("got %d bytes, and not those that were written", len(got))
		}
		out <- err
	}()
	select {
	case err := <-out:
		t.Fatalf("it did not wait for a replica: %v", err)
	case <-time.After(time.Second): // the fault: a second without replicas
	}
	replicas(true)
	if err := <-out; err != nil {
		t.Error(err)
	}
}
