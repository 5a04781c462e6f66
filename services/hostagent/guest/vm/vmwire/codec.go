package vmwire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// ErrTooLong is a line above MaxLine.
var ErrTooLong = fmt.Errorf("vmwire: line above %d bytes", MaxLine)

// ErrMessage is matched by the error of a line that is no message; the reader can go on.
var ErrMessage = errors.New("vmwire: not a message")

// Negotiate returns the newest version that both sides speak.
func Negotiate(minVersion, maxVersion int) (int, error) {
	v := min(maxVersion, MaxVersion)
	if v < max(minVersion, MinVersion) {
		return 0, fmt.Errorf("vmwire: no common version: %d..%d and %d..%d", minVersion, maxVersion, MinVersion, MaxVersion)
	}
	return v, nil
}

// Encode returns the line of a message, with its end.
func Encode(m Message) ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	line, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("vmwire: encode %s: %w", m.Type, err)
	}
	if len(line)+1 > MaxLine {
		return nil, ErrTooLong
	}
	return append(line, '\n'), nil
}

// Decode reads one line, with or without its end. Errors match ErrMessage or are ErrTooLong.
func Decode(line []byte) (Message, error) {
	if len(line) > MaxLine {
		return Message{}, ErrTooLong
	}
	var m Message
	if err := json.Unmarshal(line, &m); err != nil {
		return Message{}, fmt.Errorf("%w: %w", ErrMessage, err)
	}
	if err := m.check(); err != nil {
		return Message{}, err
	}
	return m, nil
}

// check refuses a message whose part is missing, not alone, or out of bounds.
func (m Message) check() error {
	parts := map[Type]bool{
		TypeHello: m.Hello != nil, TypeReady: m.Ready != nil, TypePersonalise: m.Personalise != nil,
		TypeAnswer: m.Answer != nil, TypeCall: m.Call != nil, TypeDone: m.Done != nil, TypeEvent: m.Event != nil,
	}
	set := 0
	for _, there := range parts {
		if there {
			set++
		}
	}
	if set != 1 || !parts[m.Type] {
		return fmt.Errorf("%w: type %.40q with %d parts", ErrMessage, string(m.Type), set)
	}
	var err error
	switch m.Type {
	case TypeHello:
		err = id("nonce", m.Hello.Nonce)
	case TypeReady:
		err = m.Ready.check()
	case TypePersonalise:
		err = m.Personalise.check()
	case TypeAnswer:
		err = m.Answer.check()
	case TypeCall:
		err = errors.Join(id("id", m.Call.ID), files(m.Call.Files), text("op", string(m.Call.Op)))
	case TypeDone:
		err = errors.Join(id("id", m.Done.ID), text("error", m.Done.Error), text("reason", string(m.Done.Reason)))
	case TypeEvent:
		err = errors.Join(text("text", m.Event.Text), text("kind", string(m.Event.Kind)))
	}
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrMessage, m.Type, err)
	}
	return nil
}

func (r *Ready) check() error {
	return errors.Join(text("nonce", r.Nonce), text("kernel", r.Kernel), text("software", r.Software), timings(r.Steps))
}

func (a *Answer) check() error {
	if len(a.Enforced) > MaxSteps {
		return errors.New("too many limits")
	}
	for _, name := range a.Enforced {
		if err := text("limit", name); err != nil {
			return err
		}
	}
	return errors.Join(id("id", a.ID), text("error", a.Error), text("reason", string(a.Reason)), timings(a.Steps))
}

func (p *Personalise) check() error {
	switch {
	case len(p.Seed) < MinSeed || len(p.Seed) > MaxSeed:
		return fmt.Errorf("seed of %d bytes, want %d to %d", len(p.Seed), MinSeed, MaxSeed)
	case len(p.Env) > MaxEnv:
		return errors.New("too many variables")
	case len(p.Init) > MaxArgv:
		return errors.New("too many arguments")
	case len(p.Hostname) > 64 || strings.ContainsAny(p.Hostname, "/\x00\n"):
		return errors.New("hostname")
	}
	for _, v := range p.Env {
		if i := strings.IndexByte(string(v), '='); i < 1 || strings.IndexByte(string(v), 0) >= 0 {
			return errors.New("a variable is not NAME=value")
		}
	}
	for _, v := range p.Init {
		if strings.IndexByte(string(v), 0) >= 0 {
			return errors.New("an argument holds NUL")
		}
	}
	err := errors.Join(id("id", p.ID), files(p.Files), device("root", p.Root))
	if p.Disk != nil {
		err = errors.Join(err, device("disk", p.Disk.Device))
	}
	if p.Network != nil {
		err = errors.Join(err, device("network", p.Network.Device), text("address", p.Network.Address))
	}
	return errors.Join(err, overs(p.Over))
}

// overs are plain names and absolute paths.
func overs(list []Over) error {
	if len(list) > MaxOver {
		return errors.New("too many files over those of the root")
	}
	for _, o := range list {
		if o.From == "" || o.From == "." || o.From == ".." || len(o.From) > 255 || strings.ContainsAny(o.From, "/\x00") {
			return fmt.Errorf("%.40q is no name of a file", o.From)
		}
		if !strings.HasPrefix(o.To, "/") || len(o.To) > MaxText || strings.Contains(o.To, "\x00") {
			return fmt.Errorf("%.40q is no path of a file", o.To)
		}
	}
	return nil
}

func id(what, s string) error {
	if s == "" || len(s) > MaxIDSize {
		return fmt.Errorf("%s of %d bytes", what, len(s))
	}
	return nil
}

func text(what, s string) error {
	if len(s) > MaxText {
		return fmt.Errorf("%s of %d bytes", what, len(s))
	}
	return nil
}

func timings(list []Step) error {
	if len(list) > MaxSteps {
		return errors.New("too many steps")
	}
	for _, s := range list {
		if err := text("step", s.Name); err != nil {
			return err
		}
	}
	return nil
}

// device is a plain name of /dev.
func device(what, name string) error {
	if len(name) > 15 || strings.ContainsAny(name, "/.\x00") {
		return fmt.Errorf("%s %.40q is no name of a device", what, name)
	}
	return nil
}

// files are plain names that do not replace the guest agent.
func files(m map[string]File) error {
	if len(m) > MaxFiles {
		return errors.New("too many files")
	}
	for name, f := range m {
		if name == "" || name == "." || name == ".." || name == "guest" || len(name) > 255 || strings.ContainsAny(name, "/\x00") {
			return fmt.Errorf("%.40q is no name of a file", name)
		}
		if f.Mode&^0o777 != 0 {
			return fmt.Errorf("file %.40q has mode %o", name, f.Mode)
		}
	}
	return nil
}

// Texts makes what Env and Init hold.
func Texts(list []string) []wire.Text {
	out := make([]wire.Text, len(list))
	for i, s := range list {
		out[i] = wire.Text(s)
	}
	return out
}

// Strings is the reverse of Texts.
func Strings(list []wire.Text) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}

// Reader takes messages from a port. It is not safe for concurrent use.
type Reader struct {
	in   io.Reader
	buf  []byte
	skip bool // within a line that was too long
}

// NewReader reads from in.
func NewReader(in io.Reader) *Reader { return &Reader{in: in} }

// Next returns the next message. After an error that matches ErrMessage, or ErrTooLong, the caller
// goes on with Next. Any other error is that of the port, and half a line that was read is dropped: a
// port gives an end when its other side went away, and data again when the next one comes.
func (r *Reader) Next() (Message, error) {
	for {
		if line, ok := r.line(); ok {
			if r.skip {
				r.skip = false
				continue
			}
			if len(bytes.TrimSpace(line)) == 0 {
				continue
			}
			return Decode(line)
		}
		if len(r.buf) >= MaxLine {
			r.buf = nil
			if !r.skip {
				r.skip = true
				return Message{}, ErrTooLong
			}
		}
		chunk := make([]byte, 32<<10)
		n, err := r.in.Read(chunk)
		r.buf = append(r.buf, chunk[:max(n, 0)]...)
		if n <= 0 {
			r.buf, r.skip = nil, false
			if err == nil {
				err = io.EOF
			}
			return Message{}, err
		}
	}
}

// line cuts the first line off what was read.
func (r *Reader) line() ([]byte, bool) {
	i := bytes.IndexByte(r.buf, '\n')
	if i < 0 {
		return nil, false
	}
	line := r.buf[:i]
	r.buf = r.buf[i+1:]
	return line, true
}
