package vmwire_test

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

func personalise() *vmwire.Personalise {
	return &vmwire.Personalise{
		Version: 1, ID: "i", Hostname: "box", Env: []wire.Text{"A=b", "B=\xff"}, Time: 5, Seed: make([]byte, 64),
		Files: map[string]vmwire.File{"session.json": {Data: []byte{0, 255}, Mode: 0o400}},
		Disk:  &vmwire.Disk{Device: "vdb", Bytes: 1 << 40}, Network: &vmwire.Network{Address: "10.0.0.2/30", Address6: "fd00::2/128", GatewayMAC: "02:00:00:00:00:01"},
		Over:   []vmwire.Over{{From: "trust.pem", To: "/etc/ssl/cert.pem"}},
		Limits: vmwire.Limits{PIDs: 5, OpenFiles: 6, Memory: 1 << 63},
	}
}

func all() []vmwire.Message {
	return []vmwire.Message{
		{Type: vmwire.TypeHello, Hello: &vmwire.Hello{Min: 1, Max: 1, Nonce: "n"}},
		{Type: vmwire.TypeReady, Ready: &vmwire.Ready{Min: 1, Max: 1, Steps: []vmwire.Step{{Name: "a", Took: 3}}}},
		{Type: vmwire.TypePersonalise, Personalise: personalise()},
		{Type: vmwire.TypeAnswer, Answer: &vmwire.Answer{ID: "i", Reason: vmwire.ReasonDisk, Error: "x"}},
		{Type: vmwire.TypeCall, Call: &vmwire.Call{ID: "c", Op: vmwire.OpFreeze}},
		{Type: vmwire.TypeDone, Done: &vmwire.Done{ID: "c", OK: true, Expired: true}},
		{Type: vmwire.TypeEvent, Event: &vmwire.Event{Kind: vmwire.EventExited, Code: 137}},
	}
}

func line(t testing.TB, m vmwire.Message) []byte {
	t.Helper()
	b, err := vmwire.Encode(m)
	if err != nil {
		t.Fatalf("%s: %v", m.Type, err)
	}
	return b
}

// However a port cuts the stream, every message comes whole and in order.
func TestMessagesComeWhole(t *testing.T) {
	var stream bytes.Buffer
	for _, m := range all() {
		stream.Write(line(t, m))
		stream.WriteString("\n \n")
	}
	for name, in := range map[string]io.Reader{
		"at once": bytes.NewReader(stream.Bytes()), "byte by byte": iotest.OneByteReader(bytes.NewReader(stream.Bytes())),
		"with the end": iotest.DataErrReader(bytes.NewReader(stream.Bytes())),
	} {
		r := vmwire.NewReader(in)
		for _, want := range all() {
			got, err := r.Next()
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("%s: got %+v, %v; want %+v", name, got, err, want)
			}
		}
		if _, err := r.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("%s: at the end: %v", name, err)
		}
	}
}

func TestWhatIsNoMessageIsRefused(t *testing.T) {
	seed := `"seed":"` + strings.Repeat("AAAA", 22) + `"`
	for name, text := range map[string]string{
		"no json": "x", "no part": `{"type":"hello"}`, "another part": `{"type":"hello","ready":{}}`, "unknown": `{"type":"later"}`,
		"two parts":         `{"type":"hello","hello":{"nonce":"n"},"ready":{}}`,
		"no nonce":          `{"type":"hello","hello":{}}`,
		"long nonce":        `{"type":"hello","hello":{"nonce":"` + strings.Repeat("n", 200) + `"}}`,
		"no seed":           `{"type":"personalise","personalise":{"id":"i"}}`,
		"short seed":        `{"type":"personalise","personalise":{"id":"i","seed":"AAAA"}}`,
		"path of a file":    `{"type":"personalise","personalise":{"id":"i",` + seed + `,"files":{"../x":{}}}}`,
		"a file from below": `{"type":"personalise","personalise":{"id":"i",` + seed + `,"over":[{"from":"../x","to":"/y"}]}}`,
		"a file to nowhere": `{"type":"personalise","personalise":{"id":"i",` + seed + `,"over":[{"from":"x","to":"y"}]}}`,
		"the agent's file":  `{"type":"personalise","personalise":{"id":"i",` + seed + `,"files":{"guest":{}}}}`,
		"set-user-id":       `{"type":"personalise","personalise":{"id":"i",` + seed + `,"files":{"x":{"mode":2541}}}}`,
		"path of a device":  `{"type":"personalise","personalise":{"id":"i",` + seed + `,"disk":{"device":"../vda"}}}`,
		"no variable":       `{"type":"personalise","personalise":{"id":"i",` + seed + `,"env":["x"]}}`,
		"hostname of lines": `{"type":"personalise","personalise":{"id":"i",` + seed + `,"hostname":"a\nb"}}`,
		"novel":             `{"type":"event","event":{"text":"` + strings.Repeat("n", 5000) + `"}}`,
		"many steps":        `{"type":"ready","ready":{"steps":[` + strings.Repeat(`{},`, 100) + `{}]}}`,
	} {
		if m, err := vmwire.Decode([]byte(text)); !errors.Is(err, vmwire.ErrMessage) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
	if _, err := vmwire.Decode([]byte(`{"type":"hello","hello":{"nonce":"n","min":1,"max":2,"new":[1]},"newer":{}}`)); err != nil {
		t.Errorf("a field of the future: %v", err)
	}
}

// A guest that floods costs one line of memory and loses nothing that comes after.
func TestReaderGoesOnAfterAFlood(t *testing.T) {
	good := line(t, all()[0])
	in := io.MultiReader(bytes.NewReader(bytes.Repeat([]byte("x"), 5<<20)), strings.NewReader("\n"), bytes.NewReader(good),
		strings.NewReader("{}\n"), bytes.NewReader(good))
	r := vmwire.NewReader(in)
	if _, err := r.Next(); !errors.Is(err, vmwire.ErrTooLong) {
		t.Fatalf("the flood: %v", err)
	}
	if m, err := r.Next(); err != nil || m.Hello == nil {
		t.Fatalf("after it: %+v, %v", m, err)
	}
	if _, err := r.Next(); !errors.Is(err, vmwire.ErrMessage) {
		t.Fatalf("what is no message: %v", err)
	}
	if m, err := r.Next(); err != nil || m.Hello == nil {
		t.Fatalf("after that: %+v, %v", m, err)
	}
}

// The host's end drops the half line of who was there before.
func TestAnEndDropsHalfALine(t *testing.T) {
	good := line(t, all()[0])
	r := vmwire.NewReader(&ends{parts: [][]byte{good[:5], nil, good, nil, bytes.Repeat([]byte("y"), 2<<20), nil, good}})
	var got []string
	for range 7 {
		m, err := r.Next()
		switch {
		case m.Hello != nil:
			got = append(got, "hello")
		case errors.Is(err, io.EOF):
			got = append(got, "end")
		case errors.Is(err, vmwire.ErrTooLong):
			got = append(got, "long")
		default:
			got = append(got, err.Error())
		}
	}
	if text := strings.Join(got, " "); text != "end hello end long end hello end" {
		t.Error(text)
	}
}

// ends is a port that gives an end for every nil, and goes on.
type ends struct{ parts [][]byte }

func (e *ends) Read(b []byte) (int, error) {
	if len(e.parts) == 0 {
		return 0, io.EOF
	}
	if e.parts[0] == nil {
		e.parts = e.parts[1:]
		return 0, io.EOF
	}
	n := copy(b, e.parts[0])
	if e.parts[0] = e.parts[0][n:]; len(e.parts[0]) == 0 {
		e.parts = e.parts[1:]
	}
	return n, nil
}

func TestNegotiate(t *testing.T) {
	for _, c := range []struct{ min, max, want int }{{1, 1, 1}, {1, 9, 1}, {0, 1, 1}, {2, 9, 0}, {0, 0, 0}, {-5, -1, 0}} {
		if got, err := vmwire.Negotiate(c.min, c.max); got != c.want || (err == nil) != (c.want > 0) {
			t.Errorf("%d to %d: %d, %v", c.min, c.max, got, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, m := range all() {
		f.Add(line(f, m))
	}
	f.Add([]byte(`{"type":"personalise","personalise":{"files":null}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := vmwire.Decode(b)
		if err != nil {
			if !errors.Is(err, vmwire.ErrMessage) && !errors.Is(err, vmwire.ErrTooLong) {
				t.Fatalf("an error of another kind: %v", err)
			}
			return
		}
		again, err := vmwire.Encode(m)
		if errors.Is(err, vmwire.ErrTooLong) {
			return
		}
		if err != nil {
			t.Fatalf("decoded but not encoded: %v", err)
		}
		if n, err := vmwire.Decode(again); err != nil || n.Type != m.Type {
			t.Fatalf("encoded but not decoded: %v", err)
		}
	})
}

func FuzzReader(f *testing.F) {
	f.Add(line(f, all()[1]), uint8(3))
	f.Add([]byte("\n\n{}\nx"), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, step uint8) {
		r := vmwire.NewReader(&pieces{b, int(step) + 1})
		for range len(b) + 2 {
			if _, err := r.Next(); errors.Is(err, io.EOF) {
				return
			}
		}
		t.Fatal("more messages than bytes")
	})
}

type pieces struct {
	b    []byte
	step int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), p.step)], p.b)
	p.b = p.b[n:]
	return n, nil
}
