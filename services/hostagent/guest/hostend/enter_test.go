package hostend_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

func TestASandboxThatIsNobodysDoesNothing(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{Enter: true})
	ctx := testContext(t)
	if !c.Waits() {
		t.Error("it does not say that it waits")
	}
	if _, err := c.Ping(ctx); err != nil {
		t.Errorf("ping: %v", err)
	}
	if _, err := c.StartExec(ctx, hostend.ExecSpec{Key: "k", Argv: []string{"true"}}); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("start: %v", err)
	}
	if _, err := c.Stats(ctx); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("stats: %v", err)
	}
	for _, folder := range []string{"", "/", "slot/root", "/slot/../root", "/slot/root/"} {
		if err := c.Enter(ctx, folder); !errors.Is(err, hostend.ErrInvalid) {
			t.Errorf("enter %q: %v", folder, err)
		}
	}
	if _, err := c.Stats(ctx); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("stats after refusals: %v", err)
	}
}

func TestASandboxWithARootEntersNoOther(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	if c.Waits() {
		t.Error("it says that it waits")
	}
	if err := c.Enter(testContext(t), t.TempDir()); !errors.Is(err, hostend.ErrUnsupported) {
		t.Errorf("enter: %v", err)
	}
}

// waitIn makes the world of a sandbox that is nobody's yet: a root with nothing in it, and a slot.
func waitIn(world string) error {
	root := world + "/skeleton"
	tmpfs := func(to string) error { return unix.Mount("tmpfs", root+to, "tmpfs", 0, "") }
	bind := func(from, to string) error {
		return errors.Join(os.MkdirAll(root+to, 0o755), unix.Mount(from, root+to, "", unix.MS_BIND|unix.MS_REC, ""))
	}
	return errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount(root, root, "", unix.MS_BIND, ""),
		unix.Mount("proc", root+"/proc", "proc", 0, ""), tmpfs("/run"), bind("/dev", "/dev"),
		bind(world+"/bin", "/run/guest"), bind(world+"/slot", "/slot"),
		unix.Chdir(root), unix.PivotRoot(".", "."), unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/"))
}

func TestAGuestEntersItsOwnersRootForEveryHostThatAsks(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: it builds the guest")
	}
	world := t.TempDir()
	for _, d := range []string{"skeleton/proc", "skeleton/run", "skeleton/dev", "slot/root/etc"} {
		if err := os.MkdirAll(filepath.Join(world, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(world+"/slot/root/etc/owner", []byte("somebody"), 0o644); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", world+"/bin/berth-guest", "github.com/berth-dev/berth/services/hostagent/guest/cmd/berth-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // with C in it, no program can give up the rights of all its threads
	if b, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest: %v: %s", err, b)
	}
	t.Setenv("BERTH_TEST_WORLD", world)
	g := startGuest(t)
	ctx := testContext(t)
	c := g.attach()
	instance := c.Guest().Instance
	if _, err := c.Stat(ctx, hostend.Path{Name: "/slot"}, false); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("a look before it entered: %v", err)
	}
	for range 2 { // the second host does not know whether the first one asked
		if err := c.Enter(ctx, "/slot/root"); err != nil {
			t.Fatal(err)
		}
		c.Close()
		c = g.attach()
	}
	if err := c.Enter(ctx, "/etc"); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("another root: %v", err)
	}
	if c.Guest().Instance != instance {
		t.Error("the guest is another one")
	}
	if _, err := c.Stat(ctx, hostend.Path{Name: "/etc/owner"}, false); err != nil {
		t.Errorf("the owner's file: %v", err)
	}
	if _, err := c.Stat(ctx, hostend.Path{Name: "/slot"}, false); !errors.Is(err, hostend.ErrNotFound) {
		t.Errorf("the slot: %v", err)
	}
	s, err := c.StartExec(ctx, hostend.ExecSpec{Key: "k", Argv: []string{"/run/guest/berth-guest", "-nonsense"}})
	if err != nil {
		t.Fatal(err)
	}
	collect(t, s).wantCode(t, 1)
}
