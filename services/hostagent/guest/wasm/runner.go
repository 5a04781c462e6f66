//go:build linux

package wasm

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/early"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/jail"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

// Descriptors of a call's process, beside the socket.
const (
	moduleFD = 4
	cacheFD  = 5
)

// runner is the process of one call.
type runner struct {
	static static
	call   call
	asked  bool // the call has come
	// left is what may still be written to standard output and error.
	left     atomic.Int64
	files    [3]*os.File
	memory   uint64 // of the module, in bytes
	denied   atomic.Bool
	ended    atomic.Bool
	deadline *time.Timer
}

// RunCall is the life of a call's process.
func RunCall(arg string) int {
	// Two: one that runs the module, one that ends it in time.
	runtime.GOMAXPROCS(2)
	r := &runner{}
	if err := json.Unmarshal([]byte(arg), &r.static); err != nil {
		return order.ExitJail
	}
	r.obeySignals()
	if err := jail.Limit(r.static.OpenFiles); err != nil {
		return r.fail(order.ExitJail, err)
	}
	// A call that is there already sees its time run while the module is compiled.
	if err := r.await(unix.MSG_DONTWAIT); err != nil && !isEmpty(err) {
		return order.ExitJail
	}
	p, err := r.prepare()
	if err != nil {
		code := order.ExitJail
		if e, ok := err.(ending); ok {
			code = e.code
		}
		return r.fail(code, err)
	}
	if !r.asked && !r.static.JS {
		if err := r.await(0); err != nil {
			return order.ExitJail
		}
	}
	return p.run()
}

// obeySignals makes a signal end the process as it ends any program: the first process of a PID
// namespace would otherwise not hear it.
func (r *runner) obeySignals() {
	go func() {
		for sig := range early.Signals {
			if sig != unix.SIGPIPE {
				r.end(128+int(sig.(syscall.Signal)), "")
			}
		}
	}()
}

// await receives the call and takes its standard files.
func (r *runner) await(flags int) error {
	_, files, err := receive(order.Socket, make([]byte, 16), flags)
	if err != nil {
		return err
	}
	if len(files) != 4 {
		return fmt.Errorf("the call came with %d files", len(files))
	}
	b, err := io.ReadAll(io.NewSectionReader(files[0], 0, 64<<20))
	if err != nil {
		return fmt.Errorf("read call: %w", err)
	}
	if err := json.Unmarshal(b, &r.call); err != nil {
		return fmt.Errorf("read call: %w", err)
	}
	_ = files[0].Close()
	_ = unix.Close(order.Socket)
	copy(r.files[:], files[1:])
	r.left.Store(1<<63 - 1)
	if r.static.OutputBytes > 0 {
		r.left.Store(int64(r.static.OutputBytes))
	}
	if ms := r.static.Millis; ms > 0 {
		limit := time.Duration(ms) * time.Millisecond
		r.deadline = time.AfterFunc(limit, func() {
			r.end(order.ExitTime, fmt.Sprintf("time limit: the call ran longer than %s", limit))
		})
	}
	r.asked = true
	return nil
}

func isEmpty(err error) bool {
	var e unix.Errno
	for err != nil {
		if n, ok := err.(unix.Errno); ok {
			e = n
		}
		u, ok := err.(interface{ Unwrap() error })
		if !ok {
			break
		}
		err = u.Unwrap()
	}
	return e == unix.EAGAIN
}

// ending is why a call ends that did not end by itself.
type ending struct {
	code int
	why  string
}

func (e ending) Error() string { return e.why }

// fail tells the caller why the call ends, waiting for it if it has not come.
func (r *runner) fail(code int, err error) int {
	if !r.asked {
		if r.await(0) != nil {
			return code
		}
	}
	r.end(code, err.Error())
	return code
}

// end ends the process; only the first reason counts.
func (r *runner) end(code int, why string) {
	if !r.ended.CompareAndSwap(false, true) {
		select {} // somebody else ends it
	}
	if why != "" {
		r.note(why)
	}
	os.Exit(code)
}

// note is a line for who reads the call's standard error.
func (r *runner) note(why string) {
	if r.files[2] != nil {
		_, _ = r.files[2].WriteString("berth-wasm: " + why + "\n")
	}
}

// output is standard output or error of the module, with what is left of the limit of both.
type output struct {
	r *runner
	n int
}

// Write implements io.Writer. The write that goes over the limit is cut and ends the call.
func (o output) Write(p []byte) (int, error) {
	f := o.r.files[o.n]
	left := o.r.left.Add(-int64(len(p)))
	if left >= 0 {
		return f.Write(p)
	}
	if keep := int64(len(p)) + left; keep > 0 {
		_, _ = f.Write(p[:keep])
	}
	o.r.end(order.ExitOutput, fmt.Sprintf("output limit: the call wrote more than %d bytes", o.r.static.OutputBytes))
	return 0, io.ErrClosedPipe
}

// input is standard input, which a process that was started ahead gets late.
type input struct{ r *runner }

// Read implements io.Reader.
func (i input) Read(p []byte) (int, error) {
	if i.r.files[0] == nil {
		return 0, io.EOF
	}
	return i.r.files[0].Read(p)
}
