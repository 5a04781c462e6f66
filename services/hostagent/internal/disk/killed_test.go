package disk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A process of its own does the work and is killed at one step: nothing of it is unwound. What its
// successor finds is judged by the test.
const childVar = "BERTH_DISK_CHILD"

type task struct {
	Dir      string
	Reflink  bool
	Scenario string
	Point    string
	From     string // archived disk, for restores
}

// scenario is what a process does until it is killed. The session has slept with m1 (file f says
// "one"), woke with epoch 2 and wrote "acked" to g.
type scenario struct {
	points []string
	only   string // kind of pool that has these points, empty: all
	do     func(s *Store, t task) error
	check  func(t *testing.T, s *Store, from string)
}

var commitPoints = []string{"propose.index", "record.written", "propose.record", "commit.dropped", "commit.index", "commit.record"}

var scenarios = map[string]scenario{
	"shoot": {
		points: append([]string{"shot.settled", "shot.frozen", "shot.cloned", "shot.synced", "shot.named"}, commitPoints...),
		do:     doShoot, check: checkSession,
	},
	"follow": {points: []string{"shot.followed", "shot.caughtup"}, only: "xfs", do: doShoot, check: checkSession},
	"again":  {points: []string{"shot.again"}, only: "xfs", do: doShootThawed, check: checkSession},
	"seal":   {points: append([]string{"seal.detached"}, commitPoints...), do: doSeal, check: checkSession},
	"clone":  {points: []string{"clone.made", "seal.cloned"}, only: "xfs", do: doSeal, check: checkSession},
	"view":   {points: []string{"shot.frozen", "shot.synced", "view.loop", "view.mounted"}, do: doView, check: checkSession},
	"full":   {points: []string{"full.frozen"}, do: doFreeze, check: checkSession},
	"evict":  {points: []string{"delete.record", "delete.images"}, do: doEvict, check: checkGone},
	"delete": {points: []string{"delete.record", "delete.images"},
		do: func(s *Store, _ task) error { return s.Delete(context.Background(), key(1)) }, check: checkGone},
	"restore": {points: []string{"restore.began", "restore.filled", "restore.index", "record.written", "restore.void", "restore.renamed", "restore.record"},
		do: doRestore, check: checkRestored},
	"machine": {points: []string{"record.written", "raw.prepared", "raw.recorded", "raw.back"}, do: doMachine, check: checkMachine},
	"grow":    {points: []string{"record.written", "grow.recorded", "grow.stretched", "grow.device"}, do: doGrow, check: checkGrown},
}

func child() int {
	var t task
	if err := json.Unmarshal([]byte(os.Getenv(childVar)), &t); err != nil {
		fmt.Println(err)
		return 2
	}
	s, err := open(context.Background(), Config{Dir: t.Dir, Reflink: t.Reflink}, nil)
	if err == nil {
		err = prepare(s)
	}
	if err == nil {
		s.fault = func(step string) error {
			if step == t.Point {
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
			return nil
		}
		err = scenarios[t.Scenario].do(s, t)
	}
	fmt.Println("it was not killed:", err)
	return 3
}

func prepare(s *Store) error {
	ctx := context.Background()
	write := func(a Attachment, name, text string) error {
		f, err := os.Create(filepath.Join(a.Root, Upper, name))
		if err != nil {
			return err
		}
		_, err = f.WriteString(text)
		return errors.Join(err, f.Sync(), f.Close())
	}
	a, err := s.Attach(ctx, fresh(1, 1))
	if err != nil {
		return err
	}
	if err := errors.Join(s.Activate(key(1), ep(1)), write(a, "f", "one")); err != nil {
		return err
	}
	sh, _, err := s.SealShot(ctx, key(1), ep(1))
	if err != nil {
		return err
	}
	if err := errors.Join(s.Propose(sh, manifestOf(sh, "m1"), []byte("i1")), s.CommitHead(key(1), "m1"), s.Release(sh)); err != nil {
		return err
	}
	if a, err = s.Attach(ctx, Want{Key: key(1), Epoch: ep(2), Head: "m1", LastActive: ep(1)}); err != nil {
		return err
	}
	return errors.Join(s.Activate(key(1), ep(2)), write(a, "g", "acked"))
}

func commitShot(s *Store, sh *Shot) error {
	return errors.Join(s.Propose(sh, manifestOf(sh, "m2"), []byte("i2")), s.CommitHead(sh.Key, "m2"), s.Release(sh))
}

func doShoot(s *Store, _ task) error {
	sh, err := s.Shoot(context.Background(), key(1), ep(2))
	if err != nil {
		return err
	}
	return commitShot(s, sh)
}

// doShootThawed is doShoot with a disk that somebody else thaws.
func doShootThawed(s *Store, t task) error {
	fault := s.fault
	s.fault = func(step string) error {
		if step == "shot.frozen" {
			return freezeMount(s.mountPoint(key(1)), false)
		}
		return fault(step)
	}
	return doShoot(s, t)
}

func doSeal(s *Store, _ task) error {
	sh, _, err := s.SealShot(context.Background(), key(1), ep(2))
	if err != nil {
		return err
	}
	return commitShot(s, sh)
}

func doView(s *Store, _ task) error {
	_, err := s.View(context.Background(), key(1), ep(2))
	return err
}

func doFreeze(s *Store, _ task) error {
	defer s.lock(key(1))()
	s.freezeFor(key(1), Space{})
	return s.at("full.frozen")
}

func doEvict(s *Store, t task) error {
	fault := s.fault
	s.fault = nil
	if err := doSeal(s, t); err != nil {
		return err
	}
	s.fault = fault
	return s.Evict(context.Background(), key(1))
}

// doRestore replaces the disk, which is stale because the head moved to another manifest.
func doRestore(s *Store, t task) error {
	if err := s.Detach(context.Background(), key(1)); err != nil {
		return err
	}
	return s.Restore(context.Background(), headOf(1, "m9", 2), []byte("i9"), fillFrom(t.From))
}

// doMachine gives the disk to a machine, and takes it back.
func doMachine(s *Store, _ task) error {
	ctx := context.Background()
	if err := s.Detach(ctx, key(1)); err != nil {
		return err
	}
	if _, err := s.Attach(ctx, rawAgain(1, 3, "m1", 2)); err != nil {
		return err
	}
	return s.Detach(ctx, key(1))
}

// checkMachine checks that the next machine has the newest files.
func checkMachine(t *testing.T, s *Store, _ string) {
	if s.isActive(key(1)) {
		t.Error("nobody has the disk, yet it counts as in use")
	}
	g := boot(t, attach(t, s, rawAgain(1, 4, "m1", 2)))
	defer g.off()
	for name, want := range map[string]string{"f": "one", "g": "acked"} {
		if b, err := os.ReadFile(filepath.Join(g.point, Upper, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

// doGrow grows the disk while it is attached, and where that cannot be done, with the next attach.
func doGrow(s *Store, _ task) error {
	ctx := context.Background()
	if _, err := s.Grow(ctx, key(1), 2*testSize); err != nil {
		return err
	}
	if err := s.Detach(ctx, key(1)); err != nil {
		return err
	}
	_, err := s.Attach(ctx, Want{Key: key(1), Epoch: ep(3), Head: "m1", LastActive: ep(2)})
	return err
}

func TestKilledAtEveryStep(t *testing.T) {
	onPools(t, func(t *testing.T, cfg Config) {
		from := archived(t, "saved")
		for name, sc := range scenarios {
			points := sc.points
			if sc.only != "" && cfg.Reflink != (sc.only == "xfs") {
				continue
			}
			if name == "grow" {
				points = append(points, growPoints(cfg.Reflink)...)
			}
			for _, point := range points {
				t.Run(name+"/"+point, func(t *testing.T) {
					tk := task{Dir: filepath.Join(cfg.Dir, name+point), Reflink: cfg.Reflink, Scenario: name, Point: point, From: from}
					kill(t, tk)
					s := openWith(t, Config{Dir: tk.Dir, Reflink: tk.Reflink}, nil)
					tidied(t, s)
					sc.check(t, s, from)
				})
			}
		}
	})
}

// growPoints are passed on one of two ways, by what this process may do.
func growPoints(reflink bool) []string {
	switch {
	case capable():
		return []string{"grow.resized"}
	case reflink:
		return []string{"grow.offline", "clone.made"}
	}
	return []string{"grow.offline"}
}

// capable reports CAP_SYS_RESOURCE.
func capable() bool {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	return unix.Capget(&h, &d[0]) == nil && d[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

func kill(t *testing.T, tk task) {
	t.Helper()
	b, err := json.Marshal(tk)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), childVar+"="+string(b))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if ctx.Err() != nil || !errors.As(err, &exit) || exit.ExitCode() != -1 {
		t.Fatalf("the step was not reached: %v: %s", err, out)
	}
}

// tidied checks that after one sweep nothing is left that a live disk does not need.
func tidied(t *testing.T, s *Store) {
	t.Helper()
	if _, err := s.Sweep(t.Context(), func(Disk) Verdict { return Keep }); err != nil {
		t.Fatalf("sweep: %v", err)
	}
	inv, err := s.List()
	if err != nil || len(inv.Strays) != 0 {
		t.Errorf("strays after the sweep: %v, %v", inv.Strays, err)
	}
	for _, d := range inv.Disks {
		for name := range names(t, s, 1) {
			pending := strings.HasPrefix(name, "shot.") && d.Pending.ID != "" && (s.reflink || name == shotIndexName)
			base := name == baseIndexName || name == baseImageName && s.reflink
			if name != imageName && name != recordName && !base && !pending {
				t.Errorf("%s stays", name)
			}
		}
	}
	if left, err := os.ReadDir(filepath.Join(s.dir, "views")); err != nil || len(left) != 0 {
		t.Errorf("views stay: %v, %v", left, err)
	}
}

// checkSession checks a session that was awake: it goes on or wakes with its newest files, with every
// head that the scheduler may have, and with no other.
func checkSession(t *testing.T, s *Store, _ string) {
	r := record(t, s, 1)
	if inv, _ := s.List(); inv.Disks[0].Mounted {
		notFrozen(t, s.mountPoint(key(1)))
	}
	if r.Usable("", ep(2)) || r.Usable("m3", ep(2)) || r.Usable("m1", ep(2)) != (r.Base == "m1") {
		t.Errorf("usable with a wrong head: %+v", r)
	}
	if err := s.Detach(t.Context(), key(1)); err != nil {
		t.Fatal(err)
	}
	heads := []string{r.Base}
	if r.Pending.ID != "" {
		heads = append(heads, r.Pending.ID)
	}
	saved, err := os.ReadFile(s.file(key(1), recordName))
	if err != nil {
		t.Fatal(err)
	}
	for i, head := range heads {
		if err := os.WriteFile(s.file(key(1), recordName), saved, 0o600); err != nil {
			t.Fatal(err)
		}
		a := wake(t, s, 1, uint64(3+i), head, 2)
		if get(t, a, "f") != "one" || get(t, a, "g") != "acked" {
			t.Errorf("with head %s: an acknowledged file is lost", head)
		}
		if i < len(heads)-1 {
			if err := s.Detach(t.Context(), key(1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	checkBase(t, s)
	last := uint64(2 + len(heads))
	activate(t, s, 1, last)
	sh := shoot(t, s, 1, last)
	if sh.Parent != heads[len(heads)-1] {
		t.Errorf("the parent is %q, of %v", sh.Parent, heads)
	}
	saveAs(t, s, sh)
}

func saveAs(t *testing.T, s *Store, sh *Shot) {
	t.Helper()
	saved(t, s, sh, "m5")
	if r := record(t, s, 1); r.Base != "m5" {
		t.Errorf("got %+v", r)
	}
}

// checkBase checks that a base which is trusted is the one of its manifest: m2 has g, m1 has not.
func checkBase(t *testing.T, s *Store) {
	t.Helper()
	rec := record(t, s, 1)
	base, plain := s.openBase(rec)
	if plain != nil && string(plain) != "i"+rec.Base[1:] {
		t.Errorf("the index of %s is %q", rec.Base, plain)
	}
	if base == nil {
		return
	}
	defer func() { _ = base.Close() }()
	b, err := os.ReadFile(base.Name())
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(b, []byte("acked")) != (rec.Base == "m2") {
		t.Errorf("the base of %s is another's", rec.Base)
	}
}

// notFrozen writes, which a frozen disk never lets return.
func notFrozen(t *testing.T, point string) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- os.WriteFile(filepath.Join(point, Upper, "more"), []byte("x"), 0o600) }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("the disk is still frozen")
		_ = freezeMount(point, false)
	}
}

// checkGone checks that a disk that was being removed is gone, and comes back from the store.
func checkGone(t *testing.T, s *Store, from string) {
	if left := names(t, s, 1); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if err := s.Restore(t.Context(), headOf(1, "m2", 2), nil, fillFrom(from)); err != nil {
		t.Fatal(err)
	}
	if a := wake(t, s, 1, 3, "m2", 2); get(t, a, "f") != "saved" {
		t.Error("another disk")
	}
}

// checkRestored checks that there is the old disk, or the new one, whole; and that a restore heals.
func checkRestored(t *testing.T, s *Store, from string) {
	r := record(t, s, 1)
	_, err := s.Attach(t.Context(), Want{Key: key(1), Epoch: ep(3), Head: "m9", LastActive: ep(2)})
	if (err == nil) != (r.State == Clean && r.Base == "m9") {
		t.Errorf("attached: %v, with %+v", err, r)
	}
	if err != nil {
		if err := s.Restore(t.Context(), headOf(1, "m9", 2), []byte("i9"), fillFrom(from)); err != nil {
			t.Fatal(err)
		}
	}
	if a := wake(t, s, 1, 3, "m9", 2); get(t, a, "f") != "saved" {
		t.Error("another disk")
	}
}

func checkGrown(t *testing.T, s *Store, _ string) {
	if err := s.Detach(t.Context(), key(1)); err != nil {
		t.Fatal(err)
	}
	a := attach(t, s, Want{Key: key(1), Epoch: ep(4), Head: "m1", LastActive: ep(2), Size: 2 * testSize})
	if get(t, a, "f") != "one" || get(t, a, "g") != "acked" {
		t.Error("an acknowledged file is lost")
	}
	if u := usage(t, s, 1); u.Size < testSize+testSize/2 {
		t.Errorf("it did not grow: %+v", u)
	}
	activate(t, s, 1, 4)
	saveAs(t, s, shoot(t, s, 1, 4))
}
