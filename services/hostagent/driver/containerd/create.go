package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/idroot"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Labels of containers in containerd.
const (
	labelHost  = "berth.host" // the driver's cgroup parent: its name on this machine
	labelOwner = "berth.sandbox"
)

// Runtime handlers of the shims.
const (
	handlerRunc      = "io.containerd.berthrunc.v1"
	handlerRunsc     = "io.containerd.berthrunsc.v1"
	runscOptionsType = "io.containerd.runsc.v1.options"
	specType         = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
)

// making is one Create.
type making struct {
	d     *Driver
	spec  driver.Spec
	id    ids.SandboxID
	rec   record
	space *idroot.Space // tier container
	pid   uint32
	// linked: the guest agent lies in the run folder itself and needs no mount of its own.
	linked bool
	// machine: tier kata.
	machine *machine
	// warm: it is prepared and nobody's yet.
	warm warmTier
	// plugged: the link is in its place.
	plugged bool
}

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	const op = "create sandbox"
	if err := spec.Check(d.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	if most := mostFiles(); spec.Limits.OpenFiles > most { // a smaller one would not be what was promised
		return driver.Sandbox{}, errs.Errorf(op, errkind.Unimplemented, "a process may have %d files open on this host, not %d", most, spec.Limits.OpenFiles)
	}
	for {
		if sb, again, err := d.create(ctx, spec); !again {
			return sb, err
		}
	}
}

// create is one try: again, if a warm sandbox was claimed for the same epoch in the middle of it.
func (d *Driver) create(ctx context.Context, spec driver.Spec) (sb driver.Sandbox, again bool, err error) {
	const op = "create sandbox"
	if sb, err = d.claimed(ctx, spec); err != nil || sb.ID != "" {
		return sb, false, err
	}
	id := spec.ID()
	defer d.lock(id)()
	if sb, err = d.running(ctx, id); err != nil || sb.ID != "" {
		return sb, false, fail(op, id, err)
	}
	rec, err := d.claim(spec)
	if err != nil {
		return sb, d.claimedID(spec) != "", err
	}
	m := &making{d: d, spec: spec, id: id, rec: rec}
	if spec.Tier == driver.Kata {
		m.machine = &machine{}
		defer m.machine.close()
	}
	defer m.closeSpace()
	times, err := d.run.Run(ctx, m.table())
	if err != nil {
		if left := d.parts(id); len(left) == 0 {
			d.forget(id)
		}
		return sb, false, fail(op, id, err)
	}
	d.sawRunning(id, int(m.pid))
	sb = d.sandbox(id, rec)
	sb.PID, sb.Steps = int(m.pid), times
	return sb, false, nil
}

// running returns the sandbox if it runs, the zero one if nothing of it exists; what is half-made
// or has exited is removed first.
func (d *Driver) running(ctx context.Context, id ids.SandboxID) (driver.Sandbox, error) {
	d.mu.Lock()
	rec, known := d.known[id]
	d.mu.Unlock()
	if !known {
		if _, err := os.Lstat(d.folder(id)); err != nil {
			return driver.Sandbox{}, nil
		}
		return driver.Sandbox{}, d.remove(ctx, id)
	}
	pid, state, err := d.task(ctx, id)
	if err != nil {
		return driver.Sandbox{}, err
	}
	if d.shown(id, rec, state) != driver.Running {
		return driver.Sandbox{}, d.remove(ctx, id)
	}
	sb := d.sandbox(id, rec)
	sb.PID = pid
	return sb, nil
}

func (d *Driver) sandbox(id ids.SandboxID, r record) driver.Sandbox {
	sb := driver.Sandbox{
		ID: id, Session: r.Session, Generation: r.Generation, Epoch: r.Epoch, Tier: r.Tier,
		Channel: d.channel(id), Cgroup: d.cgroupOf(id),
	}
	if tier, ok := warmTiers[r.Tier]; ok && r.Bound {
		sb.Enter = tier.enter()
	}
	return sb
}

// table lists the steps of a Create. The undo of all of them is that of the first: what removes a
// sandbox removes a part of one.
func (m *making) table() steps.Table {
	d := m.d
	first := steps.Step{
		Name: "sandbox.record",
		Do:   m.begin,
		Undo: func(ctx context.Context) error { m.closeSpace(); return d.remove(ctx, m.id) },
	}
	if m.machine != nil {
		return m.machineTable(first)
	}
	begin := []steps.Step{first}
	if m.spec.Tier == driver.Container {
		begin = append(begin, steps.Step{Name: "sandbox.userns", Do: m.openSpace})
	}
	container := steps.Step{Name: "sandbox.container", Do: m.container}
	table := steps.Table{begin, {{Name: "sandbox.root", Do: m.mountRoot}, {Name: "sandbox.cgroup", Do: m.makeCgroup}}}
	if len(m.spec.Over) > 0 && m.spec.Tier == driver.GVisor && m.warm == nil { // it looks at the root
		table = append(table, []steps.Step{container})
	} else {
		table[1] = append([]steps.Step{container}, table[1]...)
	}
	table = append(table, []steps.Step{{Name: "sandbox.create", Do: m.createTask}})
	if before := m.before(); len(before) > 0 {
		table = append(table, before)
	}
	return append(table, []steps.Step{{Name: "sandbox.start", Do: m.startTask}})
}

func (m *making) openSpace(context.Context) error {
	if m.space != nil {
		return nil
	}
	var err error
	m.space, err = idroot.NewSpace(m.d.firstID(m.rec.Slot))
	return err
}

func (m *making) closeSpace() {
	if m.space != nil {
		m.space.Close()
	}
}

func (m *making) mountRoot(ctx context.Context) error {
	point := m.d.root(m.id)
	if is, err := mounts.IsMount(point); err != nil || is {
		return err
	}
	if err := os.MkdirAll(point, 0o700); err != nil {
		return err
	}
	if m.spec.Tier == driver.Container {
		owner := int(m.d.firstID(m.rec.Slot))
		if err := os.Chown(m.d.room(m.id), owner, owner); err != nil {
			return err
		}
	}
	if m.warm != nil {
		return m.warm.root(m)
	}
	if m.spec.Tier == driver.Container {
		return m.space.Mount(ctx, m.spec.Image.Lower, m.spec.Disk, point)
	}
	return idroot.MountPlain(m.spec.Image.Lower, m.spec.Disk, point)
}

func (m *making) begin(context.Context) (err error) {
	if m.warm == nil {
		if m.rec.Device, err = m.d.deviceOf(m.spec); err != nil {
			return err
		}
		m.d.remember(m.id, m.rec)
	}
	if err := m.rec.write(m.d.folder(m.id), m.d.channel(m.id)); err != nil {
		return err
	}
	return m.placeGuest()
}

// deviceOf is the block device of a session's disk, where its rate can be limited.
func (d *Driver) deviceOf(spec driver.Spec) (string, error) {
	if !d.cgroup.IO() || spec.Tier == driver.Kata {
		return "", nil
	}
	return cgroup.Device(spec.Disk)
}

// placeGuest links the guest agent's binary into the run folder; on another file system it makes an
// empty file to mount the binary on.
func (m *making) placeGuest() error {
	if m.spec.Guest == "" {
		return nil
	}
	place := filepath.Join(m.spec.RunDir, guestName)
	if err := removeEmpty(place); err != nil {
		return err
	}
	if os.Link(m.spec.Guest, place) == nil {
		m.linked = true
		return nil
	}
	m.linked = false
	f, err := os.OpenFile(place, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return fmt.Errorf("prepare run folder: %w", err)
	}
	return f.Close()
}

func (m *making) makeCgroup(context.Context) error {
	return m.d.cgroup.Create(m.d.cgroupOf(m.id), m.d.limits(m.rec, m.spec.Limits))
}

// container writes containerd's record of the sandbox.
func (m *making) container(ctx context.Context) error {
	oci := m.ociSpec
	if m.machine != nil {
		oci = m.guestSpec
	}
	over, err := m.coldOver()
	if err != nil {
		return err
	}
	s := oci()
	s.Mounts = append(s.Mounts, over...)
	spec, err := encode(s)
	if err != nil {
		return err
	}
	handler, opts, err := m.runtime()
	if err != nil {
		return err
	}
	_, err = call(ctx, m.d.ctrd.containers.Create, &containersapi.CreateContainerRequest{Container: &containersapi.Container{
		ID:      string(m.id),
		Labels:  map[string]string{labelHost: m.d.cfg.Cgroup, labelOwner: string(m.id)},
		Runtime: &containersapi.Container_Runtime{Name: handler, Options: opts},
		Spec:    spec,
	}})
	if isExists(err) {
		return nil
	}
	return err
}

func encode(s *specs.Spec) (*anypb.Any, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode spec: %w", err)
	}
	return &anypb.Any{TypeUrl: specType, Value: b}, nil
}

func (m *making) runtime() (string, *anypb.Any, error) {
	if m.spec.Tier == driver.GVisor {
		o, err := pack("runtimeoptions.v1.Options", &runtimeoptions.Options{TypeUrl: runscOptionsType, ConfigPath: m.d.runscConfig(m.warm != nil, m.spec.Link != nil)})
		return handlerRunsc, o, err
	}
	if m.machine != nil {
		opts, handler := m.kataOptions()
		o, err := pack("runtimeoptions.v1.Options", opts)
		return handler, o, err
	}
	owner := m.d.firstID(m.rec.Slot)
	o, err := pack("containerd.runc.v1.Options", &options.Options{
		BinaryName: m.d.bin(binRunc), Root: filepath.Join(m.d.cfg.State, "runc"), IoUid: owner, IoGid: owner,
		NoNewKeyring: true,
	})
	return handlerRunc, o, err
}

func pack(name string, m proto.Message) (*anypb.Any, error) {
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", name, err)
	}
	return &anypb.Any{TypeUrl: name, Value: b}, nil
}

func (m *making) createTask(ctx context.Context) error {
	ch := m.d.channel(m.id)
	shim := m.d.bin(binShimRunc)
	switch {
	case m.machine != nil:
		shim = m.machine.shim
	case m.spec.Tier == driver.GVisor:
		shim = m.d.bin(binShimRunsc)
	}
	// Not given up half-way: containerd would forget a shim that it has just started, and nobody ends it.
	r, err := call(context.WithoutCancel(ctx), m.d.ctrd.tasks.Create, &tasksapi.CreateTaskRequest{
		ContainerID: string(m.id), Stdin: ch.Stdin, Stdout: ch.Stdout, Stderr: os.DevNull, Rootfs: m.rootfs(), RuntimePath: shim,
	})
	if isExists(err) && m.pid == 0 { // an earlier try made it
		pid, _, err := m.d.task(ctx, m.id)
		m.pid = uint32(pid)
		return err
	}
	if isExists(err) {
		return nil
	}
	if err != nil {
		return err
	}
	m.pid = r.Pid
	return ctx.Err()
}

func (m *making) startTask(ctx context.Context) error {
	r, err := call(ctx, m.d.ctrd.tasks.Start, &tasksapi.StartRequest{ContainerID: string(m.id)})
	if err == nil {
		m.pid = r.Pid
		return nil
	}
	pid, state, terr := m.d.task(ctx, m.id)
	if terr == nil && state == driver.Running {
		m.pid = uint32(pid)
		return nil
	}
	return errors.Join(err, terr)
}

// writeRunscConfigs writes the options of every gVisor sandbox, in files for those that are prepared or not
// and have a link or not.
func (d *Driver) writeRunscConfigs() (err error) {
	for i := range 4 {
		err = errors.Join(err, d.writeRunscConfig(i&1 > 0, i&2 > 0))
	}
	return err
}

func (d *Driver) writeRunscConfig(warm, linked bool) error {
	flags := map[string]string{
		"platform": "systrap", "network": "none", "overlay2": "none", "host-uds": "none", "host-fifo": "none",
		"oci-seccomp": "true", "host-settings": "ignore", "file-access": "exclusive",
	}
	if linked { // what is in its namespace when it starts; without a link it has a loopback of its own
		flags["network"] = "sandbox"
	}
	if warm { // their root is mounted later, as a volume; all others are marked as shared one by one
		flags["file-access-mounts"] = "exclusive"
	}
	for k, v := range d.cfg.GVisor {
		flags[k] = v
	}
	text := fmt.Sprintf("binary_name = %q\nroot = %q\nlog_level = \"warning\"\n\n[runsc_config]\n",
		d.bin(binRunsc), filepath.Join(d.cfg.State, "runsc", "root"))
	for _, k := range sortedKeys(flags) {
		text += fmt.Sprintf("%q = %q\n", k, flags[k])
	}
	return os.WriteFile(d.runscConfig(warm, linked), []byte(text), 0o644)
}

// task asks containerd for the state of the sandbox's first process.
func (d *Driver) task(ctx context.Context, id ids.SandboxID) (int, driver.State, error) {
	if pid, ok := d.frozen(id); ok {
		return pid, driver.Running, nil
	}
	r, err := call(ctx, d.ctrd.tasks.Get, &tasksapi.GetRequest{ContainerID: string(id)})
	if isNotFound(err) {
		return 0, driver.Partial, nil
	}
	if err != nil {
		return 0, driver.Partial, errs.E("look at sandbox", kindOf(err), string(id), err)
	}
	if r.Process == nil {
		return 0, driver.Partial, errs.E("look at sandbox", errkind.Internal, string(id), "containerd knows the task but not its process")
	}
	pid, state := d.orUnread(id, r.Process)
	return pid, state, nil
}
