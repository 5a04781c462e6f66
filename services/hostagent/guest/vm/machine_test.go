package vm_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/initramfs"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/internal/image"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// limit is what one wait of a test may take; an emulated machine on a busy host is slow.
const limit = 90 * time.Second

// kit is what machines of these tests are made of, made once: booted once as well, with its memory in
// a file that all others start from.
type kit struct {
	dir, kernel, initrd, root, memory string
	ready                             vmwire.Ready
	boot                              time.Duration
}

var shared struct {
	once sync.Once
	kit  *kit
	skip string
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.kit != nil {
		_ = os.RemoveAll(shared.kit.dir)
	}
	os.Exit(code)
}

// needKit skips, and says why, where machines cannot run.
func needKit(t *testing.T) *kit {
	t.Helper()
	if testing.Short() {
		t.Skip("short: no virtual machines")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, as the machine's image does")
	}
	shared.once.Do(func() {
		for _, program := range []string{"qemu-system-x86_64", "mkfs.erofs", "mkfs.ext4"} {
			if _, err := exec.LookPath(program); err != nil {
				shared.skip = program + " is missing: make setup"
				return
			}
		}
		dir, err := locate.MicroVM()
		if err != nil {
			shared.skip = err.Error()
			return
		}
		if shared.kit, shared.err = makeKit(dir); shared.err == nil {
			shared.err = shared.kit.template(t)
		}
	})
	switch {
	case shared.skip != "":
		t.Skip(shared.skip)
	case shared.err != nil:
		t.Fatal(shared.err)
	case shared.kit.memory == "":
		t.Fatal("the first machine did not start, see the first test")
	}
	return shared.kit
}

func makeKit(kernel string) (*kit, error) {
	dir, err := os.MkdirTemp("", "vmkit")
	if err != nil {
		return nil, err
	}
	k := &kit{dir: dir, kernel: filepath.Join(kernel, locate.VMLinux)}
	guest := filepath.Join(dir, "berth-guest")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", guest, "../cmd/berth-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return k, fmt.Errorf("build the guest: %w\n%s", err, out)
	}
	if k.initrd, err = initramfs.Ensure(dir, filepath.Join(kernel, locate.Modules), guest); err != nil {
		return k, err
	}
	out, err := exec.Command("go", "run", "github.com/berth-dev/berth/tools/image", "--busybox").Output()
	if err != nil {
		return k, fmt.Errorf("make the image of the tests: %w", err)
	}
	store, err := image.Open(filepath.Join(dir, "images"), ociimage.LoadContext)
	if err != nil {
		return k, err
	}
	img, err := store.Ensure(context.Background(), strings.TrimSpace(string(out)))
	if err == nil {
		img, err = store.Block(context.Background(), img.Digest)
	}
	k.root = img.Block
	return k, err
}

// lower is the folder of the image.
func (k *kit) lower() string { return filepath.Join(filepath.Dir(k.root), "rootfs") }

// template boots the first machine and keeps its memory.
func (k *kit) template(t *testing.T) error {
	m := k.start(t, "")
	first := m.next()
	if first.Ready == nil || first.Ready.Nonce != "" || first.Ready.Personalised {
		return fmt.Errorf("the first word is %+v", first)
	}
	k.ready, k.boot = *first.Ready, time.Since(m.started)
	_ = m.control.Close()
	memory := filepath.Join(k.dir, "memory")
	m.monitor("stop")
	m.monitor("migrate_set_parameter max-bandwidth 100G")
	m.monitor("migrate \"exec:cat >" + memory + "\"")
	if out := m.monitor("info migrate"); !strings.Contains(out, "completed") {
		return fmt.Errorf("keep the memory: %s", out)
	}
	m.stop()
	k.memory = memory
	return nil
}

// clone starts a machine from the memory of the first one, with a disk if it is not empty. It waits
// to be personalised.
func (k *kit) clone(t *testing.T, disk string) *machine {
	t.Helper()
	m := k.start(t, disk)
	if disk != "" {
		m.resize(disk)
	}
	m.monitor("cont")
	m.send(vmwire.Message{Type: vmwire.TypeHello, Hello: &vmwire.Hello{Min: 1, Max: 1, Nonce: "n1"}})
	if r := m.next().Ready; r == nil || r.Nonce != "n1" || r.Personalised {
		t.Fatalf("the answer to hello is %+v", r)
	}
	return m
}

// machine is one that runs.
type machine struct {
	t       *testing.T
	cmd     *exec.Cmd
	console bytes.Buffer
	dir     string
	control net.Conn
	hmp     net.Conn
	in      *vmwire.Reader
	ended   chan struct{}
	started time.Time
	events  []vmwire.Event
}

// start starts QEMU, from the memory of the first machine if there is one already.
func (k *kit) start(t *testing.T, disk string) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, dir: dir, ended: make(chan struct{}), started: time.Now()}
	t.Cleanup(m.stop)
	args := []string{
		"-M", "microvm,accel=tcg,rtc=on,isa-serial=off,pcie=off,usb=off", "-cpu", "max", "-smp", "2", "-m", "384M",
		"-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-kernel", k.kernel, "-initrd", k.initrd,
		"-append", "console=hvc0 panic=-1 quiet loglevel=4 cryptomgr.notests " + tscHint(),
		"-monitor", "unix:" + filepath.Join(dir, "monitor") + ",server=on,wait=off",
		"-device", "virtio-serial-device,max_ports=5", "-chardev", "file,id=console,path=" + filepath.Join(dir, "console"),
		"-device", "virtconsole,chardev=console",
		"-chardev", "socket,id=control,server=on,wait=off,path=" + filepath.Join(dir, "control"),
		"-device", "virtserialport,chardev=control,name=" + vmwire.Control,
		"-chardev", "ringbuf,id=events,size=4096", "-device", "virtserialport,chardev=events,name=" + vmwire.Events,
		"-chardev", "socket,id=channel,server=on,wait=off,path=" + filepath.Join(dir, "channel"),
		"-device", "virtserialport,chardev=channel,name=" + vmwire.Channel,
		"-drive", "if=none,id=root,format=raw,readonly=on,file=" + k.root, "-device", "virtio-blk-device,drive=root",
		"-device", "virtio-blk-device,drive=disk",
	}
	if disk == "" {
		args = append(args, "-drive", "if=none,id=disk,driver=null-co,size=1M,read-zeroes=on")
	} else {
		args = append(args, "-drive", "if=none,id=disk,format=raw,discard=unmap,file="+disk)
	}
	if k.memory != "" {
		args = append(args, "-S", "-incoming", "exec:cat "+k.memory)
	}
	m.cmd = exec.Command("qemu-system-x86_64", args...)
	m.cmd.Stdout, m.cmd.Stderr = &m.console, &m.console
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = m.cmd.Wait(); close(m.ended) }()
	m.hmp = m.dial("monitor")
	m.prompt()
	m.control = m.dial("control")
	m.in = vmwire.NewReader(m.control)
	for k.memory != "" && strings.Contains(m.monitor("info status"), "inmigrate") {
		time.Sleep(5 * time.Millisecond) // QEMU tells nobody on this monitor
	}
	return m
}

// monitor gives QEMU a command and returns what it says.
func (m *machine) monitor(command string) string {
	m.t.Helper()
	if _, err := m.hmp.Write([]byte(command + "\n")); err != nil {
		m.fatalf("monitor: %v", err)
	}
	return m.prompt()
}

func (m *machine) prompt() string {
	m.t.Helper()
	_ = m.hmp.SetReadDeadline(time.Now().Add(limit))
	var out []byte
	for b := make([]byte, 4096); !bytes.HasSuffix(out, []byte("(qemu) ")); {
		n, err := m.hmp.Read(b)
		if err != nil {
			m.fatalf("monitor: %v", err)
		}
		out = append(out, b[:n]...)
	}
	return string(out)
}

// resize tells the machine the size of its disk's file.
func (m *machine) resize(disk string) {
	m.t.Helper()
	st, err := os.Stat(disk)
	if err != nil {
		m.t.Fatal(err)
	}
	if out := m.monitor(fmt.Sprintf("block_resize disk %dB", st.Size())); strings.Contains(out, "Error") {
		m.fatalf("resize: %s", out)
	}
}

// tscHint spares the kernel the calibration, which fails when it is emulated.
func tscHint() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		var mhz float64
		if n, _ := fmt.Sscanf(line, "cpu MHz : %f", &mhz); n == 1 {
			return fmt.Sprintf("tsc_early_khz=%d", int(mhz*1000))
		}
	}
	return ""
}

func (m *machine) stop() {
	if m.control != nil {
		_ = m.control.Close()
	}
	if m.cmd.Process != nil {
		_ = m.cmd.Process.Kill()
		<-m.ended
	}
	if m.t.Failed() {
		console, _ := os.ReadFile(filepath.Join(m.dir, "console"))
		m.t.Logf("QEMU: %s\nconsole:\n%s", m.console.String(), console)
	}
	_ = os.RemoveAll(m.dir)
}

func (m *machine) fatalf(format string, args ...any) {
	m.t.Helper()
	m.t.Fatalf(format, args...)
}

func (m *machine) dial(name string) net.Conn {
	m.t.Helper()
	path := filepath.Join(m.dir, name)
	for deadline := time.Now().Add(limit); ; {
		conn, err := net.Dial("unix", path)
		if err == nil {
			return conn
		}
		select {
		case <-m.ended:
			m.fatalf("QEMU ended: %v", m.cmd.ProcessState)
		case <-time.After(5 * time.Millisecond): // for QEMU to make its socket
		}
		if time.Now().After(deadline) {
			m.fatalf("%s: %v", name, err)
		}
	}
}

// next is the next message that is no event.
func (m *machine) next() vmwire.Message {
	m.t.Helper()
	_ = m.control.SetReadDeadline(time.Now().Add(limit))
	for {
		msg, err := m.in.Next()
		if err != nil {
			m.fatalf("control port: %v", err)
		}
		if msg.Event == nil {
			return msg
		}
		m.events = append(m.events, *msg.Event)
	}
}

func (m *machine) send(msg vmwire.Message) {
	m.t.Helper()
	line, err := vmwire.Encode(msg)
	if err == nil {
		_, err = m.control.Write(line)
	}
	if err != nil {
		m.fatalf("send %s: %v", msg.Type, err)
	}
}

// personal is a request with all that every machine needs.
func personal(change func(*vmwire.Personalise)) *vmwire.Personalise {
	p := &vmwire.Personalise{
		Version: vmwire.MaxVersion, ID: rand.Text(), Hostname: "box", Time: time.Now().UnixNano(), Seed: make([]byte, 64),
		Limits: vmwire.Limits{PIDs: 200, OpenFiles: 512, Memory: 128 << 20},
		Env:    vmwire.Texts([]string{"FROM_HOST=yes"}),
		Files:  map[string]vmwire.File{"session.json": {Data: []byte(`{"a":1}`)}},
	}
	_, _ = rand.Read(p.Seed)
	if change != nil {
		change(p)
	}
	return p
}

func (m *machine) personalise(p *vmwire.Personalise) vmwire.Answer {
	m.t.Helper()
	m.send(vmwire.Message{Type: vmwire.TypePersonalise, Personalise: p})
	msg := m.next()
	if msg.Answer == nil || msg.Answer.ID != p.ID {
		m.fatalf("the answer is %+v", msg)
	}
	return *msg.Answer
}

// become personalises and must succeed.
func (m *machine) become(p *vmwire.Personalise) vmwire.Answer {
	m.t.Helper()
	a := m.personalise(p)
	if !a.OK {
		m.fatalf("not personalised: %s: %s", a.Reason, a.Error)
	}
	return a
}

func (m *machine) call(c vmwire.Call) vmwire.Done {
	m.t.Helper()
	c.ID = rand.Text()
	m.send(vmwire.Message{Type: vmwire.TypeCall, Call: &c})
	msg := m.next()
	if msg.Done == nil || msg.Done.ID != c.ID {
		m.fatalf("the answer is %+v", msg)
	}
	return *msg.Done
}

// expect waits for an event.
func (m *machine) expect(kind vmwire.EventKind) vmwire.Event {
	m.t.Helper()
	for _, e := range m.events {
		if e.Kind == kind {
			return e
		}
	}
	_ = m.control.SetReadDeadline(time.Now().Add(limit))
	for {
		msg, err := m.in.Next()
		if err != nil {
			m.fatalf("no event %s: %v", kind, err)
		}
		if msg.Event != nil && msg.Event.Kind == kind {
			return *msg.Event
		}
	}
}

// idle waits until the session runs nothing.
func (m *machine) idle(c *hostend.Conn) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for {
		st, err := c.Stats(ctx)
		if err != nil {
			m.fatalf("stats: %v", err)
		}
		if st.Processes == 0 {
			return
		}
	}
}

// hostGone ends this host's connections; it reports whether the machine does not answer the next one.
func (m *machine) hostGone(c *hostend.Conn) bool {
	m.t.Helper()
	_ = c.Close()
	_ = m.control.Close()
	m.control = m.dial("control")
	m.in = vmwire.NewReader(m.control)
	m.send(vmwire.Message{Type: vmwire.TypeHello, Hello: &vmwire.Hello{Min: 1, Max: 1, Nonce: "n2"}})
	r := m.next().Ready
	return r == nil || r.Nonce != "n2" || !r.Personalised || must(m.t, m.attach(), "echo ok") != "ok"
}

// attach opens the guest protocol.
func (m *machine) attach() *hostend.Conn {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	ch, err := hostend.OpenChannel(ctx, "", "", filepath.Join(m.dir, "channel"))
	if err != nil {
		m.fatalf("%v", err)
	}
	conn, err := hostend.Attach(ctx, ch, ch, hostend.Options{})
	if err != nil {
		m.fatalf("attach: %v", err)
	}
	m.t.Cleanup(func() { _ = conn.Close(); _ = ch.Close() })
	return conn
}

// wait waits until the machine has powered off.
func (m *machine) wait() {
	m.t.Helper()
	select {
	case <-m.ended:
	case <-time.After(limit):
		m.fatalf("the machine did not power off")
	}
}

// run runs a shell command in the machine and returns what it wrote and its exit code.
func run(t *testing.T, c *hostend.Conn, command string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	s, err := c.StartExec(ctx, hostend.ExecSpec{Key: rand.Text(), Argv: []string{"sh", "-c", "exec 2>&1\n" + command}})
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	defer s.Close()
	var out strings.Builder
	code := -1
	for {
		ev, err := s.Next(ctx)
		if err != nil {
			return strings.TrimSpace(out.String()), code
		}
		out.Write(ev.Data)
		if ev.Exit != nil && ev.Exit.Code != nil {
			code = *ev.Exit.Code
		}
	}
}

// must runs a command that has to succeed.
func must(t *testing.T, c *hostend.Conn, command string) string {
	t.Helper()
	out, code := run(t, c, command)
	if code != 0 {
		t.Fatalf("%s: exit %d: %s", command, code, out)
	}
	return out
}
