package wasm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

// enterTime bounds the answer of a first process.
const enterTime = 10 * time.Second

// first is the first process of a sandbox while it is being made.
type first struct {
	cmd  *exec.Cmd
	sock *os.File
}

// cgroupFolders are the folders of a cgroup in every hierarchy.
func (d *Driver) cgroupFolders(path string) []string {
	const root = "/sys/fs/cgroup"
	if d.cgroup.V2() {
		return []string{filepath.Join(root, path)}
	}
	dirs, _ := filepath.Glob(filepath.Join(root, "*", path))
	return dirs
}

// start starts the first process in namespaces of its own and puts it into its cgroup. It waits for
// its order and ends when whoever would give it does.
func (m *making) start(context.Context) error {
	if m.first != nil {
		return nil
	}
	f, err := m.d.startFirst(m)
	if err != nil {
		return err
	}
	m.first = f
	pid := f.cmd.Process.Pid
	if err := m.d.cgroup.Enter(m.d.cgroupOf(m.id)+"/box", pid); err != nil {
		return err
	}
	if _, m.rec.Began, err = process(pid); err != nil {
		return err
	}
	m.rec.PID = pid
	if err := m.save(); err != nil {
		return err
	}
	go m.d.collect(m.id, m.rec, f.cmd)
	return nil
}

// byDescriptor names a file for exec by the descriptor that the new process has of it.
func byDescriptor(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

func (d *Driver) startFirst(m *making) (*first, error) {
	ch := d.channel(m.id)
	var opened []*os.File
	defer func() {
		for _, f := range opened {
			_ = f.Close()
		}
	}()
	open := func(path string) (*os.File, error) {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil {
			opened = append(opened, f)
		}
		return f, err
	}
	// Each pipe is open in both directions: its end is never seen while the sandbox lives.
	in, err := open(ch.Stdin)
	if err != nil {
		return nil, err
	}
	out, err := open(ch.Stdout)
	if err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "order")
	opened = append(opened, theirs)
	program, err := os.Open(d.cfg.Program)
	if err != nil {
		_ = unix.Close(pair[0])
		return nil, err
	}
	opened = append(opened, program)
	limit := unix.NsecToTimeval(enterTime.Nanoseconds())
	_ = unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
	own := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(d.firstID(m.rec.Slot)), Size: idRange}}
	f := &first{sock: os.NewFile(uintptr(pair[0]), "order")}
	f.cmd = &exec.Cmd{
		Path: byDescriptor(order.SupervisorProgram), Args: m.supervisor(), Dir: "/", Env: []string{"GOGC=50"},
		Stdin: in, Stdout: out, ExtraFiles: []*os.File{theirs, program},
		SysProcAttr: &syscall.SysProcAttr{
			Setsid: true,
			Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC |
				unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
			UidMappings: own, GidMappings: own, GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{},
		},
	}
	if err := f.cmd.Start(); err != nil {
		_ = f.sock.Close()
		return nil, fmt.Errorf("start first process: %w", err)
	}
	return f, nil
}

// supervisor is the command of the first process.
func (m *making) supervisor() []string {
	if m.warm {
		return []string{order.Supervisor, order.Waits}
	}
	return []string{order.Supervisor}
}

// letGo closes what its maker alone needs; a first process without its order ends by that.
func (m *making) letGo() {
	if m.first != nil {
		_ = m.first.sock.Close()
		if m.rec.PID == 0 { // nobody collects it
			_ = m.first.cmd.Process.Kill()
			_ = m.first.cmd.Wait()
		}
	}
}

// enter gives the first process its parts and waits until it stands.
func (m *making) enter(context.Context) error {
	o := m.order()
	var parts []*os.File
	defer func() {
		for _, f := range parts {
			_ = f.Close()
		}
	}()
	add := func(f *os.File, err error) error {
		if err == nil {
			parts = append(parts, f)
		}
		return err
	}
	err := m.addMounts(add)
	if err == nil {
		err = add(os.OpenFile(filepath.Join(m.d.folder(m.id), statusFile), os.O_WRONLY, 0))
	}
	if err == nil && o.JS {
		err = add(os.Open(m.d.cfg.JS))
	}
	if err != nil {
		return err
	}
	for _, c := range m.d.code.ready(m.wanted()) {
		f, err := copyMount(m.d.code.folder(c.Hash), unix.MOUNT_ATTR_RDONLY, nil)
		if err != nil {
			return err
		}
		parts, o.Compiled = append(parts, f), append(o.Compiled, c)
	}
	return m.first.ask(o, parts)
}

// wanted are the modules that this sandbox is likely to run.
func (m *making) wanted() []string {
	paths := imageModules(m.spec.Image.Lower)
	if m.d.cfg.JS != "" {
		paths = append(paths, m.d.cfg.JS)
	}
	for _, p := range paths {
		m.d.code.want(p)
	}
	return paths
}

func (m *making) order() order.Sandbox {
	l := m.spec.Limits
	files := l.OpenFiles
	if files == 0 {
		files = m.d.cfg.OpenFiles
	}
	o := order.Sandbox{
		Hostname: m.spec.Hostname, Init: m.spec.Init, JS: m.d.cfg.JS != "",
		Limits: order.Limits{
			MemoryBytes: l.MemoryBytes, Time: m.d.cfg.CallTime, OutputBytes: m.d.cfg.CallOutput, OpenFiles: files, Ahead: m.d.cfg.Ahead,
		},
	}
	if o.Hostname == "" {
		o.Hostname = "berth"
	}
	if len(o.Init) > 0 {
		o.Env = append(append(o.Env, m.spec.Image.Env...), m.spec.Env...)
	}
	return o
}

// addMounts adds what the root is made of, in the order of package order.
func (m *making) addMounts(add func(*os.File, error) error) error {
	user, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", m.rec.PID))
	if err != nil {
		return fmt.Errorf("open user namespace: %w", err)
	}
	defer func() { _ = user.Close() }()
	const plain = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	for _, p := range []struct {
		path  string
		attr  uint64
		owner *os.File
	}{
		{m.spec.Image.Lower, plain | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_RDONLY, user},
		{m.spec.Disk, plain | unix.MOUNT_ATTR_NOEXEC, user},
		{m.spec.RunDir, plain | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_RDONLY, nil},
		{"/dev/null", unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC, nil},
		{m.d.cfg.Program, plain | unix.MOUNT_ATTR_RDONLY, nil},
	} {
		if err := add(copyMount(p.path, p.attr, p.owner)); err != nil {
			return err
		}
	}
	return nil
}

// copyMount returns a copy of the mount at path that is attached nowhere, with ids as owner has them.
func copyMount(path string, attr uint64, owner *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, fmt.Errorf("copy mount %s: %w", filepath.Base(path), err)
	}
	f := os.NewFile(uintptr(fd), path)
	set := unix.MountAttr{Attr_set: attr, Propagation: unix.MS_PRIVATE}
	if owner != nil {
		set.Attr_set |= unix.MOUNT_ATTR_IDMAP
		set.Userns_fd = uint64(owner.Fd())
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &set); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("shape mount %s: %w", filepath.Base(path), err)
	}
	return f, nil
}

// ask sends the order and reads the answer.
func (f *first) ask(o order.Sandbox, parts []*os.File) error {
	b, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("encode order: %w", err)
	}
	if len(b) > order.MaxMessage {
		return fmt.Errorf("arguments and environment have %d bytes; %d are possible", len(b), order.MaxMessage)
	}
	fds := make([]int, len(parts))
	for i, p := range parts {
		fds[i] = int(p.Fd())
	}
	sock := int(f.sock.Fd())
	_ = unix.SetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_SNDBUF, 2*order.MaxMessage)
	if err := unix.Sendmsg(sock, b, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("ask first process: %w", err)
	}
	return f.says(order.Ready)
}

// says waits until the first process says this word.
func (f *first) says(word string) error {
	buf := make([]byte, 4096)
	n, err := unix.Read(int(f.sock.Fd()), buf)
	for err == unix.EINTR { // a call with a time limit is not begun again by the kernel
		n, err = unix.Read(int(f.sock.Fd()), buf)
	}
	switch {
	case err != nil:
		return fmt.Errorf("wait for first process: %w", err)
	case n == 0:
		return errors.New("the first process ended before its sandbox stood")
	case string(buf[:n]) != word:
		return errors.New("first process: " + strings.ToValidUTF8(string(buf[:n]), "?"))
	}
	return nil
}
