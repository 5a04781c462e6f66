//go:build linux

package microvm

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail"
	"github.com/berth-dev/berth/services/hostagent/driver/microvm/qmp"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

const (
	relinkPause = 50 * time.Millisecond
	linkTime    = 5 * time.Second // of one attempt
	// lastWords is how long the guest's own account of its end may come after the end.
	lastWords  = 500 * time.Millisecond
	statusGone = 255 // of a machine that vanished: its own status is not known
)

// errEnded says that the machine does not run any more.
var errEnded = errors.New("the machine has ended")

// vm is a running QEMU with the connections to it, which are made again whenever they break: nobody
// but this process uses them.
type vm struct {
	name string
	room string
	proc jail.Process
	// news is told, from a goroutine of its own, whenever oom or end changed; nil for a template.
	news func(*vm)

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced whenever something below changes
	qmp     *qmp.Client
	control *control
	seen    bool // QEMU's state was asked for once
	oom     uint64
	exit    *uint32 // the guest's word
	end     *end
	full    bool // it stands still: there is no room for what it writes

	stands chan struct{} // it stands still, perhaps
}

func newVM(name, room string, p jail.Process, news func(*vm)) *vm {
	v := &vm{name: name, room: room, proc: p, news: news, changed: make(chan struct{}), stands: make(chan struct{}, 1)}
	v.ctx, v.cancel = context.WithCancel(context.Background())
	v.wg.Go(v.keepMonitor)
	v.wg.Go(v.keepControl)
	v.wg.Go(v.keepGoing)
	return v
}

// close lets go of the machine, which goes on.
func (v *vm) close() {
	v.cancel()
	v.mu.Lock()
	if v.qmp != nil {
		v.qmp.Close()
	}
	if v.control != nil {
		v.control.close()
	}
	v.mu.Unlock()
	v.wg.Wait()
}

// change runs f with the lock and tells who waits.
func (v *vm) change(f func()) {
	v.mu.Lock()
	f()
	close(v.changed)
	v.changed = make(chan struct{})
	v.mu.Unlock()
}

// await waits until ok, which runs with the lock, is true; errEnded once the machine has ended.
func (v *vm) await(ctx context.Context, ok func() bool) error {
	for {
		v.mu.Lock()
		yes, ended, changed := ok(), v.end != nil, v.changed
		v.mu.Unlock()
		switch {
		case yes:
			return nil
		case ended:
			return errEnded
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-v.ctx.Done():
			return context.Canceled
		}
	}
}

// monitor returns the connection to QEMU's monitor once there is one.
func (v *vm) monitor(ctx context.Context) (*qmp.Client, error) {
	var c *qmp.Client
	err := v.await(ctx, func() bool { c = v.qmp; return c != nil })
	return c, err
}

// guest returns the connection to the guest's control port once there is one.
func (v *vm) guest(ctx context.Context) (*control, error) {
	var c *control
	err := v.await(ctx, func() bool { c = v.control; return c != nil })
	return c, err
}

// call runs one command of the monitor.
func (v *vm) call(ctx context.Context, command string, args, out any) error {
	c, err := v.monitor(ctx)
	if err != nil {
		return err
	}
	return c.Call(ctx, command, args, out)
}

// again reports whether a connection that broke is to be made again: not when QEMU has ended.
func (v *vm) again() bool {
	if v.ctx.Err() != nil {
		return false
	}
	if !v.proc.Lives() {
		v.finish()
		return false
	}
	select {
	case <-v.ctx.Done():
		return false
	case <-time.After(relinkPause):
		return true
	}
}

func (v *vm) keepMonitor() {
	for ok := true; ok; ok = v.again() {
		ctx, cancel := context.WithTimeout(v.ctx, linkTime)
		c, err := qmp.Dial(ctx, filepath.Join(v.room, sockMonitor), v.told)
		if err == nil {
			var st struct{ Status string }
			err = c.Call(ctx, "query-status", nil, &st)
			switch {
			case err != nil:
			case over(st.Status):
				v.finish()
			case st.Status == statusFull:
				v.mayStand()
			}
		}
		cancel()
		if err != nil {
			if c != nil {
				c.Close()
			}
			continue
		}
		v.change(func() { v.qmp, v.seen = c, true })
		select {
		case <-c.Done():
		case <-v.ctx.Done():
			c.Close()
		}
		v.change(func() { v.qmp = nil })
	}
}

// over reports that a machine in this state of QEMU's will not run again.
func over(status string) bool {
	switch status {
	case "shutdown", "guest-panicked", "internal-error", "watchdog":
		return true
	}
	return false
}

// told takes QEMU's events.
func (v *vm) told(e qmp.Event) {
	switch e.Name {
	case "SHUTDOWN", "GUEST_PANICKED":
		go v.finish()
	case "BLOCK_IO_ERROR":
		v.mayStand()
	}
}

func (v *vm) keepControl() {
	for ok := true; ok; ok = v.again() {
		c, err := dialControl(v.ctx, v.room, v.heard)
		if err != nil {
			continue
		}
		v.change(func() { v.control = c })
		select {
		case <-c.done:
		case <-v.ctx.Done():
			c.close()
			<-c.done
		}
		v.change(func() { v.control = nil })
	}
}

// heard takes the guest's events.
func (v *vm) heard(e vmwire.Event) {
	switch e.Kind {
	case vmwire.EventOOM:
		v.change(func() { v.oom = max(v.oom+1, e.Count) })
		v.tell()
	case vmwire.EventExited:
		code := uint32(e.Code) & 0xff
		v.change(func() { v.exit = &code })
	}
}

func (v *vm) tell() {
	if v.news != nil && v.ctx.Err() == nil {
		go v.news(v)
	}
}

// finish notes that the machine has ended, with the guest's own account of it if that comes.
func (v *vm) finish() {
	if v.ctx.Err() != nil {
		return
	}
	deadline, cancel := context.WithTimeout(v.ctx, lastWords)
	defer cancel()
	_ = v.await(deadline, func() bool { return v.exit != nil })
	first := false
	v.change(func() {
		if v.end != nil {
			return
		}
		first = true
		v.end = &end{Status: statusGone, OOMKills: v.oom, At: time.Now().UnixNano()}
		if v.exit != nil {
			v.end.Status = *v.exit
		}
	})
	if first {
		v.tell()
	}
}

// ended is how the machine ended; nil while it runs. A QEMU that vanished is noticed here too.
func (v *vm) ended() *end {
	v.mu.Lock()
	e := v.end
	v.mu.Unlock()
	if e == nil && !v.proc.Lives() {
		v.finish()
		v.mu.Lock()
		e = v.end
		v.mu.Unlock()
	}
	return e
}

// over reports that an end was noted; it waits for nothing.
func (v *vm) over() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.end != nil
}

// ooms is how many processes the guest says its kernel killed for memory.
func (v *vm) ooms() uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.oom
}

// vmOf returns the machine of a sandbox that is known to run, or nil.
func (d *Driver) vmOf(id ids.SandboxID) *vm {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.vms[id]
}

// hold notes a machine; what was noted before is let go of.
func (d *Driver) hold(id ids.SandboxID, v *vm) {
	d.mu.Lock()
	old := d.vms[id]
	if v == nil {
		delete(d.vms, id)
	} else {
		d.vms[id] = v
	}
	d.mu.Unlock()
	if old != nil {
		old.close()
	}
}
