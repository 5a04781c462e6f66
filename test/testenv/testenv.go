// Package testenv runs the real Berth for a test: `berth up` as a process of
// its own, or a cluster of processes in network namespaces, in a private
// folder, with the pinned runtimes and the default image.
// It guarantees that what the test started is stopped, that the host is as it
// was, and that what it wrote holds no token, grant or key, and fails the test
// otherwise.
package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/testsize"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/leaks"
	"github.com/berth-dev/berth/tools/berth/upproc"
	"github.com/berth-dev/berth/tools/image/builder"
	"github.com/berth-dev/berth/tools/residue"
	"github.com/berth-dev/berth/tools/runtimes/cache"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// Env is a running installation. Kill, PID, URL and the like are those of the
// `berth up` process: in a cluster the supervisor's, and Kill ends every
// member with it.
type Env struct {
	t    testing.TB
	Bin  string
	Dir  string
	Args []string
	// Many tells a cluster of processes; Member, Cut and what else handles
	// members and links works only there, and HostDir, PoolDir, PoolFile and
	// LosePool only in one process.
	Many bool
	// marks of this installation, kept after its process has ended.
	marks []string
	// gone are members that were removed for good.
	gone map[string]bool
	// of is the installation that this one stands for in a subtest.
	of *Env
	*upproc.Process
}

// Start starts it, or skips the test with the reason why this machine cannot.
// args are further arguments of `berth up`.
func Start(t *testing.T, args ...string) *Env {
	t.Helper()
	e := Prepare(t, args...)
	e.Up()
	return e
}

// AllTiers has an installation offer every tier that comes with Berth. Without it a test's has container
// and gvisor alone: no test pays for machines and modules that it does not use.
var AllTiers = []string{"--tiers", "container,gvisor,microvm,wasm"}

// Tiers has an installation offer every tier that the scenarios of this run go through: all in make test-long,
// those without a VM in make test. A VM is emulated on most machines that tests run on, and takes a
// processor for seconds at each start; ForTier skips its part of a scenario by name.
func Tiers() []string {
	if testsize.Long() {
		return AllTiers
	}
	return []string{"--tiers", "container,gvisor,wasm"}
}

// ForTier skips the part of a scenario that runs in a VM, unless this is a run at full size.
func ForTier(t *testing.T, tier string) {
	t.Helper()
	if tier == "microvm" {
		testsize.NeedLong(t, "the same scenario runs in the other tiers here, and the tier's own conformance suite in make test")
	}
}

// For is the same installation for a subtest: what fails, or is registered for the
// end, is the subtest's. When the subtest starts it again, that holds for e too.
func (e *Env) For(t *testing.T) *Env {
	lent := *e
	lent.t, lent.of = t, e
	return &lent
}

// Prepare makes the folder without starting anything.
func Prepare(t *testing.T, args ...string) *Env {
	t.Helper()
	e := prepare(t, args...)
	t.Cleanup(e.end)
	return e
}

func prepare(t *testing.T, args ...string) *Env {
	t.Helper()
	need(t)
	dir, err := os.MkdirTemp("", "berth-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"--image-store", imageStore(t)}, args...)
	if !upproc.Many(args) && !slices.Contains(args, "--tiers") {
		args = append(args, "--tiers", "container,gvisor")
	}
	return &Env{t: t, Bin: Bin(t), Dir: dir, Args: args, Many: upproc.Many(args), marks: []string{dir}, gone: map[string]bool{}}
}

// end stops the installation, reports what it left on the host and removes its directory.
func (e *Env) end() {
	e.Down()
	if left := residue.Take().About(e.marks...); !left.Empty() {
		e.t.Errorf("left on the host: %s", left)
	}
	leaks.CheckInstallation(e.t, e.Dir)
	if e.t.Failed() {
		e.logTails()
	}
	if err := os.RemoveAll(e.Dir); err != nil {
		e.t.Errorf("remove the state folder: %v", err)
	}
}

// logTails prints the end of what every process wrote.
func (e *Env) logTails() {
	members, _ := filepath.Glob(filepath.Join(e.Dir, "log", "*.log"))
	for _, file := range append([]string{filepath.Join(e.Dir, "up.log")}, members...) {
		most := 60
		if e.Many {
			most = 20
		}
		raw, _ := os.ReadFile(file)
		lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
		e.t.Logf("end of %s:\n%s", filepath.Base(file), strings.Join(lines[max(0, len(lines)-most):], "\n"))
	}
}

// stores is the image store of this test process, and the lock that keeps it its own.
var stores struct {
	sync.Mutex
	dir  string
	lock *os.File
}

// imageStore returns a directory for unpacked images that no other process uses while this one runs. The
// directories stay in the cache, so that the default image is unpacked once for as many test processes as
// ever ran at the same time.
func imageStore(t *testing.T) string {
	t.Helper()
	stores.Lock()
	defer stores.Unlock()
	if stores.dir != "" {
		return stores.dir
	}
	root, err := cache.Root()
	if err != nil {
		root = os.TempDir()
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		dir := filepath.Join(root, fmt.Sprintf("test-images-%d", i))
		lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			stores.dir, stores.lock = dir, lock
			return dir
		}
		lock.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			t.Fatal(err)
		}
	}
}

// need skips the test when the machine lacks what only make installs.
func need(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: real sandboxes are not started")
	}
	if os.Geteuid() != 0 {
		t.Skip("not root: namespaces, mounts and cgroups cannot be made")
	}
	if _, err := locate.Dir(); err != nil {
		t.Skipf("no runtimes: %v", err)
	}
	if _, err := builder.Built(); err != nil {
		t.Skipf("no image: %v", err)
	}
}

// EnvBin names another build of berth than that in bin/; berth-guest is beside it.
const EnvBin = "BERTH_BIN"

// Bin is the berth program that make built.
func Bin(t *testing.T) string {
	t.Helper()
	if bin := os.Getenv(EnvBin); bin != "" {
		return bin
	}
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil {
		t.Fatalf("find go.work: %v", err)
	}
	bin := filepath.Join(filepath.Dir(strings.TrimSpace(string(out))), "bin", "berth")
	if _, err := os.Stat(bin); err != nil {
		t.Skipf("bin/berth is missing: run make build")
	}
	return bin
}

// Up starts, or starts again, on the same folder.
func (e *Env) Up() {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), 2*time.Minute)
	defer cancel()
	p, err := upproc.Start(ctx, upproc.Options{Bin: e.Bin, Dir: e.Dir, Args: e.Args})
	if err != nil {
		e.t.Fatal(err)
	}
	for one := e; one != nil; one = one.of {
		one.Process = p
		for _, m := range p.Marks { // a cluster's namespaces are others at every start
			if !slices.Contains(one.marks, m) {
				one.marks = append(one.marks, m)
			}
		}
	}
}

// Down stops it in order; what was killed before is started once more, so that
// it cleans up after itself.
func (e *Env) Down() {
	if e.Process == nil {
		return
	}
	select {
	case <-e.Done():
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		p, err := upproc.Start(ctx, upproc.Options{Bin: e.Bin, Dir: e.Dir, Args: e.Args})
		if err != nil {
			e.t.Errorf("start again to clean up: %v", err)
			return
		}
		e.Process = p
	default:
		if e.Many {
			e.undo()
		}
	}
	if err := e.Stop(); err != nil {
		e.t.Errorf("stop berth up: %v", err)
	}
}

// Client is a frontend's connection for a user.
func (e *Env) Client(tenant, user string) *sdk.Client {
	e.t.Helper()
	c, err := e.Connect(e.t.Context(), tenant, user)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(c.Close)
	return c
}

// Operator is an operator's connection.
func (e *Env) Operator() *sdk.Client {
	e.t.Helper()
	c, err := sdk.Connect(e.t.Context(), sdk.Config{ClientFile: e.ClientFile("operator")})
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(c.Close)
	return c
}

// CLI runs the berth program and returns its standard output.
func (e *Env) CLI(args ...string) (stdout string, err error) {
	cmd := exec.CommandContext(e.t.Context(), e.Bin, args...)
	cmd.Env = append(os.Environ(), "BERTH_DIR="+e.Dir)
	var out, errOut strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("berth %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errOut.String()))
	}
	return out.String(), err
}
