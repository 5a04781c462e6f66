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
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/initramfs"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// limit is what one wait of a test may take; an emulated machine on a busy host is slow.
const limit = 90 * time.Second

// kit is what machines of these tests are made of.
type kit struct{ kernel, initrd, root string }

// needKit skips, and says why, where machines cannot run.
func needKit(t *testing.T) kit {
	t.Helper()
	if testing.Short() {
		t.Skip("short: no virtual machines")
	}
	for _, program := range []string{"qemu-system-x86_64", "mkfs.erofs", "mkfs.ext4"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is missing: make setup", program)
		}
	}
	dir, err := locate.MicroVM()
	if err != nil {
		t.Skip(err)
	}
	tmp := t.TempDir()
	guest := filepath.Join(tmp, "berth-guest")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", guest, "../cmd/berth-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest: %v\n%s", err, out)
	}
	initrd, err := initramfs.Ensure(tmp, filepath.Join(dir, locate.Modules), guest)
	if err != nil {
		t.Fatal(err)
	}
	return kit{filepath.Join(dir, locate.VMLinux), initrd, testRoot(t)}
}

// machine is one that runs.
type machine struct {
	t       *testing.T
	cmd     *exec.Cmd
	console bytes.Buffer
	dir     string
	control net.Conn
	in      *vmwire.Reader
	ended   chan struct{}
	started time.Time
	ready   vmwire.Ready
	events  []vmwire.Event
}

// boot starts a machine with the disk, if it is not empty, up to its first word.
func (k kit) boot(t *testing.T, disk string) *machine {
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
		"-append", "console=hvc0 panic=-1 quiet loglevel=4 " + tscHint(),
		"-device", "virtio-serial-device,max_ports=4", "-chardev", "stdio,id=console", "-device", "virtconsole,chardev=console",
		"-chardev", "socket,id=control,server=on,wait=off,path=" + filepath.Join(dir, "control"),
		"-device", "virtserialport,chardev=control,name=" + vmwire.Control,
		"-chardev", "socket,id=channel,server=on,wait=off,path=" + filepath.Join(dir, "channel"),
		"-device", "virtserialport,chardev=channel,name=" + vmwire.Channel,
		"-device", "virtio-rng-device",
		"-drive", "if=none,id=root,format=raw,readonly=on,file=" + k.root, "-device", "virtio-blk-device,drive=root",
	}
	if disk != "" {
		args = append(args, "-drive", "if=none,id=disk,format=raw,discard=unmap,file="+disk, "-device", "virtio-blk-device,drive=disk")
	}
	m.cmd = exec.Command("qemu-system-x86_64", args...)
	m.cmd.Stdout, m.cmd.Stderr = &m.console, &m.console
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = m.cmd.Wait(); close(m.ended) }()
	m.control = m.dial("control")
	m.in = vmwire.NewReader(m.control)
	first := m.next()
	if first.Ready == nil || first.Ready.Nonce != "" || first.Ready.Personalised {
		t.Fatalf("the first word is %+v", first)
	}
	m.ready = *first.Ready
	return m
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
	_ = os.RemoveAll(m.dir)
	if m.t.Failed() {
		m.t.Logf("console:\n%s", m.console.String())
	}
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
