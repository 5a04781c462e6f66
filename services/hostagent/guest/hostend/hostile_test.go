package hostend_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// liar is a guest that answers the attach and then says what it likes.
type liar struct {
	in    *wire.Reader
	out   io.WriteCloser
	asked chan struct{} // closed at the first request: what is said before is dropped
}

// attachLiar attaches to a guest that a test plays.
func attachLiar(t testing.TB) (*hostend.Conn, *liar) {
	t.Helper()
	fromHost, toGuest := io.Pipe()
	fromGuest, toHost := io.Pipe()
	l := &liar{in: wire.NewReader(fromHost), out: toHost, asked: make(chan struct{})}
	go func() {
		item, err := l.in.Next()
		if err != nil || item.Sync == nil {
			return
		}
		_, _ = l.in.Next() // the host's hello
		hello, _ := json.Marshal(wire.Hello{Min: 1, Max: 1, Version: 1})
		b, _ := wire.AppendFrame(wire.AppendSync([]byte("old noise"), *item.Sync), wire.Frame{Type: wire.TypeHello, Payload: hello})
		_, _ = l.out.Write(b)
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := hostend.Attach(ctx, fromGuest, toGuest, hostend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); fromHost.Close(); toHost.Close() })
	return c, l
}

func (l *liar) say(frames ...wire.Frame) {
	<-l.asked
	for _, f := range frames {
		b, err := wire.AppendFrame(nil, f)
		if err != nil {
			panic(err) // the test itself is wrong
		}
		if _, err := l.out.Write(b); err != nil {
			return
		}
	}
}

// drain reads requests so that the host is never blocked.
func (l *liar) drain() {
	for first := true; ; {
		item, err := l.in.Next()
		if err != nil && !errors.Is(err, wire.ErrCorrupt) {
			return
		}
		if first && item.Frame.Type == wire.TypeRequest {
			first = false
			close(l.asked)
		}
	}
}

// TestHostileGuestCostsOnlyItsOwnConn tries lies that a host could believe.
func TestHostileGuestCostsOnlyItsOwnConn(t *testing.T) {
	info := wire.Frame{Type: wire.TypeResult, Stream: 1, Payload: []byte(`{"key":"x","pid":-5,"first":{"stdout":99}}`)}
	data := func(offset uint64, size int) wire.Frame {
		return wire.Frame{Type: wire.TypeData, Sub: wire.Stdout, Stream: 1, Offset: offset, Payload: make([]byte, size)}
	}
	beyond := []wire.Frame{info}
	for at := 0; at <= wire.Window; at += wire.MaxPayload {
		beyond = append(beyond, data(uint64(at), wire.MaxPayload))
	}
	gaps := []wire.Frame{info}
	for i := range 100 {
		gaps = append(gaps, wire.Frame{Type: wire.TypeGap, Sub: wire.Stdout, Stream: 1, Offset: uint64(i), Payload: []byte{0, 0, 0, 0, 0, 0, 0, byte(i + 1)}})
	}
	endless := wire.Frame{Type: wire.TypeResult, Flags: wire.FlagMore, Stream: 1, Payload: make([]byte, wire.MaxPayload)}
	exit := wire.Frame{Type: wire.TypeExit, Stream: 1, Payload: []byte(`{}`)}
	for name, frames := range map[string][]wire.Frame{
		"bytes that skip":       {info, data(5, 1)},
		"bytes that go back":    {info, data(0, 5), data(0, 5)},
		"bytes beyond window":   beyond,
		"too many gaps":         gaps,
		"a gap backwards":       {info, {Type: wire.TypeGap, Sub: wire.Stdout, Stream: 1, Payload: make([]byte, 8)}},
		"a malformed gap":       {info, {Type: wire.TypeGap, Sub: wire.Stdout, Stream: 1}},
		"a stream 9":            {info, {Type: wire.TypeData, Sub: 9, Stream: 1, Payload: []byte("x")}},
		"two exits":             {info, exit, exit},
		"an exit that is no":    {info, {Type: wire.TypeExit, Stream: 1, Payload: []byte("{")}},
		"offsets that overflow": {info, {Type: wire.TypeGap, Sub: wire.Stdout, Stream: 1, Payload: []byte{255, 255, 255, 255, 255, 255, 255, 255}}},
		"an endless result":     {endless, endless, endless, endless, endless, endless, endless, endless, endless, endless, endless, endless, endless, endless, endless, endless, endless},
		"a lost boundary":       {{Type: wire.TypeDesync}},
	} {
		t.Run(name, func(t *testing.T) {
			c, l := attachLiar(t)
			go l.drain()
			go l.say(frames...)
			s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"x"}})
			select {
			case <-c.Done():
			case <-time.After(10 * time.Second):
				t.Fatalf("the host believed it: %v, %v", s, err)
			}
			if !errors.Is(c.Err(), hostend.ErrChannelLost) {
				t.Error(c.Err())
			}
		})
	}
}

// TestAGuestThatFloodsWaits: frames for calls that nobody made are read slowly, so that the guest waits
// and the host is not kept busy.
func TestAGuestThatFloodsWaits(t *testing.T) {
	c, l := attachLiar(t)
	var said atomic.Int64
	go l.drain()
	go func() {
		<-l.asked
		b, _ := wire.AppendFrame(nil, wire.Frame{Type: wire.TypeResult, Stream: 77, Payload: []byte("{}")})
		for {
			if _, err := l.out.Write(b); err != nil {
				return
			}
			said.Add(1)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := c.StartExec(ctx, hostend.ExecSpec{Key: "x", Argv: []string{"x"}}); err == nil {
		t.Error("a call was answered")
	}
	if n := said.Load(); n > 20_000 {
		t.Errorf("the host took %d frames in a second", n)
	}
}

// TestAnExitWithoutStatusIsUnknown: nothing may turn into code 0.
func TestAnExitWithoutStatusIsUnknown(t *testing.T) {
	c, l := attachLiar(t)
	go l.drain()
	go l.say(wire.Frame{Type: wire.TypeResult, Stream: 1, Payload: []byte(`{}`)},
		wire.Frame{Type: 200, Stream: 1, Payload: []byte("a type from the future")},
		wire.Frame{Type: wire.TypeExit, Stream: 1, Payload: []byte(`{"something":"new"}`)})
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	if ev, err := s.Next(testContext(t)); err != nil || ev.Exit == nil || ev.Exit.Code != nil || ev.Exit.Unknown == "" {
		t.Errorf("%+v, %v", ev, err)
	}
}

// TestSmallFramesCostNoMoreThanTheWindow: a guest sends single bytes of both
// streams in turn, and nobody takes them.
func TestSmallFramesCostNoMoreThanTheWindow(t *testing.T) {
	c, l := attachLiar(t)
	go l.drain()
	var b []byte
	for at := range uint64(100_000) {
		for _, sub := range []wire.Sub{wire.Stdout, wire.Stderr} {
			b, _ = wire.AppendFrame(b, wire.Frame{Type: wire.TypeData, Sub: sub, Stream: 1, Offset: at, Payload: []byte{byte(at)}})
		}
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	said := make(chan struct{})
	go func() {
		defer close(said)
		l.say(wire.Frame{Type: wire.TypeResult, Stream: 1, Payload: []byte(`{}`)})
		_, _ = l.out.Write(b)
		l.say(wire.Frame{Type: wire.TypeExit, Stream: 1, Payload: []byte(`{"code":3}`)})
	}()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	<-said
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 4<<20 {
		t.Errorf("the heap grew by %d bytes for 200000 bytes of output", grown)
	}
	var at [2]uint64
	for {
		ev, err := s.Next(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if ev.Exit != nil {
			break
		}
		i := ev.Stream - hostend.Stdout
		for j, got := range ev.Data {
			if ev.Offset+uint64(j) != at[i]+uint64(j) || got != byte(at[i]+uint64(j)) {
				t.Fatalf("stream %d: byte %d at %d", ev.Stream, got, at[i])
			}
		}
		at[i] += uint64(len(ev.Data))
	}
	if at != [2]uint64{100_000, 100_000} {
		t.Errorf("bytes %v", at)
	}
}

func TestAttachToASilentGuestEnds(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := hostend.Attach(ctx, r, io.Discard, hostend.Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestVersionsWithoutOverlap(t *testing.T) {
	fromHost, toGuest := io.Pipe()
	fromGuest, toHost := io.Pipe()
	go func() {
		in := wire.NewReader(fromHost)
		item, err := in.Next()
		if err != nil {
			return
		}
		b, _ := wire.AppendFrame(wire.AppendSync(nil, *item.Sync), wire.Frame{Type: wire.TypeError, Payload: []byte(`{"kind":"version","message":"no"}`)})
		_, _ = toHost.Write(b)
	}()
	if _, err := hostend.Attach(testContext(t), fromGuest, toGuest, hostend.Options{}); !errors.Is(err, hostend.ErrVersion) {
		t.Error(err)
	}
}

// FuzzConn lets a guest say anything while calls of every kind are open. Run it
// with go test -fuzz FuzzConn ./services/hostagent/guest/hostend
func FuzzConn(f *testing.F) {
	seed := func(frames ...wire.Frame) {
		var b []byte
		for _, x := range frames {
			b, _ = wire.AppendFrame(b, x)
		}
		f.Add(b)
	}
	seed(wire.Frame{Type: wire.TypeResult, Stream: 1, Payload: []byte(`{"key":"x"}`)},
		wire.Frame{Type: wire.TypeData, Sub: 1, Stream: 1, Payload: []byte("out")},
		wire.Frame{Type: wire.TypeExit, Stream: 1, Payload: []byte(`{"code":0}`)}, wire.Frame{Type: wire.TypeEnd, Stream: 1})
	seed(wire.Frame{Type: wire.TypeAck, Stream: 2, Payload: make([]byte, 8)}, wire.Frame{Type: wire.TypeError, Stream: 3, Payload: []byte(`{}`)})
	seed(wire.Frame{Type: wire.TypeEvent, Stream: 4, Payload: []byte(`{}`)}, wire.Frame{Type: wire.TypeDesync})
	f.Add([]byte("no frame at all"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, l := attachLiar(t)
		go l.drain()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		done := make(chan struct{}, 6)
		call := func(f func()) { go func() { f(); done <- struct{}{} }() }
		call(func() {
			if s, err := c.StartExec(ctx, hostend.ExecSpec{Key: "x", Argv: []string{"x"}}); err == nil {
				for err == nil {
					_, err = s.Next(ctx)
				}
			}
		})
		call(func() { _ = c.WriteStdin(ctx, "x", 0, []byte("abc")) })
		call(func() {
			if r, err := c.ReadFile(ctx, hostend.Path{Name: "f"}, 0, 0); err == nil {
				_, _ = io.Copy(io.Discard, r)
			}
		})
		call(func() {
			if w, err := c.Watch(ctx, hostend.Path{Name: "f"}, false); err == nil {
				for err == nil {
					_, err = w.Next(ctx)
				}
			}
		})
		call(func() { _, _, _ = c.List(ctx, hostend.Path{Name: "f"}, "", 0) })
		call(func() { _, _ = c.ListExecs(ctx) })
		_, _ = l.out.Write(b)
		l.out.Close()
		for range 6 {
			<-done
		}
		if !errors.Is(c.Err(), hostend.ErrChannelLost) {
			t.Fatal(c.Err())
		}
	})
}
