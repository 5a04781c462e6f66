//go:build linux

package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// Names of what a helper machine makes begin with one of these, and no sandbox's id has a dot.
const (
	templatePrefix = "template."
	probePrefix    = "probe."
)

const helperMillis = 2000 // of CPU

// helper is a machine that is nobody's: the probe's, or one that becomes a template.
type helper struct {
	d    *Driver
	name string
	user int
	vm   *vm
	said *os.File
	took time.Duration // until the hello
}

func (h *helper) room() string   { return filepath.Join(h.d.cfg.Run, h.name) }
func (h *helper) cgroup() string { return filepath.Join(h.d.cfg.Cgroup, h.name) }

// bootTries: an emulated machine now and then stands still while it boots (seen in a few of a hundred
// boots, with nothing on its console); another one does not.
const bootTries = 3

// boot starts a helper machine and waits for the hello of its guest. memory may be nil. A machine that
// says nothing in its part of BootTime is given up for another. After an error nothing is left.
func (d *Driver) boot(ctx context.Context, prefix string, s shape, memory *os.File) (h *helper, err error) {
	for range bootTries {
		if h, err = d.bootOnce(ctx, prefix, s, memory); err == nil || ctx.Err() != nil || !silent(err) {
			return h, err
		}
		if err := blank(memory); err != nil {
			return h, err
		}
	}
	return h, err
}

// silent reports that a machine said nothing in its time.
func silent(err error) bool {
	return errors.Is(err, errNoAnswer) || errors.Is(err, context.DeadlineExceeded)
}

// blank makes memory that a machine wrote to as it was.
func blank(memory *os.File) error {
	if memory == nil {
		return nil
	}
	st, err := memory.Stat()
	if err == nil {
		err = errors.Join(memory.Truncate(0), memory.Truncate(st.Size()))
	}
	return err
}

func (d *Driver) bootOnce(ctx context.Context, prefix string, s shape, memory *os.File) (h *helper, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.BootTime/bootTries)
	defer cancel()
	h = &helper{d: d, name: prefix + newID()[:20], user: -1}
	defer func() {
		if err != nil {
			err = errors.Join(h.explain(err), h.remove())
		}
	}()
	began := time.Now()
	if h.user, err = d.users.take(); err != nil {
		return h, err
	}
	if err = d.cgroup.Create(h.cgroup(), d.limitsOf(s.Memory, helperMillis)); err != nil {
		return h, err
	}
	listeners, err := listen(h.room())
	if err != nil {
		return h, err
	}
	b := &build{name: h.name, shape: s}
	for _, f := range listeners {
		b.close = append(b.close, f)
	}
	b.base(d.kernel)
	b.memory(memory, true)
	b.ports(listeners)
	b.placeholders()
	b.network()
	var p jail.Process
	if p, h.said, err = d.launch(ctx, b, h.user, h.cgroup()); err != nil {
		return h, err
	}
	h.vm = newVM(h.name, h.room(), p, nil)
	c, err := h.vm.guest(ctx)
	if err != nil {
		return h, err
	}
	ready, err := c.hello(ctx)
	if err != nil {
		return h, err
	}
	if _, err = vmwire.Negotiate(ready.Min, ready.Max); err != nil {
		return h, err
	}
	h.took = time.Since(began)
	return h, nil
}

// explain adds what QEMU said.
func (h *helper) explain(err error) error {
	if h.said == nil {
		return err
	}
	if text := jail.Said(h.said); text != "" {
		return fmt.Errorf("%w (QEMU: %s)", err, text)
	}
	return err
}

// remove ends a helper. Idempotent.
func (h *helper) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if h.vm != nil {
		h.vm.close()
		h.vm = nil
	}
	if h.said != nil {
		_ = h.said.Close()
		h.said = nil
	}
	err := h.d.cgroup.Stop(ctx, h.cgroup())
	if err == nil {
		err = h.d.cgroup.Remove(ctx, h.cgroup())
	}
	err = errors.Join(err, removeRoom(h.room()))
	if err == nil && h.user >= 0 {
		h.d.users.give(h.user)
	}
	return err
}

// sweepHelpers removes the helpers that an earlier process left.
func (d *Driver) sweepHelpers() {
	names := d.cgroup.Children(d.cfg.Cgroup)
	entries, _ := os.ReadDir(d.cfg.Run)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	for _, name := range names {
		if strings.HasPrefix(name, templatePrefix) || strings.HasPrefix(name, probePrefix) {
			h := &helper{d: d, name: name, user: -1}
			if err := h.remove(); err != nil {
				d.log.Warn("a machine of an earlier process is left", "name", name, "err", err)
			}
		}
	}
}

// removeRoom removes the sockets and their folder. Idempotent.
func removeRoom(room string) error {
	for _, name := range append(sockets, "") {
		if err := removeEmpty(filepath.Join(room, name)); err != nil {
			return err
		}
	}
	return nil
}

// memfd makes a file in memory that can be sealed. It has all of its pages from the beginning: a clone
// that is the first to touch a page which is not there gets it in the file as well as its own copy, and
// both are charged to it, so that a machine which uses all of its memory is killed.
func memfd(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if size > 0 {
		err = unix.Fallocate(fd, 0, 0, size)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("make a file of %d bytes in memory: %w", size, err)
	}
	return f, nil
}

// seal makes a file in memory what it is for ever. It fails while somebody can still write to it.
func seal(f *os.File) error {
	_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	if err != nil {
		return fmt.Errorf("seal a template: %w", err)
	}
	return nil
}

// reopen opens a file in memory again, with a position of its own.
func reopen(f *os.File, flags int) (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), flags, 0)
}
