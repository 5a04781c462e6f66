package null

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Guest is the first process of a sandbox. It returns its exit status; it should return soon after
// ctx ends, and its in ends with it. While it is frozen its calls of in and out do not return.
type Guest func(ctx context.Context, in io.Reader, out io.Writer) uint32

func echo(_ context.Context, in io.Reader, out io.Writer) uint32 {
	_, _ = io.Copy(out, in)
	return 0
}

// statusKilled is the exit status of who ends by SIGKILL.
const statusKilled = 128 + 9

// box is one sandbox. What it knows of its end is guarded by the World's lock.
type box struct {
	sb      driver.Sandbox
	dir     string
	limits  driver.Limits
	warm    *warm // set while it is nobody's
	half    bool  // claimed, and its guest was never started
	in, out *os.File
	ctx     context.Context // ends with the sandbox
	cancel  context.CancelFunc
	done    chan struct{} // closed when the guest ended
	killed  bool
	status  uint32
	ended   time.Time

	mu     sync.Mutex
	frozen chan struct{} // closed by the thaw; nil while it runs
	cpu    time.Duration
	since  time.Time // it works since then; zero while it waits
}

func newBox(sb driver.Sandbox, l driver.Limits) *box {
	b := &box{sb: sb, done: make(chan struct{}), limits: l}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b
}

func (b *box) place(dir string) {
	b.dir = dir
	b.sb.Channel = driver.Channel{Stdin: filepath.Join(dir, "stdin"), Stdout: filepath.Join(dir, "stdout")}
}

func (b *box) makeFolder() error {
	if err := os.RemoveAll(b.dir); err != nil {
		return err
	}
	return os.Mkdir(b.dir, 0o700)
}

// open makes the pipes. Both are held open for both directions, so that no end of them is ever seen
// while the sandbox lives.
func (b *box) open() error {
	for _, p := range []struct {
		path string
		file **os.File
	}{{b.sb.Channel.Stdin, &b.in}, {b.sb.Channel.Stdout, &b.out}} {
		if err := unix.Mkfifo(p.path, 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("make pipe: %w", err)
		}
		f, err := os.OpenFile(p.path, os.O_RDWR|unix.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("open pipe: %w", err)
		}
		if *p.file != nil { // made twice
			_ = (*p.file).Close()
		}
		*p.file = f
	}
	return nil
}

// end ends the guest and removes what was made.
func (b *box) end() {
	b.cancel()
	b.close()
	if b.dir != "" {
		_ = os.RemoveAll(b.dir)
	}
}

func (b *box) close() {
	if b.in != nil {
		_ = b.in.Close()
	}
	if b.out != nil {
		_ = b.out.Close()
	}
}

func (b *box) over() bool {
	select {
	case <-b.done:
		return true
	default:
		return false
	}
}

// live is the life of a sandbox.
func (d *Driver) live(b *box) {
	stop := context.AfterFunc(b.ctx, b.close)
	b.work(true)
	status := d.guest(b.ctx, pipe{b}, pipe{b})
	b.work(false)
	stop()
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	d.world.ended(b, status)
}

// ended notes the end of a sandbox; the World is locked.
func (w *World) ended(b *box, status uint32) {
	if b.status, b.ended = status, time.Now(); b.killed {
		b.status = statusKilled
	}
	b.cancel()
	b.close()
	close(b.done)
	if w.boxes[b.sb.ID] == b {
		for x := range w.watchers {
			x.add(b)
		}
	}
}

// state is what the driver shows of it.
func (b *box) state(d *Driver) driver.State {
	switch {
	case b.over():
		return driver.Exited
	case b.half, b.warm != nil && b.warm.by != d:
		return driver.Partial
	case b.warm != nil:
		return driver.Waiting
	}
	return driver.Running
}

// pipe is the guest's side of the pipes: it tells when the guest waits, and holds it while it is frozen.
type pipe struct{ b *box }

func (p pipe) Read(buf []byte) (int, error)  { return p.b.call(p.b.in.Read, buf) }
func (p pipe) Write(buf []byte) (int, error) { return p.b.call(p.b.out.Write, buf) }

func (b *box) call(do func([]byte) (int, error), buf []byte) (int, error) {
	b.work(false)
	defer b.work(true)
	if err := b.thawed(); err != nil {
		return 0, err
	}
	n, err := do(buf)
	if terr := b.thawed(); terr != nil { // what came while it was frozen
		return n, terr
	}
	return n, err
}

// thawed waits until the sandbox is not frozen.
func (b *box) thawed() error {
	for {
		b.mu.Lock()
		ice := b.frozen
		b.mu.Unlock()
		if ice == nil {
			return nil
		}
		select {
		case <-ice:
		case <-b.ctx.Done():
			return io.EOF
		}
	}
}

func (b *box) freeze(on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case on && b.frozen == nil:
		b.frozen = make(chan struct{})
	case !on && b.frozen != nil:
		close(b.frozen)
		b.frozen = nil
	}
}

// work notes that the guest begins or ceases to work.
func (b *box) work(on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.since.IsZero() {
		b.cpu += time.Since(b.since)
	}
	if b.since = (time.Time{}); on {
		b.since = time.Now()
	}
}

func (b *box) worked() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.since.IsZero() {
		return b.cpu
	}
	return b.cpu + time.Since(b.since)
}
