package diskpool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

const small = MinBytes + 20<<20

// TestMain plays a process that is killed at a step of Open.
func TestMain(m *testing.M) {
	if step := os.Getenv("BERTH_TEST_DIE_AT"); step != "" {
		cfg := Config{Dir: os.Getenv("BERTH_TEST_DIR"), Mode: os.Getenv("BERTH_TEST_MODE"), Device: os.Getenv("BERTH_TEST_DEVICE")}
		_, _ = fmt.Sscan(os.Getenv("BERTH_TEST_BYTES"), &cfg.Bytes)
		_, err := open(context.Background(), cfg, func(at string) error {
			if at == step {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
			return nil
		})
		fmt.Println("it lived:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// dieAt runs Open in a process that is killed at a step.
func dieAt(t *testing.T, step string, cfg Config) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "BERTH_TEST_DIE_AT="+step, "BERTH_TEST_DIR="+cfg.Dir, "BERTH_TEST_MODE="+cfg.Mode,
		"BERTH_TEST_DEVICE="+cfg.Device, fmt.Sprint("BERTH_TEST_BYTES=", cfg.Bytes))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("it was not killed at %s: %v: %s", step, err, out)
	}
}

// room is a folder for a pool; what is mounted there at the end of the test is taken away.
func room(t testing.TB) string {
	t.Helper()
	if err := canMake(); err != nil {
		t.Skip("skipped: ", err)
	}
	dir := filepath.Join(t.TempDir(), "disks")
	t.Cleanup(func() {
		below, err := mounts.Below(dir)
		if err != nil {
			t.Error(err)
		}
		for _, m := range slices.Backward(below) {
			if err := unix.Unmount(m, 0); err != nil {
				t.Errorf("unmount %s: %v", m, err)
			}
		}
		if err := loopdev.WaitFree(dir+suffix, freeTime); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func mustOpen(t testing.TB, cfg Config) *Pool {
	t.Helper()
	p, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func refused(t *testing.T, cfg Config, kind errkind.Kind) {
	t.Helper()
	if p, err := Open(t.Context(), cfg); !errs.Is(err, kind) {
		t.Errorf("got %v, %v, want %s", p, err, kind)
	}
	if err := Preflight(cfg); !errs.Is(err, kind) {
		t.Errorf("preflight: got %v, want %s", err, kind)
	}
}

func put(t testing.TB, dir, name string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
		t.Fatal(err)
	}
}

func has(t testing.TB, dir, name string) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	return err == nil && string(b) == name
}

func isMount(t testing.TB, dir string) bool {
	t.Helper()
	is, err := mounts.IsMount(dir)
	if err != nil {
		t.Fatal(err)
	}
	return is
}

func TestAPoolFileClonesAndComesBack(t *testing.T) {
	cfg := Config{Dir: room(t), Mode: Loop, Bytes: small}
	if err := Preflight(cfg); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(filepath.Dir(cfg.Dir)); len(left) != 0 {
		t.Fatalf("preflight made %v", left)
	}
	for round := range 2 {
		p := mustOpen(t, cfg)
		if !p.Reflink() || p.Missing() != "" || p.Outer() != filepath.Dir(cfg.Dir) || p.Mode() != Loop {
			t.Errorf("got %+v", p)
		}
		if err := extents.Usable(p.Dir()); err != nil {
			t.Error(err)
		}
		if st, err := os.Stat(p.Dir()); err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("others may look into it: %v, %v", st.Mode(), err)
		}
		if round == 0 {
			put(t, p.Dir(), "disk")
		} else if !has(t, p.Dir(), "disk") {
			t.Error("the disk is lost")
		}
		for range 2 {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
		if held, err := loopdev.Bound(filepath.Dir(cfg.Dir)); isMount(t, cfg.Dir) || len(held) != 0 || err != nil {
			t.Errorf("it is still mounted, or bound: %v, %v", held, err)
		}
	}
}

// Two file systems on one file destroy it.
func TestManyOpensMountOnce(t *testing.T) {
	cfg := Config{Dir: room(t), Bytes: small}
	var wg sync.WaitGroup
	pools := make([]*Pool, 8)
	for i := range pools {
		wg.Go(func() {
			p, err := Open(t.Context(), cfg)
			if err != nil {
				t.Error(err)
				return
			}
			pools[i] = p
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	below, err := mounts.Below(cfg.Dir)
	held, herr := loopdev.Bound(filepath.Dir(cfg.Dir))
	if len(below) != 1 || len(held) != 1 || err != nil || herr != nil {
		t.Errorf("mounts %v, devices %v, %v, %v", below, held, err, herr)
	}
	for i, p := range pools {
		if !isMount(t, cfg.Dir) {
			t.Fatalf("unmounted below the other users, at %d", i)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	if isMount(t, cfg.Dir) {
		t.Error("the last one did not unmount")
	}
}

func TestKilledAtEveryStep(t *testing.T) {
	for _, step := range []string{"sized", "formatted", "made", "renamed", "bound", "mounted", "truncated"} {
		t.Run(step, func(t *testing.T) {
			cfg := Config{Dir: room(t), Mode: Auto, Bytes: small}
			dieAt(t, step, cfg)
			if step != "renamed" { // which the next one does not do again
				dieAt(t, step, cfg)
			}
			p := mustOpen(t, cfg)
			if st, err := os.Stat(p.Dir()); !p.Reflink() || p.Mode() != Loop || err != nil || st.Mode().Perm() != 0o700 {
				t.Errorf("got %+v, %v, %v", p, st.Mode(), err)
			}
			if left, err := os.ReadDir(filepath.Dir(cfg.Dir)); err != nil || len(left) != 2 {
				t.Errorf("left are %v, %v", left, err)
			}
		})
	}
}

// Growing goes on where it stopped, and no disk is lost by it.
func TestAPoolGrowsAndNeverShrinks(t *testing.T) {
	cfg := Config{Dir: room(t), Mode: Loop, Bytes: small}
	p := mustOpen(t, cfg)
	put(t, p.Dir(), "disk")
	size := func(want uint64) {
		t.Helper()
		if got, err := xfsSize(cfg.Dir); err != nil || got != want || !has(t, cfg.Dir, "disk") {
			t.Errorf("%d bytes, want %d: %v", got, want, err)
		}
	}
	size(small)
	cfg.Bytes = 2 * small
	mustOpen(t, cfg) // while it is in use
	size(2 * small)
	for i, step := range []string{"truncated", "resized"} {
		cfg.Bytes = uint64(3+i) * small
		dieAt(t, step, cfg)
		keep := cfg
		keep.Bytes = 0 // what was begun is finished, whatever is asked for now
		mustOpen(t, keep)
		size(cfg.Bytes)
	}
	cfg.Bytes = small
	mustOpen(t, cfg)
	size(4 * small)
}

// The file holds disks of users: whatever is wrong with it, it is not made anew.
func TestAPoolFileIsNeverFormattedAgain(t *testing.T) {
	for name, content := range map[string][]byte{
		"empty": nil, "zeros": make([]byte, 1<<20), "garbage": bytes.Repeat([]byte("x"), 1<<20), "cut": append([]byte("XFSB"), make([]byte, 1<<20)...),
	} {
		for _, mode := range []string{Auto, Loop} {
			dir := room(t)
			if err := os.WriteFile(dir+suffix, content, 0o600); err != nil {
				t.Fatal(err)
			}
			p, err := Open(t.Context(), Config{Dir: dir, Mode: mode, Bytes: small})
			if !errs.Is(err, errkind.Refused) && !errs.Is(err, errkind.Unavailable) || !strings.Contains(err.Error(), "left as it is") {
				t.Errorf("%s, %s: got %+v, %v", name, mode, p, err)
			}
			if got, err := os.ReadFile(dir + suffix); err != nil || !bytes.Equal(got, content) {
				t.Errorf("%s, %s: it was changed: %v", name, mode, err)
			}
		}
	}
}

// A mount over a folder with disks would make them look lost.
func TestNoDiskIsHidden(t *testing.T) {
	dir := room(t)
	if err := os.MkdirAll(filepath.Join(dir, "sessions"), 0o700); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(dir, "sessions"), "disk")
	for range 2 {
		p := mustOpen(t, Config{Dir: dir})
		if p.Mode() != Folder || p.Reflink() || !strings.Contains(p.Missing(), "holds disks already") {
			t.Errorf("got %+v", p)
		}
	}
	refused(t, Config{Dir: dir, Mode: Loop, Bytes: small}, errkind.Conflict)
	if _, err := os.Stat(dir + suffix); err == nil {
		t.Error("a pool file was made, and makes the next start fail")
	}
	other := room(t)
	if err := mustOpen(t, Config{Dir: other, Mode: Loop, Bytes: small}).Close(); err != nil {
		t.Fatal(err)
	}
	refused(t, Config{Dir: other, Mode: Folder}, errkind.Conflict)
	put(t, other, "disk")
	refused(t, Config{Dir: other, Mode: Auto}, errkind.Conflict)
	refused(t, Config{Dir: other, Mode: Loop}, errkind.Conflict)
}

// Somebody else's mount is neither unmounted nor covered.
func TestAnotherMountIsNotOurs(t *testing.T) {
	dir := room(t)
	if err := errors.Join(os.Mkdir(dir, 0o700), unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m")); err != nil {
		t.Fatal(err)
	}
	refused(t, Config{Dir: dir, Mode: Loop, Bytes: small}, errkind.Conflict)
	p := mustOpen(t, Config{Dir: dir})
	if p.Mode() != Folder || p.Missing() == "" {
		t.Errorf("got %+v", p)
	}
	if err := p.Close(); err != nil || !isMount(t, dir) {
		t.Errorf("it is gone, %v", err)
	}
	if err := os.WriteFile(dir+suffix, append([]byte("XFSB"), make([]byte, 4096)...), 0o600); err != nil {
		t.Fatal(err)
	}
	refusedOpen := func(mode string) {
		if p, err := Open(t.Context(), Config{Dir: dir, Mode: mode}); !errs.Is(err, errkind.Conflict) {
			t.Errorf("got %+v, %v", p, err)
		}
	}
	refusedOpen(Auto)
	refusedOpen(Loop)
}

// A pool with sessions stays when hostagent ends, and the next one takes it over.
func TestAPoolInUseStays(t *testing.T) {
	cfg := Config{Dir: room(t), Mode: Loop, Bytes: small}
	p := mustOpen(t, cfg)
	mnt := filepath.Join(p.Dir(), "mnt")
	if err := errors.Join(os.Mkdir(mnt, 0o700), mounts.Share(mnt)); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil || !isMount(t, cfg.Dir) || !isMount(t, mnt) {
		t.Fatalf("it was unmounted: %v", err)
	}
	p = mustOpen(t, cfg)
	if below, err := mounts.Below(cfg.Dir); err != nil || len(below) != 2 {
		t.Errorf("got %v, %v", below, err)
	}
	if err := mounts.Unshare(mnt); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(p.Dir(), "open"))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil || !isMount(t, cfg.Dir) {
		t.Errorf("it was unmounted: %v", err)
	}
	_ = f.Close()
	if err := mustOpen(t, cfg).Close(); err != nil || isMount(t, cfg.Dir) {
		t.Errorf("it stays: %v", err)
	}
}

// Another process that copied the mount table keeps the device; it is used again, not doubled.
func TestADeviceThatIsHeldElsewhereIsUsedAgain(t *testing.T) {
	cfg := Config{Dir: room(t), Mode: Loop, Bytes: small}
	p := mustOpen(t, cfg)
	put(t, p.Dir(), "disk")
	dev, err := os.Open(device(t, cfg.Dir))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dev.Close() }()
	_ = p.root.Close()
	if err := unix.Unmount(p.Dir(), 0); err != nil {
		t.Fatal(err)
	}
	p = mustOpen(t, cfg)
	if got := device(t, cfg.Dir); got != dev.Name() || !has(t, p.Dir(), "disk") {
		t.Errorf("got %s, not %s", got, dev.Name())
	}
}

func device(t *testing.T, dir string) string {
	t.Helper()
	dev, ok, err := loopdev.Device(dir + suffix)
	if err != nil || !ok {
		t.Fatalf("no device: %v", err)
	}
	return dev
}

func TestBadConfig(t *testing.T) {
	dir := t.TempDir()
	for _, cfg := range []Config{
		{}, {Dir: dir, Mode: "raid"}, {Dir: dir, Mode: Device}, {Dir: dir, Mode: Loop, Device: "/dev/sda"},
		{Dir: dir, Device: "/dev/sda"}, {Dir: dir, Mode: Loop, Bytes: MinBytes - 1},
	} {
		refused(t, cfg, errkind.Invalid)
	}
}

// Another process at work is waited for only as long as the caller likes.
func TestWaitingForAnotherOpenEnds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "disks")
	unlock, err := lock(t.Context(), filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, Config{Dir: dir}); !errs.Is(err, errkind.Canceled) {
		t.Errorf("got %v", err)
	}
}

func FuzzSuperblock(f *testing.F) {
	f.Add([]byte("XFSB"))
	f.Add(append([]byte("XFSB"), bytes.Repeat([]byte{1}, 508)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if sb := parseSuperblock(b); sb.halfMade && !sb.xfs {
			t.Error("half of nothing")
		}
	})
}
