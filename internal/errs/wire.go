package errs

import (
	"errors"
	"strconv"
	"strings"

	"github.com/berth-dev/berth/schemas/errkind"
)

// Headers of a failed answer. The first two are those of NATS micro.
const (
	HeaderCode = "Nats-Service-Error-Code" // the kind's number
	HeaderText = "Nats-Service-Error"      // what happened, one line
	HeaderKind = "Berth-Error-Kind"        // the kind's name, for people
	HeaderID   = "Berth-Error-Id"          // what it concerns
)

const maxText = 1024

// ToHeader writes err into a message's header (nats.Header is of this type).
func ToHeader(err error, h map[string][]string) {
	kind := Kind(err)
	h[HeaderCode] = []string{strconv.Itoa(int(kind))}
	h[HeaderKind] = []string{kind.String()}
	text := oneLine(err.Error())
	if text == "" {
		text = kind.String()
	}
	h[HeaderText] = []string{text}
	if e := (*Error)(nil); errors.As(err, &e) && e.ID != "" {
		h[HeaderID] = []string{oneLine(e.ID)}
	}
}

// FromHeader returns the error that an answer carries, nil if it is none.
func FromHeader(op string, h map[string][]string) error {
	code := first(h, HeaderCode)
	text := first(h, HeaderText)
	if code == "" && text == "" {
		return nil
	}
	if text == "" {
		text = errkind.Parse(code).String()
	}
	return &Error{Op: op, Kind: errkind.Parse(code), ID: first(h, HeaderID), Cause: remote(text)}
}

// remote is the text of a failure that happened in another process.
type remote string

func (r remote) Error() string { return string(r) }

func first(h map[string][]string, key string) string {
	if v := h[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// oneLine keeps a header value legal and bounded.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "..."
	}
	return strings.TrimSpace(s)
}
