// Package hello reads what a TLS client says before anything is encrypted: for which host it comes. It
// guarantees that it takes exactly the records of one ClientHello and not a byte more, that what could be
// read in two ways (a second SNI, a repeated extension, bytes left over) is refused and never guessed, and
// that it holds no more than MaxHello bytes.
package hello

import (
	"bytes"
	"errors"
	"fmt"
	"io"
)

// MaxHello bounds the records of one ClientHello together.
const MaxHello = 64 << 10

// First is the byte that every TLS connection begins with: a handshake record.
const First = typeHandshake

const (
	typeChange    = 20
	typeHandshake = 22
	typeData      = 23

	messageClientHello = 1
	messageServerHello = 2

	extensionSNI  = 0
	extensionALPN = 16
	extensionECH  = 0xfe0d

	maxRecord   = 1 << 14
	maxSealed   = maxRecord + 256
	maxServer   = maxRecord + 2048 // TLS 1.2 lets a sealed record grow by so much
	recordHead  = 5
	messageHead = 4
)

// ErrMalformed is wrapped by every error that is the client's fault.
var ErrMalformed = errors.New("it is no TLS hello that has one meaning")

func malformed(what string) error { return fmt.Errorf("%w: %s", ErrMalformed, what) }

// Hello is what a client says of where it wants to go.
type Hello struct {
	// ServerName as it was sent; empty: there was none.
	ServerName string
	// Named: the SNI extension was there.
	Named bool
	// ALPN are the protocols it offers, in its order.
	ALPN []string
	// Hidden: there is an encrypted hello inside (ECH), or what looks like one: a client that only pretends
	// (GREASE) cannot be told from one that means it.
	Hidden bool
}

// Read takes the records of one ClientHello from r. raw is every byte that it took, also with an error, so
// that the connection can go on elsewhere. It fails with ErrMalformed or with the error of r.
func Read(r io.Reader) (h Hello, raw []byte, err error) {
	var message []byte
	for {
		kind, body, more, err := readRecord(r, raw, maxRecord)
		raw = more
		if err != nil {
			return Hello{}, raw, err
		}
		if kind != typeHandshake {
			return Hello{}, raw, malformed("another record in the middle of it")
		}
		if message == nil {
			message = body // mostly it is all; appending makes another
		} else {
			message = append(message[:len(message):len(message)], body...)
		}
		whole, err := messageSize(message, messageClientHello)
		if err != nil {
			return Hello{}, raw, err
		}
		if whole > 0 && len(message) >= whole {
			h, err = Parse(message)
			return h, raw, err
		}
		if len(raw)+recordHead > MaxHello {
			return Hello{}, raw, malformed("it is too long")
		}
	}
}

// messageSize is the length of the handshake message that b begins with, 0 while that is not known.
func messageSize(b []byte, want byte) (int, error) {
	if b[0] != want {
		return 0, malformed("another message than the hello")
	}
	if len(b) < messageHead {
		return 0, nil
	}
	n := messageHead + int(b[1])<<16 + int(b[2])<<8 + int(b[3])
	if n > MaxHello {
		return 0, malformed("it is too long")
	}
	return n, nil
}

// readRecord appends one record to raw.
func readRecord(r io.Reader, raw []byte, most int) (kind byte, body, all []byte, err error) {
	at := len(raw)
	var head [recordHead]byte
	n, err := io.ReadFull(r, head[:])
	raw = append(raw, head[:n]...)
	if err != nil {
		return 0, nil, raw, err
	}
	size := int(head[3])<<8 | int(head[4])
	switch {
	case head[1] != 3 || head[2] > 4:
		return 0, nil, raw, malformed("a record of no version of TLS")
	case size == 0:
		return 0, nil, raw, malformed("an empty record")
	case size > most || len(raw)+size > MaxHello+recordHead+maxServer:
		return 0, nil, raw, malformed("a record that is too long")
	}
	raw = append(raw, make([]byte, size)...)
	body = raw[at+recordHead:]
	n, err = io.ReadFull(r, body)
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, raw[:at+recordHead+n], err
	}
	return head[0], body, raw, nil
}

// cursor reads from the front of b; ok turns false at the first read that b has no bytes for.
type cursor struct {
	b  []byte
	ok bool
}

func (c *cursor) take(n int) []byte {
	if n > len(c.b) || !c.ok {
		c.b, c.ok = nil, false
		return nil
	}
	out := c.b[:n]
	c.b = c.b[n:]
	return out
}

func (c *cursor) number(size int) int {
	n := 0
	for _, b := range c.take(size) {
		n = n<<8 | int(b)
	}
	return n
}

// block is what a length of size bytes announces.
func (c *cursor) block(size int) cursor {
	b := c.take(c.number(size))
	return cursor{b, c.ok}
}

// done: everything was there and nothing is left.
func (c *cursor) done() bool { return c.ok && len(c.b) == 0 }

// Parse reads one ClientHello message without its records.
func Parse(message []byte) (Hello, error) {
	c := cursor{message, true}
	if c.number(1) != messageClientHello {
		return Hello{}, malformed("another message than the hello")
	}
	body := c.block(3)
	if !c.done() {
		return Hello{}, malformed("its length is another")
	}
	body.take(2 + 32) // version, random
	session := body.block(1)
	suites := body.block(2)
	methods := body.block(1)
	if !body.ok || len(session.b) > 32 || len(suites.b) == 0 || len(suites.b)%2 != 0 || len(methods.b) == 0 {
		return Hello{}, malformed("its fixed part is broken")
	}
	if len(body.b) == 0 { // a client from before extensions
		return Hello{}, nil
	}
	list := body.block(2)
	if !body.done() {
		return Hello{}, malformed("its extensions end elsewhere")
	}
	return extensions(list)
}

func extensions(list cursor) (Hello, error) {
	var h Hello
	seen := map[int]bool{}
	for len(list.b) > 0 {
		kind := list.number(2)
		data := list.block(2)
		if !list.ok {
			return Hello{}, malformed("an extension is cut off")
		}
		if seen[kind] {
			return Hello{}, malformed("an extension comes twice")
		}
		seen[kind] = true
		var err error
		switch kind {
		case extensionSNI:
			h.Named = true
			h.ServerName, err = serverName(data)
		case extensionALPN:
			h.ALPN, err = protocols(data)
		case extensionECH:
			h.Hidden = true
		}
		if err != nil {
			return Hello{}, err
		}
	}
	return h, nil
}

// serverName is the one host name of an SNI extension.
func serverName(data cursor) (string, error) {
	list := data.block(2)
	kind := list.number(1)
	name := list.block(2)
	if !data.done() || !list.done() || kind != 0 || len(name.b) == 0 {
		return "", malformed("its SNI is not one host name")
	}
	if bytes.IndexByte(name.b, 0) >= 0 {
		return "", malformed("NUL in its SNI")
	}
	return string(name.b), nil
}

func protocols(data cursor) ([]string, error) {
	list := data.block(2)
	if !data.done() || len(list.b) == 0 {
		return nil, malformed("its ALPN is broken")
	}
	var out []string
	for len(list.b) > 0 {
		name := list.block(1)
		if !list.ok || len(name.b) == 0 {
			return nil, malformed("its ALPN is broken")
		}
		out = append(out, string(name.b))
	}
	return out, nil
}
