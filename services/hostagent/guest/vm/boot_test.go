package vm_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/internal/image"
)

// run runs a shell command in the machine and returns what it wrote and its exit code.
func run(t *testing.T, c *hostend.Conn, command string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	s, err := c.StartExec(ctx, hostend.ExecSpec{Key: t.Name() + time.Now().String(), Argv: []string{"sh", "-c", command + " 2>&1"}})
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	defer s.Close()
	var out strings.Builder
	code := -1
	for {
		ev, err := s.Next(ctx)
		if err != nil {
			return out.String(), code
		}
		out.Write(ev.Data)
		if ev.Exit != nil && ev.Exit.Code != nil {
			code = *ev.Exit.Code
		}
	}
}

func TestBoot(t *testing.T) {
	k := needKit(t)
	m := k.boot(t, "")
	t.Logf("ready after %v: %+v", time.Since(m.started), m.ready)
	start := time.Now()
	a := m.become(personal(nil))
	t.Logf("personalised after %v: %+v", time.Since(start), a)
	c := m.attach()
	t.Logf("attached after %v", time.Since(start))
	for _, cmd := range []string{"id; hostname; env; ls -la / /dev /run/berth /proc/self/fd /proc/1; mount; cat /proc/self/status; ps; ulimit -a; date; cat /proc/sys/kernel/random/boot_id /etc/machine-id; cat /run/berth/session.json", "ls -la /; ls /sys /sys/class/* /dev/mqueue; ifconfig lo; dmesg|head -3"} {
		out, code := run(t, c, cmd)
		t.Logf("%d\n%s", code, out)
	}
}

var _ = vmwire.MaxLine

// testRoot is the busybox image as a device.
func testRoot(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "run", "github.com/berth-dev/berth/tools/image", "--busybox").Output()
	if err != nil {
		t.Skipf("no image for tests: %v", err)
	}
	s, err := image.Open(t.TempDir(), ociimage.LoadContext)
	if err != nil {
		t.Fatal(err)
	}
	img, err := s.Ensure(context.Background(), strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	f := filepath.Join(t.TempDir(), "root.erofs")
	if out, err := exec.Command("mkfs.erofs", "-zlz4", f, img.Lower).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	_ = os.Stderr
	return f
}
