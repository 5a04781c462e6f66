package box

import (
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// feed writes a client's data to the guest beside the handling of its other frames. What waits in
// it is bounded by the client's credit, which is given back as the guest takes data.
type feed struct {
	st    *stream
	open  func() (Input, error)
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

func newFeed(st *stream, open func() (Input, error)) *feed {
	return &feed{st: st, open: open, ready: make(chan struct{}, 1), done: make(chan struct{})}
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
	in, err := f.open()
	if err != nil {
		f.st.fail(err)
		return
	}
	for {
		p, total, ok := f.next()
		if !ok {
			return
		}
		if total != nil {
			err = in.End(f.st.ctx, *total)
		} else if err = in.Put(f.st.ctx, p.offset, p.data); err == nil {
			err = f.st.grant(len(p.data))
		}
		if err != nil && f.st.ctx.Err() == nil && lenientInput(err) != nil {
			f.st.fail(err)
		}
		if err != nil || total != nil {
			return
		}
	}
}

// lenientInput: a process that does not want its input any more is no failure of the stream.
func lenientInput(err error) error {
	if kindOf(err) == errkind.Refused || kindOf(err) == errkind.Expired {
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

func sortTexts(t []wire.Text) { slices.Sort(t) }

// valid makes a guest's text fit for protobuf.
func valid(t wire.Text) string { return strings.ToValidUTF8(string(t), "\uFFFD") }

// signalNumber reads a name such as SIGTERM or TERM.
func signalNumber(name string) (int, error) {
	full := strings.ToUpper(name)
	if !strings.HasPrefix(full, "SIG") {
		full = "SIG" + full
	}
	n := unix.SignalNum(full)
	if n == 0 || len(name) > 16 {
		return 0, errs.Errorf("signal", errkind.Invalid, "%.16q is no signal", name)
	}
	return int(n), nil
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
