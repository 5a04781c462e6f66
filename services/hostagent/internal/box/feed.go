package box

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// feed writes a client's data to the guest beside the handling of its other frames. What waits in
// it is bounded by the client's credit, which is given back as the guest takes data.
type feed struct {
	st    *stream
	guest *hostend.Conn
	key   string
	mu    sync.Mutex
	wait  []piece
	ready chan struct{}
	begun bool
	done  chan struct{}
	total *uint64
}

type piece struct {
	offset uint64
	data   []byte
}

func newFeed(st *stream, guest *hostend.Conn, key string) *feed {
	return &feed{st: st, guest: guest, key: key, ready: make(chan struct{}, 1), done: make(chan struct{})}
}

func (f *feed) put(d *boxv1.Data) error {
	if len(d.GetData()) == 0 {
		return nil
	}
	return f.add(func() { f.wait = append(f.wait, piece{d.GetOffset(), d.GetData()}) })
}

func (f *feed) end(total uint64) error { return f.add(func() { f.total = &total }) }

func (f *feed) add(change func()) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.total != nil {
		return errs.E("read frame", errkind.Invalid, "", "data after its end")
	}
	change()
	if !f.begun {
		f.begun = true
		go f.run()
	}
	select {
	case f.ready <- struct{}{}:
	default:
	}
	return nil
}

// close waits for the writer, which ends with the stream.
func (f *feed) close() {
	f.mu.Lock()
	begun := f.begun
	f.mu.Unlock()
	if begun {
		<-f.done
	}
}

func (f *feed) run() {
	defer close(f.done)
	for {
		p, total, ok := f.next()
		if !ok {
			return
		}
		var err error
		if total != nil {
			err = f.guest.CloseStdin(f.st.ctx, f.key, *total)
		} else {
			err = f.pass(p)
		}
		if err != nil && f.st.ctx.Err() == nil && lenientInput(err) != nil {
			f.st.fail(err)
		}
		if err != nil || total != nil {
			return
		}
	}
}

// pass hands one piece over, gives its credit back and says what the guest holds.
func (f *feed) pass(p piece) error {
	if err := f.guest.WriteStdin(f.st.ctx, f.key, p.offset, p.data); err != nil {
		return err
	}
	held := p.offset + uint64(len(p.data))
	ack := &boxv1.Frame{Body: &boxv1.Frame_InputAck{InputAck: &boxv1.InputAck{Offset: held}}}
	if err := f.st.send(ack, false); err != nil {
		return err
	}
	return f.st.grant(len(p.data))
}

// lenientInput: a process that does not want its input any more is no failure of the stream.
func lenientInput(err error) error {
	if errors.Is(err, hostend.ErrStdinClosed) || errors.Is(err, hostend.ErrExited) || errors.Is(err, hostend.ErrNoSuchExec) {
		return nil
	}
	return err
}

func (f *feed) next() (p piece, total *uint64, ok bool) {
	for {
		f.mu.Lock()
		if len(f.wait) > 0 {
			p = f.wait[0]
			f.wait = slices.Delete(f.wait, 0, 1)
			f.mu.Unlock()
			return p, nil, true
		}
		total = f.total
		f.mu.Unlock()
		if total != nil {
			return p, total, true
		}
		select {
		case <-f.ready:
		case <-f.st.ctx.Done():
			return p, nil, false
		}
	}
}

// valid makes a guest's text fit for protobuf.
func valid(t wire.Text) string { return strings.ToValidUTF8(string(t), "\uFFFD") }

// signalNumber reads a name such as SIGTERM or TERM.
func signalNumber(name string) (syscall.Signal, error) {
	full := strings.ToUpper(name)
	if !strings.HasPrefix(full, "SIG") {
		full = "SIG" + full
	}
	n := unix.SignalNum(full)
	if n == 0 || len(name) > 16 {
		return 0, errs.Errorf("signal", errkind.Invalid, "%.16q is no signal", name)
	}
	return n, nil
}

func signalName(n int) string {
	if s := unix.SignalName(unix.Signal(n)); s != "" {
		return s
	}
	return "SIG" + itoa(n)
}

func itoa(n int) string {
	if n < 0 || n > 999 {
		return "?"
	}
	return strings.TrimLeft(string([]byte{'0' + byte(n/100), '0' + byte(n/10%10), '0' + byte(n%10)}), "0")
}
