//go:build linux

package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// making is one Create.
type making struct {
	d         *Driver
	spec      driver.Spec
	id        ids.SandboxID
	rec       record
	shape     shape
	diskBytes uint64
	warm      bool      // it is prepared, and nobody's
	blank     *os.File  // what its disk is a copy of; nil: it holds nothing
	tpl       *template // nil: the machine boots
	said      *os.File
	state     *os.File // the template's, for this clone
	restored  bool
	files     map[string]vmwire.File // of the run folder, as the guest got them
	given     bool                   // QEMU has the session's disk
}

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	for {
		if sb, again, err := d.create(ctx, spec, d.claimed(spec)); !again {
			return sb, err
		}
	}
}

// create is one try, at the name that the spec's sandbox seemed to have: again, if that has changed.
func (d *Driver) create(ctx context.Context, spec driver.Spec, at ids.SandboxID) (sb driver.Sandbox, again bool, err error) {
	const op = "create sandbox"
	defer d.lock(at)()
	if sb, err = d.running(ctx, at); err != nil || sb.ID != "" {
		return sb, false, fail(op, at, err)
	}
	id := spec.ID()
	if at != id {
		return sb, true, nil // it was claimed, and is gone: what is made now has the session's own name
	}
	m := &making{d: d, spec: spec, id: id}
	if err := m.look(); err != nil {
		return sb, false, errs.E(op, errkind.Invalid, string(id), err)
	}
	if m.rec, err = d.note(op, id, recordOf(spec)); err != nil {
		return sb, d.claimed(spec) != id, err // it may have been claimed meanwhile
	}
	sb, err = m.run(ctx, m.table())
	return sb, false, fail(op, id, err)
}

// run does the steps. After an error nothing of the sandbox is left, or it is without a keeper.
func (m *making) run(ctx context.Context, t steps.Table) (driver.Sandbox, error) {
	d := m.d
	times, err := d.run.Run(ctx, t)
	m.closeState()
	if err = m.explain(err); err != nil {
		d.hold(m.id, nil) // what is left goes on without us
		if len(d.parts(m.id)) == 0 {
			d.forget(m.id)
		}
		return driver.Sandbox{}, err
	}
	sb := d.sandbox(m.id, m.rec)
	sb.Steps = times
	return sb, nil
}

// look judges the two files before anything is made.
func (m *making) look() error {
	var err error
	if m.shape, err = m.d.shapeOf(m.spec.Image, m.spec.Limits); err != nil {
		return err
	}
	st, err := os.Lstat(m.spec.DiskImage)
	if err != nil {
		return fmt.Errorf("disk image: %w", err)
	}
	if !st.Mode().IsRegular() || st.Size() == 0 || st.Size()%512 != 0 {
		return errors.New("the disk image is no file of whole sectors")
	}
	m.diskBytes = uint64(st.Size())
	return nil
}

func (m *making) closeState() {
	if m.state != nil {
		_ = m.state.Close()
		m.state = nil
	}
}

// explain adds what QEMU said about a failure.
func (m *making) explain(err error) error {
	if m.said == nil {
		return err
	}
	defer m.said.Close()
	if text := jail.Said(m.said); err != nil && text != "" {
		return fmt.Errorf("%w (QEMU: %s)", err, text)
	}
	return err
}

// running returns the sandbox if it runs, the zero one if nothing of it exists; what is half-made or
// has ended is removed first.
func (d *Driver) running(ctx context.Context, id ids.SandboxID) (driver.Sandbox, error) {
	d.mu.Lock()
	rec, known := d.known[id]
	d.mu.Unlock()
	if !known {
		if len(d.parts(id)) == 0 {
			return driver.Sandbox{}, nil
		}
		return driver.Sandbox{}, d.remove(ctx, id)
	}
	if d.state(ctx, id, rec) != driver.Running {
		return driver.Sandbox{}, d.remove(ctx, id)
	}
	return d.sandbox(id, rec), nil
}

func (d *Driver) sandbox(id ids.SandboxID, r record) driver.Sandbox {
	return driver.Sandbox{
		ID: id, Session: r.Session, Generation: r.Generation, Epoch: r.Epoch, Tier: driver.MicroVM,
		Channel: d.channel(id), Cgroup: d.cgroupOf(id), PID: r.QEMU.PID,
	}
}

// table lists the steps of a Create. The undo of all of them is that of the first: what removes a
// sandbox removes a part of one.
func (m *making) table() steps.Table {
	return steps.Table{
		{m.first("sandbox.record")},
		{{Name: "sandbox.cgroup", Do: m.makeCgroup}, {Name: "sandbox.template", Do: m.template}},
		{{Name: "sandbox.machine", Do: m.start}},
		{{Name: "sandbox.restore", Do: m.restore}},
		{{Name: "sandbox.personalise", Do: m.personalise}},
		{{Name: "sandbox.ready", Do: m.ready}},
	}
}

func (m *making) first(name string) steps.Step {
	return steps.Step{
		Name: name, Do: func(context.Context) error { return m.save() },
		Undo: func(ctx context.Context) error { return m.d.remove(ctx, m.id) },
	}
}

// save writes the record as it is now.
func (m *making) save() error {
	m.d.mu.Lock()
	m.d.known[m.id] = m.rec
	m.d.mu.Unlock()
	return m.rec.write(m.d.folder(m.id))
}

func (m *making) ready(context.Context) error {
	m.rec.Ready = true
	if err := m.save(); err != nil {
		return err
	}
	m.d.files.follow(m.id, m.rec.RunDir, m.files)
	return nil
}

func (m *making) makeCgroup(context.Context) error {
	return m.d.cgroup.Create(m.d.cgroupOf(m.id), m.d.limitsOf(m.shape.Memory, m.spec.Limits.CPUMillis))
}

// template finds or makes the template. Without one the machine boots.
func (m *making) template(ctx context.Context) error {
	if m.d.cfg.NoTemplates {
		return nil
	}
	var err error
	if m.tpl, err = m.d.templates.get(ctx, m.shape); err != nil && ctx.Err() == nil {
		m.tpl = nil
		return nil // it was logged when it failed
	}
	return err
}

// start starts the sandbox's QEMU: as a copy of the template that waits to be restored, or booting.
func (m *making) start(ctx context.Context) error {
	if m.rec.QEMU.Lives() {
		return nil
	}
	d := m.d
	listeners, err := listen(d.room(m.id))
	if err != nil {
		return err
	}
	b := &build{name: string(m.id), shape: m.shape}
	for _, f := range listeners {
		b.close = append(b.close, f)
	}
	if err := m.fill(b, listeners); err != nil {
		b.done()
		return err
	}
	if m.said != nil {
		_ = m.said.Close()
	}
	m.rec.QEMU, m.said, err = d.launch(ctx, b, m.rec.User, d.cgroupOf(m.id))
	if err != nil {
		return err
	}
	if err := m.save(); err != nil {
		return err
	}
	d.hold(m.id, newVM(string(m.id), d.room(m.id), m.rec.QEMU, d.news(m.id)))
	return nil
}

// fill is the whole command line.
func (m *making) fill(b *build, listeners map[string]*os.File) error {
	b.base(m.d.kernel)
	if m.tpl != nil {
		memory, state, err := m.d.templates.open(m.tpl)
		if err != nil {
			return fmt.Errorf("open template: %w", err)
		}
		b.close = append(b.close, memory)
		m.closeState()
		m.state = state
		b.memory(memory, false)
		b.add("-incoming", "defer")
	} else {
		b.memory(nil, false)
	}
	b.ports(listeners)
	root, err := b.open(m.spec.Image.Block, unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("root image: %w", err)
	}
	if m.warm {
		if err := b.warmDisks(root, m.blank); err != nil {
			return err
		}
	} else {
		disk, err := b.open(m.spec.DiskImage, unix.O_RDWR)
		if err != nil {
			return fmt.Errorf("disk image: %w", err)
		}
		b.disks(root, disk, m.spec.Limits)
	}
	if m.spec.Link != nil {
		if b.tap, err = m.spec.Link.OpenTap(); err != nil {
			return fmt.Errorf("open the sandbox's tap: %w", err)
		}
		b.close = append(b.close, b.tap)
	}
	b.network()
	return nil
}

// restore makes a copy of the template run, with the disk as large as it is.
func (m *making) restore(ctx context.Context) error {
	v := m.d.vmOf(m.id)
	if m.tpl == nil || v == nil || m.restored {
		return nil
	}
	if err := v.call(ctx, "migrate-set-capabilities", ignoreShared, nil); err != nil {
		return err
	}
	if err := v.move(ctx, "migrate-incoming", m.state); err != nil {
		return err
	}
	if err := v.migrated(ctx); err != nil {
		return err
	}
	if m.diskBytes != placeholderBytes { // which is what the template had
		if err := v.resize(ctx, m.diskBytes); err != nil {
			return err
		}
	}
	if err := v.call(ctx, "cont", nil, nil); err != nil {
		return err
	}
	m.restored = true
	return nil
}

// resize tells the guest's disk driver how large the disk is.
func (v *vm) resize(ctx context.Context, bytes uint64) error {
	return v.call(ctx, "block_resize", map[string]any{"node-name": nodeDisk, "size": bytes}, nil)
}
