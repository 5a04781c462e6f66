package hello

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// said is what a real TLS client says first.
func said(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	client, server := net.Pipe()
	go func() {
		_ = tls.Client(client, cfg).Handshake()
		_ = client.Close()
	}()
	defer server.Close()
	_, raw, err := Read(server)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// records cuts a message into records of at most size bytes.
func records(message []byte, size int) []byte {
	var out []byte
	for part := range slices.Chunk(message, size) {
		out = append(out, typeHandshake, 3, 1, byte(len(part)>>8), byte(len(part)))
		out = append(out, part...)
	}
	return out
}

func u16(n int) []byte { return []byte{byte(n >> 8), byte(n)} }

func extension(kind int, data []byte) []byte {
	return slices.Concat(u16(kind), u16(len(data)), data)
}

func sni(names ...string) []byte {
	var list []byte
	for _, n := range names {
		list = slices.Concat(list, []byte{0}, u16(len(n)), []byte(n))
	}
	return extension(extensionSNI, append(u16(len(list)), list...))
}

// message is a hello with these extensions.
func message(exts ...[]byte) []byte {
	list := slices.Concat(exts...)
	body := slices.Concat([]byte{3, 3}, make([]byte, 32), []byte{0}, u16(2), []byte{0x13, 0x01}, []byte{1, 0}, u16(len(list)), list)
	return slices.Concat([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body)
}

func TestHelloOfARealClient(t *testing.T) {
	raw := said(t, &tls.Config{ServerName: "api.example.com", NextProtos: []string{"h2", "http/1.1"}})
	h, took, err := Read(bytes.NewReader(append(slices.Clone(raw), "more"...)))
	if err != nil || h.ServerName != "api.example.com" || !slices.Equal(h.ALPN, []string{"h2", "http/1.1"}) || h.Hidden {
		t.Errorf("read %+v, %v", h, err)
	}
	if !bytes.Equal(took, raw) {
		t.Errorf("took %d bytes of %d", len(took), len(raw))
	}
}

func TestHelloOverManyRecordsAndReads(t *testing.T) {
	m := message(sni("a.example.com"))
	for _, size := range []int{1, 3, 4, 5, 17, len(m)} {
		raw := records(m, size)
		h, took, err := Read(iotest.OneByteReader(bytes.NewReader(raw)))
		if err != nil || h.ServerName != "a.example.com" || !bytes.Equal(took, raw) {
			t.Errorf("records of %d bytes: %+v, %d of %d bytes, %v", size, h, len(took), len(raw), err)
		}
	}
}

func TestHelloThatHides(t *testing.T) {
	h, err := Parse(message(sni("public.example.com"), extension(extensionECH, []byte{0, 0, 1})))
	if err != nil || !h.Hidden {
		t.Errorf("%+v, %v", h, err)
	}
}

func TestHelloWithoutName(t *testing.T) {
	h, err := Parse(message(extension(extensionALPN, []byte{0, 3, 2, 'h', '2'})))
	if err != nil || h.Named || h.ServerName != "" {
		t.Errorf("%+v, %v", h, err)
	}
}

func TestHelloWithTwoMeaningsIsRefused(t *testing.T) {
	good := message(sni("a.example.com"))
	long := slices.Concat([]byte{typeHandshake, 3, 1}, u16(maxRecord+1), make([]byte, maxRecord+1))
	for name, raw := range map[string][]byte{
		"two names in one SNI":   records(message(sni("a.example.com", "b.example.com")), maxRecord),
		"two SNI extensions":     records(message(sni("a.example.com"), sni("b.example.com")), maxRecord),
		"name of length 0":       records(message(sni("")), maxRecord),
		"NUL in the name":        records(message(sni("a.example.com\x00.b.example.com")), maxRecord),
		"empty SNI":              records(message(extension(extensionSNI, nil)), maxRecord),
		"name of another kind":   records(message(extension(extensionSNI, []byte{0, 4, 1, 0, 1, 'a'})), maxRecord),
		"bytes after the hello":  records(append(slices.Clone(good), 1, 2, 3), maxRecord),
		"two hellos":             records(append(slices.Clone(good), good...), maxRecord),
		"another message":        records([]byte{2, 0, 0, 1, 0}, maxRecord),
		"an empty record":        append([]byte{typeHandshake, 3, 1, 0, 0}, records(good, maxRecord)...),
		"a record between":       slices.Concat(records(good[:20], maxRecord), []byte{typeChange, 3, 1, 0, 1, 1}, records(good[20:], maxRecord)),
		"a record too long":      long,
		"a hello too long":       records([]byte{1, 1, 0, 0}, maxRecord),
		"version of no TLS":      append([]byte{typeHandshake, 2, 0}, records(good, maxRecord)[3:]...),
		"extension cut off":      records(message(extension(5, []byte{1})[:4]), maxRecord),
		"ALPN of an empty name":  records(message(extension(extensionALPN, []byte{0, 1, 0})), maxRecord),
		"many records of a byte": records(append([]byte{1, 0, 0xff, 0xf0}, make([]byte, 0xfff0)...), 1),
	} {
		if h, _, err := Read(bytes.NewReader(raw)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: read %+v, %v", name, h, err)
		}
	}
}

func TestHelloCutOffGivesBackWhatWasTaken(t *testing.T) {
	raw := records(message(sni("a.example.com")), 30)
	for n := range raw {
		_, took, err := Read(bytes.NewReader(raw[:n]))
		if (!errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF)) || !bytes.Equal(took, raw[:n]) {
			t.Fatalf("cut at %d: took %d, %v", n, len(took), err)
		}
	}
}

func TestAnswerThatAsksAgain(t *testing.T) {
	answer := func(random []byte) []byte {
		body := slices.Concat([]byte{3, 3}, random, []byte{0, 0x13, 0x01, 0})
		return records(append([]byte{messageServerHello, 0, 0, byte(len(body))}, body...), maxRecord)
	}
	for _, c := range []struct {
		name  string
		raw   []byte
		again bool
		bad   bool
	}{
		{"asks", answer(retry), true, false},
		{"does not", answer(make([]byte, 32)), false, false},
		{"alert", []byte{21, 3, 3, 0, 2, 2, 40}, false, false},
		{"in pieces", answer(retry)[:20], false, true},
		{"a small record", append([]byte{22, 3, 3, 0, 4}, 2, 0, 0, 40), false, true},
	} {
		again, took, err := ReadAnswer(bytes.NewReader(c.raw))
		if again != c.again || (err != nil) != c.bad || !bytes.Equal(took, c.raw) {
			t.Errorf("%s: %v, %d of %d bytes, %v", c.name, again, len(took), len(c.raw), err)
		}
	}
}

func TestSecondHelloAfterEarlyData(t *testing.T) {
	early := slices.Concat([]byte{typeChange, 3, 3, 0, 1, 1}, []byte{typeData, 3, 3, 0, 3}, []byte("xyz"))
	second := records(message(sni("b.example.com")), 10)
	var passed []byte
	h, raw, err := ReadAgain(bytes.NewReader(slices.Concat(early, second, []byte("rest"))), func(b []byte) error {
		passed = append(passed, b...)
		return nil
	})
	if err != nil || h.ServerName != "b.example.com" || !bytes.Equal(raw, second) || !bytes.Equal(passed, early) {
		t.Errorf("%+v, %d bytes, passed %d, %v", h, len(raw), len(passed), err)
	}
	flood := bytes.Repeat(append([]byte{typeData, 3, 3, 0x40, 0}, make([]byte, maxRecord)...), 80)
	if _, _, err := ReadAgain(bytes.NewReader(flood), func([]byte) error { return nil }); !errors.Is(err, ErrMalformed) {
		t.Errorf("early data without end: %v", err)
	}
	alert := []byte{21, 3, 3, 0, 2, 2, 40}
	if _, raw, err := ReadAgain(bytes.NewReader(alert), nil); !errors.Is(err, ErrMalformed) || !bytes.Equal(raw, alert) {
		t.Errorf("an alert: %v", err)
	}
}

// FuzzRead: what is accepted means to crypto/tls what it means here, and nothing is lost or held without end.
func FuzzRead(f *testing.F) {
	f.Add(said(f, &tls.Config{ServerName: "api.example.com", NextProtos: []string{"h2"}}))
	f.Add(records(message(sni("a.example.com"), extension(extensionECH, []byte{0})), 7))
	f.Add(records(message(sni("a.example.com", "b.example.com")), maxRecord))
	f.Add(records(message(), 9))
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, took, err := Read(bytes.NewReader(raw))
		if !bytes.HasPrefix(raw, took) || len(took) > MaxHello+maxServer+2*recordHead {
			t.Fatalf("took %d bytes that are not the first", len(took))
		}
		if err != nil {
			return
		}
		other := ""
		cfg := &tls.Config{GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			other = info.ServerName
			return nil, io.ErrClosedPipe
		}}
		_ = tls.Server(&canned{r: bytes.NewReader(took)}, cfg).Handshake()
		if other != "" && other != h.ServerName {
			t.Errorf("here %q, there %q", h.ServerName, other)
		}
		if strings.ContainsRune(h.ServerName, 0) {
			t.Errorf("NUL in %q", h.ServerName)
		}
	})
}

// canned is a connection whose other end has said all it will.
type canned struct {
	net.Conn
	r io.Reader
}

func (c *canned) Read(p []byte) (int, error)  { return c.r.Read(p) }
func (c *canned) Write(p []byte) (int, error) { return len(p), nil }
func (c *canned) Close() error                { return nil }
