package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"
)

// slowly returns a reader that gives at most n bytes at a time.
type slowly struct {
	r io.Reader
	n int
}

func (s slowly) Read(p []byte) (int, error) { return s.r.Read(p[:min(len(p), s.n)]) }

func mustAppend(t rapid.TB, dst []byte, f Frame) []byte {
	dst, err := AppendFrame(dst, f)
	if err != nil {
		t.Fatal(err)
	}
	return dst
}

func TestMagicHasNoBorderAndNoLead(t *testing.T) {
	for n := 1; n < len(magic); n++ {
		if bytes.Equal(magic[:n], magic[len(magic)-n:]) {
			t.Errorf("the first %d bytes are also the last", n)
		}
	}
	if bytes.IndexByte(magic[:], lead) >= 0 {
		t.Error("the lead byte is in the magic")
	}
	if b, _ := json.Marshal(Text(magic[:])); bytes.Contains(b, magic[:1]) {
		t.Error("JSON can hold the first byte of the magic")
	}
}

// TestDataSurvivesAnyPeer is the property that the design rests on: whatever a
// killed peer left on the stream, frames after a sync record come out exactly,
// and nothing comes out that was not written whole.
func TestDataSurvivesAnyPeer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Payloads are made of pieces of the magic, to provoke false matches.
		piece := rapid.Custom(func(t *rapid.T) []byte {
			if rapid.Bool().Draw(t, "magic") {
				from := rapid.IntRange(0, 15).Draw(t, "from")
				return magic[from:rapid.IntRange(from, 16).Draw(t, "to")]
			}
			return rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "bytes")
		})
		var stream []byte
		var want [][]byte // per attach, all data that was written whole
		for i := range rapid.IntRange(1, 5).Draw(t, "attaches") {
			stream = AppendSync(stream, Sync{AttachID: uint64(i)})
			want = append(want, nil)
			for range rapid.IntRange(0, 4).Draw(t, "frames") {
				payload := bytes.Join(rapid.SliceOfN(piece, 0, 8).Draw(t, "payload"), nil)
				stream = mustAppend(t, stream, Frame{Type: TypeData, Stream: 1, Offset: uint64(len(want[i])), Payload: payload})
				want[i] = append(want[i], payload...)
			}
			half := mustAppend(t, nil, Frame{Type: TypeData, Stream: 9, Payload: []byte("never whole, as its writer died")})
			stream = append(stream, half[:rapid.IntRange(0, len(half)-1).Draw(t, "cut")]...)
		}
		r := NewReader(slowly{bytes.NewReader(stream), rapid.IntRange(1, 50).Draw(t, "chunk")})
		got := make([][]byte, len(want))
		at := -1
		for {
			item, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			switch {
			case err != nil:
				t.Fatal(err)
			case item.Sync != nil:
				if at++; item.Sync.AttachID != uint64(at) {
					t.Fatalf("attach %d, want %d", item.Sync.AttachID, at)
				}
			case item.Frame.Stream != 1 || item.Frame.Offset != uint64(len(got[at])):
				t.Fatalf("frame %+v", item.Frame)
			default:
				got[at] = append(got[at], item.Frame.Payload...)
			}
		}
		for i := range want {
			if i > at || !bytes.Equal(got[i], want[i]) {
				t.Fatalf("attach %d: %q, want %q", i, got, want)
			}
		}
	})
}

func TestCorruptFrameIsDiscardedUpToTheNextSync(t *testing.T) {
	stream := AppendSync(nil, Sync{AttachID: 1})
	at := len(stream)
	stream = mustAppend(t, stream, Frame{Type: TypeData, Payload: []byte("damaged")})
	stream = mustAppend(t, stream, Frame{Type: TypeData, Payload: []byte("sound, but not to be trusted")})
	stream = AppendSync(stream, Sync{AttachID: 2})
	stream = mustAppend(t, stream, Frame{Type: TypeData, Payload: []byte("good")})
	for bit := range 8 * (HeaderSize + len("damaged")) {
		b := bytes.Clone(stream)
		b[at+bit/8] ^= 1 << (bit % 8)
		r := NewReader(bytes.NewReader(b))
		if item, err := r.Next(); err != nil || item.Sync == nil {
			t.Fatal(item, err)
		}
		item, err := r.Next()
		if errors.Is(err, ErrCorrupt) {
			item, err = r.Next()
		}
		if err != nil || item.Sync == nil || item.Sync.AttachID != 2 {
			t.Fatalf("bit %d: %+v, %v", bit, item, err)
		}
		if item, err = r.Next(); err != nil || string(item.Frame.Payload) != "good" {
			t.Fatalf("bit %d: %+v, %v", bit, item, err)
		}
	}
}

func TestLimitsOfAFrame(t *testing.T) {
	if _, err := AppendFrame(nil, Frame{Payload: make([]byte, MaxPayload+1)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("payload above the limit: %v", err)
	}
	if _, err := AppendFrame(nil, Frame{Type: TypeEvent, Payload: magic[:]}); !errors.Is(err, ErrMagicInFrame) {
		t.Errorf("magic in a frame that cannot be split: %v", err)
	}
	stream := mustAppend(t, AppendSync(nil, Sync{}), Frame{Type: TypeData, Payload: make([]byte, MaxPayload)})
	r := NewReader(slowly{bytes.NewReader(stream), 7919})
	_, _ = r.Next()
	if item, err := r.Next(); err != nil || len(item.Frame.Payload) != MaxPayload {
		t.Errorf("largest payload: %d bytes, %v", len(item.Frame.Payload), err)
	}
}

func TestTextKeepsEveryByte(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Text(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		var got Text
		if err := json.Unmarshal(b, &got); err != nil || got != want {
			t.Fatalf("%q became %q: %v", want, got, err)
		}
	})
}

func TestNegotiate(t *testing.T) {
	for _, c := range []struct{ aMin, aMax, bMin, bMax, want int }{
		{1, 1, 1, 1, 1}, {1, 3, 2, 5, 3}, {4, 5, 1, 4, 4}, {1, 1, 2, 3, 0}, {0, 0, 0, 0, 0},
	} {
		got, err := Negotiate(Hello{Min: c.aMin, Max: c.aMax}, Hello{Min: c.bMin, Max: c.bMax})
		if got != c.want && err == nil || (err != nil) != (c.want == 0) {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
	}
}

// FuzzReader feeds anything to a reader. Run it with
// go test -fuzz FuzzReader ./services/hostagent/guest/wire
func FuzzReader(f *testing.F) {
	good, _ := AppendFrame(AppendSync(nil, Sync{AttachID: 7}), Frame{Type: TypeData, Payload: []byte("payload")})
	f.Add(good, uint8(3))
	f.Add(append(good[:len(good)-3:len(good)-3], good...), uint8(1))
	f.Add(bytes.Repeat(magic[:], 5), uint8(16))
	f.Add(append(AppendSync(nil, Sync{})[:30], good...), uint8(255))
	f.Add([]byte{}, uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, chunk uint8) {
		r := NewReader(slowly{bytes.NewReader(b), int(chunk) + 1})
		synced := false
		for items := 0; ; items++ {
			item, err := r.Next()
			switch {
			case errors.Is(err, ErrCorrupt):
				synced = false
			case err != nil:
				return
			case item.Sync != nil:
				synced = true
			case !synced:
				t.Fatal("a frame before a sync record")
			case len(item.Frame.Payload) > MaxPayload:
				t.Fatal("payload above the limit")
			}
			if items > len(b) {
				t.Fatal("more items than bytes")
			}
		}
	})
}
