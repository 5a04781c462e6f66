package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	workFiles = 1024
	workSeed  = uint64(2) << 40
	changed   = 50 * mib
)

// work is a session with 1 GiB of files, and the peer with the same.
type work struct {
	*installation
	s      *sdk.Session
	files  tree // in the session
	restic *restic
}

// work makes the session, and measures its first snapshot when the store is a folder.
func (in *installation) work(ctx context.Context) (*work, error) {
	note("a session with 1 GiB of files, store %s", in.kind)
	w := &work{installation: in, files: tree{"/root/work", workFiles, mib}}
	var err error
	if w.s, err = in.open(ctx, "work", "default"); err != nil {
		return nil, err
	}
	if err = inSession(ctx, w.s, "make", w.files, workSeed); err != nil {
		return nil, err
	}
	c, err := in.checkpoint(ctx, w.s)
	if err != nil || in.kind != "file" || !in.b.wants("save") {
		return w, err
	}
	if w.restic, err = startRestic(ctx, in.dir); err != nil {
		return nil, err
	}
	peer, err := w.restic.backup(ctx)
	if err != nil {
		return nil, err
	}
	in.snapshotFigures("first snapshot of 1 GiB", c, peer, workFiles*mib)
	return w, in.ten(ctx, w.s, "1 GiB")
}

// snapshotFigures are four rows beside the peer's, and the processor time.
func (in *installation) snapshotFigures(name string, c checkpointed, p backup, bytes int64) {
	const m = 1e6
	add := func(what, unit string, value, floor float64, of string) {
		in.b.add(figures.Result{Name: name + ", " + what, Value: value, Unit: unit, Floor: floor, FloorOf: of}, figures.None)
	}
	add("time to the answer", "s", c.took.Seconds(), p.took.Seconds(), p.name)
	add("of that, save", "s", c.saveSeconds, c.took.Seconds(), "the whole")
	add("bytes read", "MB", c.read/m, float64(bytes)/m, "bytes that the program wrote")
	add("bytes uploaded", "MB", c.uploaded/m, float64(p.bytes)/m, p.name)
	add("objects", "", c.object, float64(p.objects), p.name)
	add("processor time of berth up", "s", c.cpu.Seconds(), p.cpu.Seconds(), p.name)
}

// changes measures snapshots of 50 MiB changed in two ways, of nothing changed, and what they cost.
func (w *work) changes(ctx context.Context) error {
	for _, c := range []struct {
		name string
		change
	}{
		{"50 MiB of 1 GiB changed in pieces of 1 MiB", change{changed / mib, mib, 3 << 40}},
		{"50 MiB of 1 GiB changed in pieces of 4 KiB all over", change{changed / 4096, 4096, 4 << 40}},
	} {
		note("snapshot, %s", c.name)
		if err := inSession(ctx, w.s, "apply", w.files, c.change); err != nil {
			return err
		}
		ours, err := w.checkpoint(ctx, w.s)
		if err != nil {
			return err
		}
		if err := w.restic.files.apply(c.change); err != nil {
			return err
		}
		peer, err := w.restic.backup(ctx)
		if err != nil {
			return err
		}
		w.snapshotFigures(c.name, ours, peer, c.bytes())
		squeezed, err := zstdOf(ctx, c.change)
		if err != nil {
			return err
		}
		w.b.add(figures.Result{Name: c.name + ", bytes uploaded", Value: ours.uploaded / 1e6, Unit: "MB", Floor: float64(squeezed) / 1e6,
			FloorOf: "zstd -1 of the changed bytes"}, figures.None)
	}
	return errors.Join(w.fragments(ctx), w.nothing(ctx))
}

// fragments measures how long writers wait once the image lies in pieces of 4 KiB, of which every clone
// has to count each.
func (w *work) fragments(ctx context.Context) error {
	image, err := w.image()
	if err != nil {
		return err
	}
	var frozen, floor []time.Duration
	for i := range 5 {
		if err := inSession(ctx, w.s, "append", "/root/log", "8192", uint64(i)); err != nil {
			return err
		}
		c, err := w.checkpoint(ctx, w.s)
		if err != nil {
			return err
		}
		copied := filepath.Join(w.pool(), "bench-clone")
		began := time.Now()
		err = command(ctx, "cp", "--reflink=always", image, copied)
		floor = append(floor, time.Since(began))
		if err = errors.Join(err, os.Remove(copied)); err != nil {
			return err
		}
		frozen = append(frozen, time.Duration(c.frozen*float64(time.Second)))
	}
	w.b.add(figures.Result{Name: "frozen, 8 KiB written to a disk whose image lies in pieces of 4 KiB, p50", Value: figures.Quantile(frozen, 0.5), Unit: "ms",
		Floor: figures.Quantile(floor, 0.5), FloorOf: "cp --reflink of the image, p50"}, figures.AtMost(aimFrozen, "ms"))
	return nil
}

// image is the session's image in the pool; no other session may be there.
func (in *installation) image() (string, error) {
	all, err := filepath.Glob(filepath.Join(in.pool(), "sessions", "*", "disk.img"))
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("there are %d images of sessions in the pool, not one", len(all))
	}
	if err != nil {
		return "", err
	}
	return all[0], nil
}

// nothing measures a snapshot of a disk that nobody wrote to.
func (w *work) nothing(ctx context.Context) error {
	var ours, floor []time.Duration
	for range 10 {
		c, err := w.checkpoint(ctx, w.s)
		if err != nil {
			return err
		}
		began := time.Now()
		if _, err := w.s.Files().Stat(ctx, self); err != nil {
			return err
		}
		ours, floor = append(ours, c.took), append(floor, time.Since(began))
	}
	w.b.add(figures.Result{Name: "snapshot when nothing changed, p50", Value: figures.Quantile(ours, 0.5), Unit: "ms",
		Floor: figures.Quantile(floor, 0.5), FloorOf: "stat of a file in the session"}, figures.None)
	return nil
}

// zstdOf is the size of a change after `zstd -1`, or of the change itself where there is no zstd.
func zstdOf(ctx context.Context, c change) (int64, error) {
	var all bytes.Buffer
	if err := c.each(func(_ int, b []byte) error { _, err := all.Write(b); return err }); err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(ctx, "zstd", "-1", "-q", "-c")
	cmd.Stdin = &all
	out, err := cmd.Output()
	return int64(len(out)), err
}

// restic is the peer: a repository beside the store, and files equal to those in the session. Without
// the program its figures are those of zstd and a sync.
type restic struct {
	bin   string // empty: it is not installed
	files tree
	repo  string
	env   []string
}

// backup is what one cost.
type backup struct {
	holding // that were added
	name    string
	took    time.Duration
	cpu     time.Duration
}

func startRestic(ctx context.Context, dir string) (*restic, error) {
	r := &restic{files: tree{filepath.Join(dir, "peer"), workFiles, mib}, repo: filepath.Join(dir, "restic")}
	if err := r.files.make(workSeed); err != nil {
		return nil, err
	}
	var err error
	if r.bin, err = exec.LookPath("restic"); err != nil {
		note("restic is not installed: the peer is zstd -1 of all files, and a sync")
		return r, nil
	}
	r.env = append(os.Environ(), "RESTIC_PASSWORD=bench", "RESTIC_REPOSITORY="+r.repo, "RESTIC_CACHE_DIR="+filepath.Join(dir, "restic-cache"))
	_, err = r.run(ctx, "init", "--repository-version", "2")
	return r, err
}

func (r *restic) run(ctx context.Context, args ...string) (*os.ProcessState, error) {
	cmd := exec.CommandContext(ctx, r.bin, append(args, "--quiet")...)
	cmd.Env = r.env
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		return nil, errors.Join(err, errors.New(said.String()))
	}
	return cmd.ProcessState, nil
}

func (r *restic) backup(ctx context.Context) (b backup, err error) {
	if r.bin == "" {
		return r.zstd(ctx)
	}
	before, err := holds(r.repo)
	if err != nil {
		return b, err
	}
	b.name = "restic backup of the same files (a peer)"
	began := time.Now()
	st, err := r.run(ctx, "backup", r.files.Dir)
	if err != nil {
		return b, err
	}
	b.took, b.cpu = time.Since(began), st.UserTime()+st.SystemTime()
	after, err := holds(r.repo)
	b.holding = holding{after.bytes - before.bytes, after.objects - before.objects}
	return b, err
}

// zstd stands for the peer where that cannot be had.
func (r *restic) zstd(ctx context.Context) (b backup, err error) {
	b.name = "tar and zstd -1 of all the files (restic is not installed)"
	to := r.repo + ".tar.zst"
	defer os.Remove(to)
	cmd := exec.CommandContext(ctx, "sh", "-c", `tar -C "$0" -cf - . | zstd -1 -q -c >"$1" && sync "$1"`, r.files.Dir, to)
	began := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		return b, errors.Join(err, errors.New(string(out)))
	}
	b.took, b.cpu = time.Since(began), cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()
	i, err := os.Stat(to)
	if err == nil {
		b.holding = holding{i.Size(), 1}
	}
	return b, err
}
