package sdk

import (
	"context"
	"io"
	"sync"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// input is the standard input of a process. Bytes stay here until the guest
// has acknowledged them, or until the host has taken a whole window more, which
// is more than can be on the way to the guest: a lost stream loses none.
type input struct {
	r io.Reader

	mu      sync.Mutex
	cond    *sync.Cond
	buf     []byte // bytes from base on
	base    uint64 // nobody will ask for what was before
	taken   uint64 // up to where the host of the current stream gave credit back
	ended   bool   // the reader is at its end
	stopped bool
	once    sync.Once
}

func newInput(r io.Reader) *input {
	in := &input{r: r}
	in.cond = sync.NewCond(&in.mu)
	return in
}

func (in *input) wake() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.cond.Broadcast()
}

func (in *input) stop() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.stopped = true
	in.cond.Broadcast()
}

// read moves bytes from the user's reader into the buffer.
func (in *input) read() {
	p := make([]byte, chunk)
	for {
		in.mu.Lock()
		for len(in.buf) >= 2*window && !in.stopped {
			in.cond.Wait()
		}
		stopped := in.stopped
		in.mu.Unlock()
		if stopped {
			return
		}
		n, err := in.r.Read(p)
		in.mu.Lock()
		in.buf = append(in.buf, p[:n]...)
		in.ended = err != nil
		in.cond.Broadcast()
		in.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// acked forgets what the guest holds.
func (in *input) acked(to uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.forget(to)
}

// credited notes that the host took n bytes more.
func (in *input) credited(n uint32) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.taken += uint64(n)
	if in.taken > window {
		in.forget(in.taken - window)
	}
}

func (in *input) forget(to uint64) {
	if to <= in.base || to > in.base+uint64(len(in.buf)) {
		return
	}
	in.buf = append([]byte(nil), in.buf[to-in.base:]...)
	in.base = to
	in.cond.Broadcast()
}

// feed sends what is not acknowledged on one stream until ctx ends.
func (in *input) feed(ctx context.Context, st *stream) {
	in.once.Do(func() { go in.read() })
	stop := context.AfterFunc(ctx, in.wake)
	defer stop()
	in.mu.Lock()
	sent := in.base
	in.taken = sent
	in.mu.Unlock()
	st.onCredit(in.credited)
	for {
		n, ended, ok := in.wait(ctx, &sent)
		if !ok {
			return
		}
		if n == 0 && ended {
			_ = st.send(&boxv1.Frame{Body: &boxv1.Frame_CloseInput{CloseInput: &boxv1.CloseInput{Total: sent}}})
			return
		}
		n, err := st.reserve(ctx, n)
		if err != nil {
			return
		}
		at, piece := in.piece(sent, n)
		if len(piece) == 0 {
			continue
		}
		d := &boxv1.Data{Channel: boxv1.Channel_CHANNEL_STDIN, Offset: at, Data: piece}
		if err := st.send(&boxv1.Frame{Body: &boxv1.Frame_Data{Data: d}}); err != nil {
			st.lose(err)
			return
		}
		sent = at + uint64(len(piece))
	}
}

// wait returns how many bytes there are to send.
func (in *input) wait(ctx context.Context, sent *uint64) (n int, ended, ok bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for {
		if in.stopped || ctx.Err() != nil {
			return 0, false, false
		}
		if in.base > *sent { // acknowledged before it was sent again
			in.taken += in.base - *sent
			*sent = in.base
		}
		n = int(in.base + uint64(len(in.buf)) - *sent)
		if n > 0 || in.ended {
			return n, in.ended, true
		}
		in.cond.Wait()
	}
}

// piece copies n bytes from at on, without what was acknowledged meanwhile: all
// of them, it may be, and more.
func (in *input) piece(at uint64, n int) (uint64, []byte) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if at+uint64(n) <= in.base {
		return at, nil
	}
	if at < in.base {
		skip := in.base - at
		at, n = at+skip, n-int(skip)
		in.taken += skip
	}
	off := int(at - in.base)
	return at, append([]byte(nil), in.buf[off:off+n]...)
}
