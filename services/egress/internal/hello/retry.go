package hello

import (
	"bytes"
	"io"
)

// retry is the random of a ServerHello that asks for a second ClientHello (RFC 8446, 4.1.3).
var retry = []byte{
	0xCF, 0x21, 0xAD, 0x74, 0xE5, 0x9A, 0x61, 0x11, 0xBE, 0x1D, 0x8C, 0x02, 0x1E, 0x65, 0xB8, 0x91,
	0xC2, 0xA2, 0x11, 0x16, 0x7A, 0xBB, 0x8C, 0x5E, 0x07, 0x9E, 0x09, 0xE2, 0xC8, 0xA8, 0x33, 0x9C,
}

// ReadAnswer takes the first record of a server and says whether it asks the client for a second hello, which
// could name another host than the first. raw is every byte that it took. An answer that is no handshake, an
// alert for example, asks for none.
func ReadAnswer(r io.Reader) (again bool, raw []byte, err error) {
	kind, body, raw, err := readRecord(r, nil, maxServer)
	if err != nil || kind != typeHandshake {
		return false, raw, err
	}
	if body[0] != messageServerHello {
		return false, raw, nil
	}
	if len(body) < messageHead+2+len(retry) { // in pieces: no server does so
		return false, raw, malformed("the server's hello is in pieces")
	}
	return bytes.Equal(body[messageHead+2:][:len(retry)], retry), raw, nil
}

// ReadAgain takes the records of a second ClientHello. What a client may send in between, early data that the
// server drops and the change of cipher that some middle boxes want to see, is given to pass at once, at most
// MaxEarly bytes. raw is the hello's own bytes.
func ReadAgain(r io.Reader, pass func([]byte) error) (h Hello, raw []byte, err error) {
	for early := 0; early <= MaxEarly; {
		kind, _, raw, err := readRecord(r, nil, maxSealed)
		switch {
		case err != nil:
			return Hello{}, raw, err
		case kind == typeHandshake:
			return Read(io.MultiReader(bytes.NewReader(raw), r))
		case kind != typeChange && kind != typeData:
			return Hello{}, raw, malformed("another record before the second hello")
		}
		early += len(raw)
		if err := pass(raw); err != nil {
			return Hello{}, nil, err
		}
	}
	return Hello{}, nil, malformed("more early data than a server takes")
}

// MaxEarly bounds what a client sends before its second hello.
const MaxEarly = 1 << 20
