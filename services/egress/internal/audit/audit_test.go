package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func key(n int) string {
	return string(ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", fmt.Sprint("user", n), "default"))
}

func record(session string, n int) *egressv1.Record {
	return &egressv1.Record{Id: fmt.Sprintf("egress-h1-%s-%d", session[:8], n), Session: &corev1.SessionRef{Tenant: "acme", Session: session},
		Host: "h1", Authority: "api.example.com", Port: 443, Verdict: egressv1.Verdict_VERDICT_ALLOWED, Ended: timestamppb.Now()}
}

// away is a bus that takes nothing.
type away struct{}

func (away) PublishAsync(context.Context, string, proto.Message, ...bus.PubOption) (bus.Future, error) {
	return bus.Future{}, errors.New("away")
}

func open(t testing.TB, dir string, most int64, to Publisher) *Spool {
	t.Helper()
	s, err := Open(Config{Dir: dir, Max: most, Log: quiet}, to)
	must(t, err)
	return s
}

// run runs a spool; stop ends it and closes its files.
func run(t testing.TB, s *Spool) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.Run(ctx, time.Second) }()
	ended := false
	stop = func() {
		if !ended {
			ended = true
			cancel()
			<-done
			s.Close()
		}
	}
	t.Cleanup(stop)
	return stop
}

// onBus reads the ids of the records that the bus has, once there are at least n.
func onBus(t testing.TB, e *bus.Embedded, n int) map[string]int {
	t.Helper()
	op := bustest.Connect(t, e, subjects.Operator())
	c, err := op.JetStream().OrderedConsumer(bustest.Context(t), "BERTH_AUDIT", jetstream.OrderedConsumerConfig{FilterSubjects: []string{"berth.v1.audit.egress.>"}})
	must(t, err)
	got := map[string]int{}
	for total := 0; ; {
		wait := 300 * time.Millisecond // for one too many
		if total < n {
			wait = 20 * time.Second
		}
		m, err := c.Next(jetstream.FetchMaxWait(wait))
		if err != nil {
			if total < n {
				t.Fatalf("only %d of %d records came: %v", total, n, err)
			}
			return got
		}
		var r egressv1.Record
		must(t, proto.Unmarshal(m.Data(), &r))
		got[r.GetId()]++
		total++
	}
}

// A gate that was killed sends what it had not sent, and nothing twice.
func TestRecordsOfAKilledGateAreSentOnce(t *testing.T) {
	t.Parallel()
	e := bustest.Start(t, subjects.Gate("h1"))
	conn := bustest.Connect(t, e, subjects.Gate("h1"))
	dir := t.TempDir()
	first := open(t, dir, 1<<20, conn)
	stop := run(t, first)
	for i := range 100 {
		must(t, first.Record(record(key(1), i)))
	}
	onBus(t, e, 100)
	stop()
	second := open(t, dir, 1<<20, away{})
	for i := 100; i < 150; i++ {
		must(t, second.Record(record(key(1), i)))
	}
	// Killed: no Run, no Close.
	third := open(t, dir, 1<<20, conn)
	if third.Waiting() == 0 {
		t.Fatal("nothing waits after the restart")
	}
	run(t, third)
	for id, n := range onBus(t, e, 150) {
		if n != 1 {
			t.Errorf("%s is on the bus %d times", id, n)
		}
	}
	if n := third.Sent(); n != 50 {
		t.Errorf("%d were sent after the restart, 50 had waited", n)
	}
}

// A gate that is killed while connections are open leaves a record of each, and of no other.
func TestWhatWasOpenWhenTheGateDiedIsRecorded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir, 1<<20, away{})
	ends := map[int]func(){}
	for i := range 50 {
		r := record(key(1), i)
		r.Path = "/" + strings.Repeat("x", i*60) // some do not fit with their path
		end, err := s.Begin(r)
		must(t, err)
		ends[i] = end
	}
	for i := range 30 {
		ends[i]()
		ends[i]()
	}
	again, err := s.Begin(record(key(1), 99)) // in a slot that was used before
	must(t, err)
	defer again()
	// Killed.
	next := open(t, dir, 1<<20, away{})
	got := map[string]bool{}
	for _, g := range next.segments {
		for at := int64(0); at < g.size; {
			body, after, err := readFrame(g.file, at, g.size)
			must(t, err)
			var r egressv1.Record
			must(t, proto.Unmarshal(body, &r))
			got[r.GetId()], at = true, after
		}
	}
	if len(got) != 21 || !got[record(key(1), 99).GetId()] || got[record(key(1), 29).GetId()] {
		t.Errorf("%d are recorded, 21 were open", len(got))
	}
	next.Close()
	if third := open(t, dir, 1<<20, away{}); third.Waiting() != next.Waiting() {
		t.Error("they are recorded once more")
	}
}

// A frame that was being written when the machine died is cut off; what was whole before it stays.
func TestTornTailIsCutOff(t *testing.T) {
	t.Parallel()
	for name, tear := range map[string]func([]byte) []byte{
		"half a head":    func(b []byte) []byte { return append(b, 0, 0, 1) },
		"half a body":    func(b []byte) []byte { return b[:len(b)-5] },
		"a wrong sum":    func(b []byte) []byte { b[len(b)-1] ^= 1; return b },
		"zeros":          func(b []byte) []byte { return append(b, make([]byte, 100)...) },
		"a huge length":  func(b []byte) []byte { return append(b, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 1) },
		"nothing at all": func(b []byte) []byte { return b },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir, 1<<20, away{})
			for i := range 3 {
				must(t, s.Record(record(key(1), i)))
			}
			s.Close()
			files, _ := filepath.Glob(filepath.Join(dir, "*"+suffix))
			raw, err := os.ReadFile(files[0])
			must(t, err)
			must(t, os.WriteFile(files[0], tear(raw), 0o600))
			again := open(t, dir, 1<<20, away{})
			defer again.Close()
			must(t, again.Record(record(key(1), 7)))
			n := 0
			for _, g := range again.segments {
				for at := int64(0); at < g.size; n++ {
					_, next, err := readFrame(g.file, at, g.size)
					must(t, err)
					at = next
				}
			}
			want := 4
			if name == "half a body" || name == "a wrong sum" {
				want = 3
			}
			if n != want {
				t.Errorf("%d records are there, want %d", n, want)
			}
		})
	}
}

// While the bus is away records are kept up to the bound, and then refused; when it is back they go there.
func TestFullSpoolRefusesUntilTheBusIsBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const most = 256 << 10
	s := open(t, dir, most, away{})
	stop := run(t, s)
	kept := 0
	for i := 0; ; i++ {
		err := s.Record(record(key(i%20), i))
		if errors.Is(err, ErrFull) {
			break
		}
		must(t, err)
		kept++
	}
	if kept < 500 || s.Ready(key(1)) == nil {
		t.Fatalf("%d were kept, ready: %v", kept, s.Ready(key(1)))
	}
	if n := folderSize(t, dir); n > most+4096 {
		t.Errorf("the folder has %d bytes", n)
	}
	stop()
	e := bustest.Start(t, subjects.Gate("h1"))
	s = open(t, dir, most, bustest.Connect(t, e, subjects.Gate("h1")))
	run(t, s)
	if got := onBus(t, e, kept); len(got) != kept {
		t.Errorf("%d records are on the bus, %d were kept", len(got), kept)
	}
	must(t, s.Ready(key(1)))
	must(t, s.Record(record(key(1), 1<<20)))
}

func folderSize(t testing.TB, dir string) (n int64) {
	t.Helper()
	files, err := os.ReadDir(dir)
	must(t, err)
	for _, f := range files {
		info, err := f.Info()
		must(t, err)
		n += info.Size()
	}
	return n
}

// One session that makes many records while the bus is away does not end the traffic of the others.
func TestOneSessionDoesNotFillTheSpoolForAll(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), 1<<20, away{})
	defer s.Close()
	for i := 0; ; i++ {
		if err := s.Record(record(key(1), i)); err != nil {
			break
		}
	}
	if s.Ready(key(1)) == nil {
		t.Error("the session that filled it goes on")
	}
	for i := range 50 {
		must(t, s.Ready(key(2)))
		must(t, s.Record(record(key(2), i)))
	}
}

// of is a record of another tenant.
func of(tenant string, session, n int) *egressv1.Record {
	r := record(key(session), n)
	r.Session.Tenant = tenant
	return r
}

// Many sessions of one tenant together do not take what other tenants need, whichever way they take it.
func TestOneTenantDoesNotFillTheSpoolForAll(t *testing.T) {
	t.Parallel()
	for name, take := range map[string]func(s *Spool, session, n int) error{
		"records": func(s *Spool, session, n int) error { return s.Record(of("noisy", session, n)) },
		"open":    func(s *Spool, session, n int) error { _, err := s.Begin(of("noisy", session, n)); return err },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, t.TempDir(), 1<<20, away{})
			defer s.Close()
			for session := range 60 {
				for n := 0; take(s, session, n) == nil; n++ {
				}
			}
			for i := range 40 {
				for _, tenant := range []int{101, 102, 103} {
					r := of(fmt.Sprint("quiet", tenant), tenant, i)
					must(t, s.Ready(key(tenant)))
					end, err := s.Begin(r)
					must(t, err)
					must(t, s.Record(r))
					end()
				}
			}
		})
	}
}

// A spool that fills up while things are open has room for the record of each of them; those that were not
// open are refused before.
func TestWhatIsOpenWhenTheSpoolFillsIsRecorded(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), 256<<10, away{})
	defer s.Close()
	var ends []func()
	for i := 0; ; i++ {
		end, err := s.Begin(record(key(i%7), i))
		if err != nil {
			break
		}
		ends = append(ends, end)
	}
	for session := range 100 {
		for i := 0; s.Record(of(fmt.Sprint("t", session), 100+session, i)) == nil; i++ {
		}
	}
	if len(ends) < 100 {
		t.Fatalf("only %d were opened", len(ends))
	}
	for i := range ends {
		r := record(key(i%7), i)
		r.Address, r.BytesIn, r.BytesOut, r.Status, r.Reason = "2001:db8:1111:2222:3333:4444:5555:6666", 1<<60, 1<<60, 599, "unreachable"
		must(t, s.Record(r))
	}
	for _, end := range ends {
		end()
		end()
	}
	if s.room.held != 0 || s.total > s.cfg.Max {
		t.Errorf("%d bytes are held for nothing, the files have %d", s.room.held, s.total)
	}
}

// What is open holds its room only until it is closed.
func TestRoomOfWhatIsClosedIsFree(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), 256<<10, away{})
	defer s.Close()
	for i := range 5000 {
		end, err := s.Begin(record(key(1), i))
		must(t, err)
		end()
	}
	if s.room.held != 0 || len(s.room.sessions) != 0 || len(s.room.tenants) != 0 {
		t.Errorf("%d bytes are held", s.room.held)
	}
}

// Where the operator wants traffic rather than records, what is lost is counted.
func TestLossySpoolCountsWhatItForgets(t *testing.T) {
	t.Parallel()
	s, err := Open(Config{Dir: t.TempDir(), Max: 64 << 10, Lossy: true, Log: quiet}, away{})
	must(t, err)
	defer s.Close()
	for i := range 2000 {
		must(t, s.Record(record(key(1), i)))
	}
	must(t, s.Ready(key(1)))
	if s.Lost() == 0 {
		t.Error("nothing was counted")
	}
}

// A full disk, or one that is gone, refuses too.
func TestFailingDiskRefuses(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), 1<<20, away{})
	must(t, s.segments[0].file.Close())
	if s.Record(record(key(1), 1)) == nil || s.Ready(key(1)) == nil {
		t.Error("a record that was not written counts as kept")
	}
}

// FuzzSegment: whatever is in a file, opening it neither fails nor reads what has no right checksum.
func FuzzSegment(f *testing.F) {
	good := frame(frame(nil, []byte("one")), []byte("two"))
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		dir := t.TempDir()
		must(t, os.WriteFile(segmentPath(dir, 1), raw, 0o600))
		var whole []byte
		list, err := openSegments(dir, func(body []byte) { whole = frame(whole, body) })
		must(t, err)
		defer list[0].file.Close()
		if string(whole) != string(raw[:len(whole)]) || list[0].size != int64(len(whole)) {
			t.Fatalf("%d bytes were read of %d", len(whole), len(raw))
		}
	})
}

func BenchmarkRecord(b *testing.B) {
	s, err := Open(Config{Dir: b.TempDir(), Max: 1 << 40, Lossy: true, Log: quiet}, away{})
	must(b, err)
	defer s.Close()
	for i := 0; b.Loop(); i++ {
		must(b, s.Record(record(key(1), i)))
	}
}
