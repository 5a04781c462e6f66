package containerd

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/cover"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// A sandbox of tier kata is two containers, as a pod of Kubernetes is: one that is the machine and does
// nothing in it but wait, and the session's, which joins it. Both have the image, an EROFS file, as their
// root, read-only, plugged into the machine as a block device. The session's disk is a second one, by
// Kata's file of direct-assigned volumes; the machine's kernel mounts it at diskPoint, and the guest
// agent, before anything else, lays an overlay over the image with it and makes that the root (package
// guest/podroot). So neither is a file system of the host, and no file server stands between. Its network is
// the one that its namespace has before the machine starts; no host of ours has run that yet.
const (
	podPrefix = "pod-" // no id of a container may begin with that of its machine
	diskPoint = "/run/berth-disk"
)

// directVolumes is where Kata looks for volumes that are block devices.
var directVolumes = "/run/kata-containers/shared/direct-volumes"

// Annotations that runtimes of pods read.
const (
	criType      = "io.kubernetes.cri.container-type"
	criSandbox   = "io.kubernetes.cri.sandbox-id"
	criCPUPeriod = "io.kubernetes.cri.sandbox-cpu-period"
	criCPUQuota  = "io.kubernetes.cri.sandbox-cpu-quota"
	criMemory    = "io.kubernetes.cri.sandbox-memory"
	cpuPeriod    = 100_000 // microseconds
)

func podOf(id ids.SandboxID) string { return podPrefix + string(id) }

// machine is what a making in tier kata has besides.
type machine struct {
	kata
	// disk and image are loop devices, held open until the machine has them.
	disk, image *os.File
}

func (v *machine) close() {
	for _, f := range []**os.File{&v.disk, &v.image} {
		if *f != nil {
			_ = (*f).Close()
			*f = nil
		}
	}
}

// machineTable lists the steps of a Create in tier kata.
func (m *making) machineTable(first steps.Step) steps.Table {
	begin := steps.Table{
		{first},
		{{Name: "sandbox.disk", Do: m.plug}},
		{{Name: "sandbox.cgroup", Do: m.makeCgroup}},
	}
	if m.spec.Link != nil {
		begin = append(begin, []steps.Step{{Name: "sandbox.network", Do: m.plugMachine}})
	}
	return append(begin, steps.Table{
		{{Name: "sandbox.machine", Do: m.startMachine}},
		{{Name: "sandbox.container", Do: m.container}},
		{{Name: "sandbox.create", Do: m.createTask}},
		{{Name: "sandbox.start", Do: m.startTask}},
	}...)
}

// volume is the path by which Kata knows the session's disk. It is short: Kata makes a file name of it.
func (d *Driver) volume(id ids.SandboxID) string { return filepath.Join(d.room(id), "disk") }

// volumeFolder is where Kata finds what a volume is.
func volumeFolder(volume string) string {
	return filepath.Join(directVolumes, base64.URLEncoding.EncodeToString([]byte(volume)))
}

// volumeInfo is the file mountInfo.json of a direct-assigned volume.
type volumeInfo struct {
	Type     string            `json:"volume-type"`
	Device   string            `json:"device"`
	FSType   string            `json:"fstype"`
	Metadata map[string]string `json:"metadata"`
	Options  []string          `json:"options"`
}

// plug binds image and disk to loop devices, which free themselves once the machine is gone, and tells
// Kata which one is the disk.
func (m *making) plug(context.Context) (err error) {
	v := m.machine
	v.close()
	if v.kata, err = m.findKata(); err != nil {
		return err
	}
	if v.image, err = loopdev.Attach(m.spec.Image.Block, true); err != nil {
		return fmt.Errorf("plug the image: %w", err)
	}
	if v.disk, err = loopdev.Attach(m.spec.DiskImage, false); err != nil {
		return fmt.Errorf("plug the disk: %w", err)
	}
	if m.d.cgroup.IO() {
		var st unix.Stat_t
		if err := unix.Fstat(int(v.disk.Fd()), &st); err != nil {
			return err
		}
		m.rec.Device = fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		m.d.remember(m.id, m.rec)
	}
	volume := m.d.volume(m.id)
	if err := os.MkdirAll(volume, 0o700); err != nil {
		return err
	}
	return writeVolume(volume, v.disk.Name())
}

func writeVolume(volume, device string) error {
	b, err := json.Marshal(volumeInfo{Type: "block", Device: device, FSType: "ext4", Metadata: map[string]string{}, Options: []string{"rw", "nodev"}})
	if err != nil {
		return err
	}
	dir := volumeFolder(volume)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("tell Kata of the disk: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, "mountInfo.json"), b, 0o600)
}

func (m *making) findKata() (kata, error) {
	k, why := findKata(m.d.cfg, "/")
	if why != "" {
		return k, errs.E("start machine", errkind.Unavailable, string(m.id), why)
	}
	return k, nil
}

// startMachine makes the container that is the machine, and starts it.
func (m *making) startMachine(ctx context.Context) error {
	spec, err := encode(m.machineSpec())
	if err != nil {
		return err
	}
	handler, opts, err := m.runtime()
	if err != nil {
		return err
	}
	pod := podOf(m.id)
	_, err = call(ctx, m.d.ctrd.containers.Create, &containersapi.CreateContainerRequest{Container: &containersapi.Container{
		ID: pod, Labels: map[string]string{labelHost: m.d.cfg.Cgroup, labelOwner: string(m.id)},
		Runtime: &containersapi.Container_Runtime{Name: handler, Options: opts}, Spec: spec,
	}})
	if err != nil && !isExists(err) {
		return err
	}
	_, err = call(context.WithoutCancel(ctx), m.d.ctrd.tasks.Create, &tasksapi.CreateTaskRequest{
		ContainerID: pod, Rootfs: m.rootfs(), RuntimePath: m.machine.shim})
	if err != nil && !isExists(err) {
		return fmt.Errorf("start machine: %w", err)
	}
	_, err = call(ctx, m.d.ctrd.tasks.Start, &tasksapi.StartRequest{ContainerID: pod})
	return errors.Join(err, ctx.Err())
}

// rootfs is the image as a block device, which Kata plugs into the machine instead of mounting it.
func (m *making) rootfs() []*types.Mount {
	if m.machine == nil {
		return nil
	}
	return []*types.Mount{{Type: "erofs", Source: m.machine.image.Name(), Options: []string{"ro"}}}
}

// kataOptions name the handler and its configuration.
func (m *making) kataOptions() (*runtimeoptions.Options, string) {
	return &runtimeoptions.Options{ConfigPath: m.machine.config}, m.machine.kata.runtime
}

// machineSpec is the container that waits: its limits are how big the machine is.
func (m *making) machineSpec() *specs.Spec {
	l := m.spec.Limits
	s := &specs.Spec{
		Version: specs.Version, Root: &specs.Root{Path: "rootfs", Readonly: true}, Hostname: m.hostname(),
		Process: &specs.Process{
			Args: []string{runPoint + "/" + guestName, "-wait"}, Cwd: "/", Env: []string{basePath}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{}, Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_CORE"}},
		},
		Mounts: m.mounts(),
		Annotations: map[string]string{
			criType: "sandbox", criSandbox: podOf(m.id),
			criCPUPeriod: strconv.Itoa(cpuPeriod), criCPUQuota: strconv.FormatInt(int64(l.CPUMillis)*cpuPeriod/1000, 10),
			criMemory: strconv.FormatUint(l.MemoryBytes, 10),
		},
		Linux: &specs.Linux{
			CgroupsPath: "/" + m.d.cgroupOf(m.id) + "/box",
			Namespaces:  m.machineNamespaces(),
			Resources:   &specs.LinuxResources{Devices: deviceRules()},
		},
	}
	return s
}

func (m *making) machineNamespaces() []specs.LinuxNamespace {
	net := specs.LinuxNamespace{Type: specs.NetworkNamespace}
	if m.spec.Link != nil {
		net.Path = m.d.netns(m.id)
	}
	return []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
		{Type: specs.MountNamespace}, net}
}

// guestSpec is the session's container, which is added to the machine. Its first process may mount until
// it has made the root; then it gives that up for good.
func (m *making) guestSpec() *specs.Spec {
	l, quota, period := m.spec.Limits, int64(m.spec.Limits.CPUMillis)*cpuPeriod/1000, uint64(cpuPeriod)
	memory, pids := int64(l.MemoryBytes), int64(l.PIDs)
	may := append([]string{"CAP_SYS_ADMIN"}, capabilities...)
	s := m.machineSpec()
	s.Annotations = map[string]string{criType: "container", criSandbox: podOf(m.id)}
	s.Process = m.process()
	s.Process.Args = append([]string{runPoint + "/" + guestName, "-root=" + diskPoint}, cover.Args(overFiles(m.spec.Over))...)
	s.Process.Args = append(append(s.Process.Args, "--"), m.spec.Init...)
	s.Process.NoNewPrivileges = false // the agent sets it itself
	s.Process.Capabilities = &specs.LinuxCapabilities{Bounding: may, Effective: may, Permitted: may}
	s.Mounts = append(s.Mounts, specs.Mount{Destination: diskPoint, Type: "bind", Source: m.d.volume(m.id), Options: []string{"rbind", "rw"}})
	s.Linux.CgroupsPath = "/" + m.d.cgroupOf(m.id) + "/session"
	s.Linux.Resources.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &memory}
	s.Linux.Resources.Pids = &specs.LinuxPids{Limit: &pids}
	return s
}

func (m *making) hostname() string {
	if m.spec.Hostname == "" {
		return "berth"
	}
	return m.spec.Hostname
}

// removeVolume takes away what tells Kata of a sandbox's disk. Idempotent.
func (d *Driver) removeVolume(id ids.SandboxID) error {
	return errors.Join(os.RemoveAll(volumeFolder(d.volume(id))), removeEmpty(d.volume(id)))
}

// isPod reports whether a container of containerd is a sandbox's machine.
func isPod(name string) (ids.SandboxID, bool) {
	rest, ok := strings.CutPrefix(name, podPrefix)
	return ids.SandboxID(rest), ok
}

// names are a sandbox's containers, in the order in which they go.
func (d *Driver) names(id ids.SandboxID) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; ok && r.Tier != driver.Kata {
		return []string{string(id)}
	}
	return []string{string(id), podOf(id)}
}
