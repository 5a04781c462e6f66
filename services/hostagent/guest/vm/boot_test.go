package vm_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// One machine from its first word to its end: what it is given, what it holds, what it hides.
func TestAMachineBecomesASessionsOnce(t *testing.T) {
	k := needKit(t)
	t.Logf("boot to ready: %v by the host's clock, %v by the machine's, of which %v", k.boot, time.Duration(k.ready.Uptime), k.ready.Steps)
	m := k.clone(t, "")
	becomesOnce(t, m)
}

// A machine that has rehearsed, twice even, is no other than one that has not, with a disk as well; a session's cannot.
func TestARehearsalLeavesNothing(t *testing.T) {
	k := needKit(t)
	for _, disk := range []string{"", newDisk(t, "32M")} {
		m := k.clone(t, disk)
		for range 2 {
			if d := m.call(vmwire.Call{Op: vmwire.OpRehearse}); !d.OK || d.Error != "" {
				t.Fatalf("a rehearsal: %+v", d)
			}
		}
		if disk == "" {
			becomesOnce(t, m)
			continue
		}
		if a := m.become(personal(func(p *vmwire.Personalise) { p.Disk = &vmwire.Disk{Create: true, Grow: true, Bytes: 32 << 20} })); a.Repaired {
			t.Error("the disk of the rehearsal was not unmounted")
		}
		if d := m.call(vmwire.Call{Op: vmwire.OpRehearse}); d.OK || d.Reason != vmwire.ReasonInvalid {
			t.Errorf("a session's machine rehearses: %+v", d)
		}
		if got := must(t, m.attach(), "ls /proc | grep -c '^[0-9]'; find /run /tmp"); got != "4\n/run\n/run/berth\n/run/berth/session.json\n/run/berth/guest\n/tmp" {
			t.Errorf("something is left: %q", got)
		}
	}
}

func becomesOnce(t *testing.T, m *machine) {
	t.Helper()
	if d := m.call(vmwire.Call{Op: vmwire.OpFreeze}); d.OK || d.Reason != vmwire.ReasonInvalid {
		t.Errorf("a call to a machine that is nobody's: %+v", d)
	}
	if a := m.personalise(personal(func(p *vmwire.Personalise) { p.Version = 99 })); a.OK || a.Reason != vmwire.ReasonVersion {
		t.Errorf("an unknown version: %+v", a)
	}
	start := time.Now()
	p := personal(nil)
	a := m.become(p)
	c := m.attach()
	t.Logf("personalised and attached after %v: %v", time.Since(start), a.Steps)
	if got := strings.Join(a.Enforced, " "); got != "pids memory open_files" {
		t.Errorf("enforced: %s", got)
	}
	if again := m.personalise(p); !again.OK || again.ID != a.ID {
		t.Errorf("the same request again: %+v", again)
	}
	if other := m.personalise(personal(nil)); other.OK || other.Reason != vmwire.ReasonInvalid {
		t.Errorf("another request: %+v", other)
	}
	if _, err := m.control.Write([]byte("no json\n{\"type\":\"of the future\"}\n")); err != nil {
		t.Fatal(err)
	}
	for command, want := range map[string]string{
		"hostname":                          "box",
		"cat /run/berth/session.json":       `{"a":1}`,
		"id -u":                             "0",
		"ulimit -n":                         "512",
		"echo x > /etc/new && cat /etc/new": "x",
		"grep CapEff /proc/self/status":     "CapEff:\t00000000800405fb",
		"grep CapBnd /proc/self/status":     "CapBnd:\t00000000800405fb",
		"grep NoNewPrivs /proc/self/status": "NoNewPrivs:\t1",
		"ls /dev":                           "fd\nfull\nmqueue\nnull\nptmx\npts\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero",
		"ls /sys/class/block /sys/class/virtio-ports | grep -v :": "",
		"cat /proc/self/cgroup":                                   "0::/session",
		"df -k /tmp | tail -1 | awk '{print $2}'":                 "65536",
	} {
		if got, _ := run(t, c, command); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
	for _, command := range []string{
		"mount -t tmpfs x /mnt", "mknod /tmp/vda b 254 0", "mknod /tmp/mem c 1 1", "echo 1 > /proc/sys/kernel/panic", "echo b > /proc/sysrq-trigger",
		"echo x > /run/berth/session.json", "touch /run/berth/new", "date -s 2001-01-01; [ $(date +%Y) = 2001 ]", "hostname other", "test -n \"$(head -c 1 /proc/kcore)\"", "cat /proc/1/environ",
		"ls /proc/1/root/", "unshare -U true", "unshare -m true", "readlink /proc/1/fd/7", "insmod /etc/new", "dmesg", "ifconfig lo down",
		"echo 1 > /sys/power/state", "chroot /proc/1/root true", "reboot -f", "nice -n -5 true", "swapon /etc/new",
	} {
		if out, code := run(t, c, command); code == 0 {
			t.Errorf("%s: allowed: %s", command, out)
		}
	}
	if d := m.call(vmwire.Call{Op: vmwire.OpFiles, Files: map[string]vmwire.File{"late": {Data: []byte("later")}}}); !d.OK {
		t.Errorf("files: %+v", d)
	}
	if got := must(t, c, "cat /run/berth/late; stat -c %a /run/berth/late"); got != "later444" {
		t.Errorf("a file that came later: %q", got)
	}
	if d := m.call(vmwire.Call{Op: vmwire.OpOff}); !d.OK {
		t.Errorf("off: %+v", d)
	}
	m.wait()
}

// Clones of one memory would draw the same random numbers and live in the past.
func TestClonesDifferAndKnowTheTime(t *testing.T) {
	k := needKit(t)
	seen := map[string]string{}
	for i := range 2 {
		m := k.clone(t, "")
		shift := time.Duration(i+1) * 1000 * time.Hour
		m.become(personal(func(p *vmwire.Personalise) { p.Time = time.Now().Add(shift).UnixNano() }))
		c := m.attach()
		for _, command := range []string{
			"head -c 32 /dev/urandom | md5sum", "cat /proc/sys/kernel/random/uuid", "cat /proc/sys/kernel/random/boot_id", "mktemp -u",
			"cat /etc/machine-id",
		} {
			got := must(t, c, "[ -e /etc/machine-id ] || echo -n > /tmp/x; "+command+" 2>/dev/null || cat /proc/sys/kernel/random/uuid")
			if other, ok := seen[got]; ok {
				t.Errorf("%s gives %s, as %s did", command, got, other)
			}
			seen[got] = command
		}
		unix, err := strconv.ParseInt(must(t, c, "date +%s"), 10, 64)
		if off := time.Since(time.Unix(unix, 0)) + shift; err != nil || off < -2*time.Second || off > limit {
			t.Errorf("its clock is off by %v, %v", off, err)
		}
		if m.hostGone(c) {
			t.Error("the machine ended with its host's connection")
		}
		m.stop()
	}
}

// A limit that refuses names itself, to a host that listens and to one that comes later; the end as well.
func TestLimitsAreHeldAndTold(t *testing.T) {
	k := needKit(t)
	m := k.clone(t, "")
	m.become(personal(func(p *vmwire.Personalise) { p.Limits.PIDs = 30; p.Limits.Memory = 64 << 20 }))
	c := m.attach()
	// The shell ends at the first fork that is refused.
	if out, _ := run(t, c, "for i in $(seq 60); do sleep 1 >/dev/null 2>&1 & done"); !strings.Contains(out, "fork") {
		t.Errorf("sixty processes under a limit of thirty: %s", out)
	}
	m.idle(c)
	if out, code := run(t, c, "dd if=/dev/zero of=/dev/null bs=90M count=1"); code == 0 {
		t.Errorf("90 MB under a limit of 64: %d %s", code, out)
	}
	if got := must(t, c, "echo still here"); got != "still here" {
		t.Errorf("after that: %q", got)
	}
	m.expect(vmwire.EventPIDs)
	m.expect(vmwire.EventOOM)
	_ = c.Close()
	m.call(vmwire.Call{Op: vmwire.OpFiles})
	record := m.monitor("ringbuf_read events 4096")
	for _, kind := range []vmwire.EventKind{vmwire.EventOOM, vmwire.EventPIDs} {
		if !strings.Contains(record, `"kind":"`+string(kind)+`"`) {
			t.Errorf("no %s in the record: %s", kind, record)
		}
	}
}

// An image's own first process gets the channel as its standard streams, with no end while no host is
// there, and its exit is told.
func TestAnotherFirstProcess(t *testing.T) {
	k := needKit(t)
	m := k.clone(t, "")
	m.become(personal(func(p *vmwire.Personalise) {
		p.Init = vmwire.Texts([]string{"/bin/sh", "-c", `while read line; do [ "$line" = end ] && exit 7; echo "$FROM_HOST $line $$"; done; exit 9`})
	}))
	for _, word := range []string{"one", "two"} { // one host after the other
		conn := m.dial("channel")
		_ = conn.SetDeadline(time.Now().Add(limit))
		if _, err := conn.Write([]byte(word + "\n")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, err := conn.Read(b)
		if got := string(b[:n]); got != "yes "+word+" 1\n" {
			t.Fatalf("got %q, %v", got, err)
		}
		_ = conn.Close()
	}
	conn := m.dial("channel")
	if _, err := conn.Write([]byte("end\n")); err != nil {
		t.Fatal(err)
	}
	if e := m.expect(vmwire.EventExited); e.Code != 7 {
		t.Errorf("its exit code is %d", e.Code)
	}
	m.wait()
	m2 := k.clone(t, "")
	a := m2.personalise(personal(func(p *vmwire.Personalise) { p.Init = vmwire.Texts([]string{"/nowhere"}) }))
	if a.OK || a.Reason != vmwire.ReasonInit {
		t.Errorf("a first process that is not there: %+v", a)
	}
	m2.wait()
}
