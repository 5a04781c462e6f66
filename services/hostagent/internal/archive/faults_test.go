package archive

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gocloud.dev/gcerrors"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// TestKilledAtEveryStep ends a call at every step, each time it comes by, and does it all again:
// no step leaves anything that the next try, a restore of the head or a sweep stumbles over.
func TestKilledAtEveryStep(t *testing.T) {
	reached := map[string]bool{}
	for _, step := range Steps {
		for nth := 1; nth <= 3; nth++ {
			t.Run(step, func(t *testing.T) { killAt(t, step, nth, reached) })
		}
	}
	for _, step := range Steps {
		if !reached[step] {
			t.Errorf("step %s was never reached", step)
		}
	}
}

func killAt(t *testing.T, step string, nth int, reached map[string]bool) {
	s := newShelf()
	var mu sync.Mutex
	left := 0
	d := Open(s.bucket(t), Options{Backoff: time.Microsecond, Fault: func(at string) error {
		mu.Lock()
		defer mu.Unlock()
		if !slices.Contains(Steps, at) {
			t.Errorf("step %s is not in the list", at)
		}
		if at == step {
			if left--; left == 0 {
				reached[step] = true
				return errCrash
			}
		}
		return nil
	}})
	d.packSize = 2 * ChunkSize
	twice := func(what string, do func() error) {
		t.Helper()
		mu.Lock()
		left = nth
		mu.Unlock()
		if err := do(); err != nil && !errors.Is(err, errCrash) {
			t.Fatalf("%s: %v", what, err)
		}
		mu.Lock()
		left = 0
		mu.Unlock()
		if err := do(); err != nil {
			t.Fatalf("%s again: %v", what, err)
		}
	}
	everyCall(t, d, s, twice)
}

func everyCall(t *testing.T, d *Depot, s *shelf, twice func(string, func() error)) {
	ctx := context.Background()
	m := make(image, 12*ChunkSize).fill(0, 9*ChunkSize, 1)
	was := bytes.Clone(m)
	var first, head, back *Index
	save := func(ix **Index, src func() Source, at time.Duration) func() error {
		return func() (err error) { *ix, _, err = d.Save(ctx, testDisk, testKey, src(), metaAt(1, at)); return err }
	}
	twice("save", save(&first, func() Source { return m.source(nil, nil) }, 0))
	m.fill(2*ChunkSize, 3*ChunkSize, 2)
	twice("save", save(&head, func() Source { return m.source(was, first) }, time.Minute))
	twice("load", func() error { _, err := d.Load(ctx, testDisk, testKey, head.Info().ID); return err })
	restore := func() error { _, err := content(t, d, head); return err }
	twice("restore", restore)
	mustBe(t, d, head, m)
	twice("rewind", func() (err error) {
		back, err = d.Rewind(ctx, testDisk, testKey, head, first.Info().ID, metaAt(1, 2*time.Minute))
		return err
	})
	mustBe(t, d, back, was)
	if i := back.Info(); i.Parent != head.Info().ID || i.RestoredFrom != first.Info().ID || i.Added != 0 {
		t.Fatalf("%+v", i)
	}
	d.headers = headerCache{}
	twice("sweep", func() error {
		_, err := d.Sweep(ctx, testDisk, ids.Epoch{Incarnation: 1, Index: 1}, back.Info().ID, func() error { return nil })
		return err
	})
	for ix, want := range map[*Index]image{first: image(was), head: m, back: image(was)} {
		mustBe(t, d, ix, want)
	}
	if needed, err := d.mark(ctx, testDisk, []string{back.Info().ID}); err != nil || len(needed) != len(s.keys("")) {
		t.Fatalf("%d objects are there, %d are needed, %v", len(s.keys("")), len(needed), err)
	}
	twice("verify", func() error {
		v, err := d.Verify(ctx, testDisk, back.Info().ID, "", 0)
		if err == nil && (len(v.Damaged) > 0 || v.Objects != len(s.keys("")) || v.Next != "") {
			t.Errorf("%+v", v)
		}
		return err
	})
	twice("erase", func() error { return d.Erase(ctx, testDisk) })
	if len(s.keys("")) > 0 {
		t.Fatal("objects are left")
	}
}

// TestStoreThatFails: each way a store fails has its kind, and no call takes it for success.
func TestStoreThatFails(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want errkind.Kind
	}{
		"unreachable":   {errors.New("connection refused"), errkind.Unavailable},
		"read-only":     {syscall.EROFS, errkind.Unavailable},
		"permission":    {coded{gcerrors.PermissionDenied}, errkind.Unavailable},
		"full disk":     {&os.PathError{Op: "write", Err: syscall.ENOSPC}, errkind.NoCapacity},
		"over quota":    {syscall.EDQUOT, errkind.NoCapacity},
		"full service":  {coded{gcerrors.ResourceExhausted}, errkind.NoCapacity},
		"no bucket":     {coded{gcerrors.NotFound}, errkind.Unavailable},
		"internal":      {coded{gcerrors.Internal}, errkind.Unavailable},
		"took too long": {coded{gcerrors.DeadlineExceeded}, errkind.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			for _, part := range []string{"packs/", "manifests/"} {
				s := newShelf()
				s.fail = func(_ context.Context, op, key string) error {
					if op == "put" && strings.Contains(key, part) {
						return c.err
					}
					return nil
				}
				m := make(image, 4*ChunkSize).fill(0, 4*ChunkSize, 1)
				ix, st, err := depot(s.bucket(t)).Save(t.Context(), testDisk, testKey, m.source(nil, nil), metaAt(1, 0))
				if !errs.Is(err, c.want) || ix != nil || st.Objects != 0 {
					t.Fatalf("%v, %s", err, errs.Kind(err))
				}
				if len(s.keys("manifests/")) > 0 {
					t.Fatal("a manifest was written")
				}
			}
		})
	}
}

// TestStoreThatSaysFullInItsOwnWords: Options.Kind knows what gocloud has no code for.
func TestStoreThatSaysFullInItsOwnWords(t *testing.T) {
	s := newShelf()
	tries := 0
	s.fail = func(context.Context, string, string) error { tries++; return errors.New("507 over there") }
	d := Open(s.bucket(t), Options{Backoff: time.Microsecond, Kind: func(err error) errkind.Kind {
		if strings.Contains(err.Error(), "507") {
			return errkind.NoCapacity
		}
		return errkind.Unavailable
	}})
	m := make(image, ChunkSize).fill(0, 64, 1)
	if _, _, err := d.Save(t.Context(), testDisk, testKey, m.source(nil, nil), metaAt(1, 0)); !errs.Is(err, errkind.NoCapacity) || tries != 1 {
		t.Fatalf("%d tries, %v", tries, err)
	}
}

// TestStoreThatStumbles: requests that fail now and then, and answers that get lost, are tried again.
func TestStoreThatStumbles(t *testing.T) {
	s := newShelf()
	var mu sync.Mutex
	n := 0
	s.fail = func(context.Context, string, string) error {
		mu.Lock()
		defer mu.Unlock()
		if n++; n%3 == 0 {
			return errors.New("stumbled")
		}
		return nil
	}
	d := Open(s.bucket(t), Options{Backoff: time.Microsecond, Attempts: 20})
	m := make(image, 12*ChunkSize).fill(0, 12*ChunkSize, 1)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	mustBe(t, d, ix, m)
	if err := d.Erase(t.Context(), testDisk); err != nil {
		t.Fatal(err)
	}
}

// TestLostAnswerIsNotWrittenAgain: what arrived although its answer did not is left as it is.
func TestLostAnswerIsNotWrittenAgain(t *testing.T) {
	s := newShelf()
	writes := map[string]int{}
	m := make(image, 2*ChunkSize).fill(0, 2*ChunkSize, 1)
	d := depot(s.bucket(t))
	d.opt.Workers = 1
	s.fail = func(_ context.Context, op, key string) error {
		if op != "put" {
			return nil
		}
		if writes[key]++; writes[key] == 1 {
			return errors.New("lost on the way")
		}
		return nil
	}
	save(t, d, m.source(nil, nil), metaAt(1, 0))
	for key, n := range writes {
		if n != 2 {
			t.Errorf("%s was written %d times", key, n)
		}
	}
	// A put whose object is there at the second attempt ends without a second write.
	key, body := testDisk.prefix()+"packs/x", []byte("body")
	s.fail = func(_ context.Context, op, k string) error {
		if op == "put" {
			writes[k]++
			s.objects[k] = body
			return errors.New("answer lost")
		}
		return nil
	}
	if err := d.put(t.Context(), key, body); err != nil || writes[key] != 1 {
		t.Fatalf("%d writes, %v", writes[key], err)
	}
}

// TestSlowStoreEndsWithTheDeadline: the caller's time is kept, and that is no loss of data.
func TestSlowStoreEndsWithTheDeadline(t *testing.T) {
	s := newShelf()
	hang := false
	s.fail = func(ctx context.Context, _, _ string) error {
		if hang {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}
	d := Open(s.bucket(t), Options{Backoff: time.Microsecond, Attempts: 2, Timeout: time.Millisecond})
	m := make(image, 8*ChunkSize).fill(0, 8*ChunkSize, 1)
	ix, _ := save(t, depot(s.bucket(t)), m.source(nil, nil), metaAt(1, 0))
	hang = true
	for what, do := range map[string]func(context.Context) error{
		"save": func(ctx context.Context) error {
			_, _, err := d.Save(ctx, testDisk, testKey, m.source(nil, nil), metaAt(1, 0))
			return err
		},
		"load":   func(ctx context.Context) error { _, err := d.Load(ctx, testDisk, testKey, ix.Info().ID); return err },
		"list":   func(ctx context.Context) error { _, err := d.Snapshots(ctx, testDisk, ix.Info().ID); return err },
		"verify": func(ctx context.Context) error { _, err := d.Verify(ctx, testDisk, ix.Info().ID, "", 0); return err },
		"erase":  func(ctx context.Context) error { return d.Erase(ctx, testDisk) },
	} {
		if err := do(t.Context()); !errs.Is(err, errkind.Unavailable) {
			t.Errorf("%s: %v", what, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
		if err := do(ctx); !errs.Is(err, errkind.Unavailable) {
			t.Errorf("%s with a deadline: %s %v", what, errs.Kind(err), err)
		}
		cancel()
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if err := do(ctx); !errs.Is(err, errkind.Canceled) {
			t.Errorf("%s canceled: %s %v", what, errs.Kind(err), err)
		}
	}
}

// TestUploadsSlowerThanReading: a save whose buffers are all on their way waits for one, and goes on.
func TestUploadsSlowerThanReading(t *testing.T) {
	s := newShelf()
	waiting := make(chan struct{}, buffers)
	s.fail = func(_ context.Context, op, key string) error {
		if op != "put" || !strings.Contains(key, "packs/") {
			return nil
		}
		select {
		case waiting <- struct{}{}:
			return nil
		default:
		}
		for range 1000 { // until every buffer is taken and the next chunk waits
			runtime.Gosched()
		}
		return nil
	}
	d := depot(s.bucket(t))
	d.packSize = 300
	m := make(image, 200*ChunkSize)
	for pos := range 200 {
		m.fill(pos*ChunkSize, 64, uint64(pos))
	}
	ix, st := save(t, d, m.source(nil, nil), metaAt(1, 0))
	if st.Objects < 20 {
		t.Fatalf("%+v", st)
	}
	mustBe(t, d, ix, m)
}

// damage is every way in which an object goes bad.
var damage = map[string]func(s *shelf, key string){
	"missing":   func(s *shelf, key string) { delete(s.objects, key) },
	"empty":     func(s *shelf, key string) { s.objects[key] = nil },
	"truncated": func(s *shelf, key string) { s.objects[key] = s.objects[key][:len(s.objects[key])/2] },
	"flipped": func(s *shelf, key string) {
		s.objects[key] = bytes.Clone(s.objects[key])
		s.objects[key][len(s.objects[key])/2] ^= 4
	},
}

// TestDamagedObjectIsNeverHandedOut: restore says DataLoss and names the object; verify finds it
// without a key and names the snapshots that need it.
func TestDamagedObjectIsNeverHandedOut(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	d.packSize = 3 * ChunkSize
	m := make(image, 12*ChunkSize).fill(0, 12*ChunkSize, 1)
	first, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	was := bytes.Clone(m)
	m.fill(0, ChunkSize, 2)
	head, _ := save(t, d, m.source(was, first), metaAt(1, time.Minute))
	for _, key := range s.keys("") {
		for how, spoil := range damage {
			good := s.objects[key]
			spoil(s, key)
			fresh := depot(s.bucket(t))
			var hit []string
			for _, ix := range []*Index{head, first} {
				got, err := fresh.Load(t.Context(), testDisk, testKey, ix.Info().ID)
				if err == nil {
					_, err = content(t, fresh, got)
				}
				if err == nil {
					continue
				}
				hit = append(hit, ix.Info().ID)
				if !errs.Is(err, errkind.DataLoss) || !strings.Contains(err.Error(), key) && !strings.Contains(err.Error(), ix.Info().ID) ||
					!strings.Contains(err.Error(), "nothing was handed out") || strings.Contains(err.Error(), "\n") {
					t.Errorf("%s %s: %v", how, key, err)
				}
			}
			v, err := fresh.Verify(t.Context(), testDisk, head.Info().ID, "", 0)
			if err != nil || len(v.Damaged) != 1 || !strings.HasSuffix(key, v.Damaged[0].Object) || !slices.Equal(v.Damaged[0].Snapshots, hit) {
				t.Errorf("%s %s: verify says %+v, %v; restore hit %v", how, key, v, err, hit)
			}
			s.objects[key] = good
		}
	}
}

func TestVerifyGoesOnWhereItStopped(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	d.packSize = ChunkSize
	m := make(image, 12*ChunkSize).fill(0, 12*ChunkSize, 1)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	objects, calls := 0, 0
	for after := ""; ; calls++ {
		v, err := d.Verify(t.Context(), testDisk, ix.Info().ID, after, 1)
		if err != nil || v.Objects != 1 || len(v.Damaged) > 0 {
			t.Fatalf("%+v, %v", v, err)
		}
		objects += v.Objects
		if after = v.Next; after == "" {
			break
		}
	}
	if objects != len(s.keys("")) || calls+1 != objects {
		t.Fatalf("%d objects in %d calls", objects, calls+1)
	}
}

func TestNoRoomForTheRestoredDisk(t *testing.T) {
	d := depot(newShelf().bucket(t))
	m := make(image, 3*ChunkSize).fill(0, 3*ChunkSize, 1)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no /dev/full here:", err)
	}
	defer full.Close()
	// Devices cannot be truncated, so this takes the writing part alone.
	k, err := deriveKeys(testDisk, testKey)
	if err != nil {
		t.Fatal(err)
	}
	r := &restorer{d: d, ctx: t.Context(), keys: k, ix: ix, dst: full}
	if err := r.bring(parts(ix.table)[0], &scratch{}); !errs.Is(err, errkind.NoCapacity) {
		t.Fatal(err)
	}
}

func TestProgressOnlyGrows(t *testing.T) {
	d := depot(newShelf().bucket(t))
	d.packSize = 2 * ChunkSize
	m := make(image, 40*ChunkSize).fill(3*ChunkSize, 30*ChunkSize, 1)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("what was here before"); err != nil {
		t.Fatal(err)
	}
	last, calls := uint64(0), 0
	err = d.Restore(t.Context(), testKey, ix, f, func(done, total uint64) {
		if done <= last || total != 30*ChunkSize {
			t.Errorf("%d of %d after %d", done, total, last)
		}
		last = done
		calls++
	})
	if err != nil || last != 30*ChunkSize || calls < 2 {
		t.Fatalf("%d in %d calls, %v", last, calls, err)
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil || st.Size != 40*ChunkSize || st.Blocks*512 > 31*ChunkSize {
		t.Fatalf("%d bytes, %d blocks, %v", st.Size, st.Blocks, err)
	}
}

func TestRewindToWhatIsNotKept(t *testing.T) {
	d := depot(newShelf().bucket(t))
	m := make(image, ChunkSize).fill(0, 100, 1)
	head, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	if _, err := d.Rewind(t.Context(), testDisk, testKey, head, idOf([20]byte{}), metaAt(1, 1)); !errs.Is(err, errkind.NotFound) {
		t.Error(err)
	}
	if _, err := d.Rewind(t.Context(), testDisk, testKey, nil, idOf([20]byte{}), metaAt(1, 1)); !errs.Is(err, errkind.Invalid) {
		t.Error(err)
	}
	ix, err := d.Rewind(t.Context(), testDisk, testKey, head, head.Info().ID, metaAt(1, time.Minute))
	if err != nil || ix.Info().Parent != head.Info().ID {
		t.Fatal(err)
	}
	mustBe(t, d, ix, m)
}
