package saver

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// steps are all places where a save can end: those of the host, of the store and of scheduler.
func saveSteps(first string) []string {
	out := []string{"key", "before " + first, "after " + first, "before propose", "after propose", "commit", "committed", "before commit head", "after commit head"}
	for _, s := range archive.Steps {
		if len(s) > 5 && s[:5] == "save." {
			out = append(out, s)
		}
	}
	return out
}

// killAt ends this life of the host at the first passage of a step; passed says whether it came.
func (w *world) killAt(step string) (passed *bool) {
	passed = new(bool)
	w.at = func(s string) error {
		if s == step || *passed { // after its death nothing happens any more
			*passed = true
			return errKilled
		}
		return nil
	}
	return passed
}

// TestKilledAtEveryStepOfASnapshot: the disk of an awake session is whole and the newest after a kill
// at any step, on its host and, from the last head, elsewhere; and the next snapshot goes on.
func TestKilledAtEveryStepOfASnapshot(t *testing.T) {
	for _, step := range saveSteps("shoot") {
		if step == "key" { // it is known from the first save
			continue
		}
		t.Run(step, func(t *testing.T) {
			w := newWorld(t)
			w.mustWake(1)
			w.write(1)
			if _, err := w.saver.Save(t.Context(), session(1)); err != nil {
				t.Fatal(err)
			}
			w.write(2)
			passed := w.killAt(step)
			_, err := w.saver.Save(t.Context(), session(1))
			if !*passed || err == nil {
				t.Fatalf("step passed: %t, error %v", *passed, err)
			}
			w.end()
			w.begin()
			w.mustWake(2)
			if got := w.holds(); got != 2 {
				t.Fatalf("the disk holds state %d, want 2", got)
			}
			w.write(3)
			if _, err := w.saver.Save(t.Context(), session(2)); err != nil {
				t.Fatalf("the next snapshot: %v", err)
			}
			w.elsewhere(3, 3)
		})
	}
}

// TestKilledAtEveryStepOfASleep: nothing that was written is lost, whether the sleep is asked for
// again or the session is opened instead.
func TestKilledAtEveryStepOfASleep(t *testing.T) {
	for _, step := range saveSteps("seal") {
		for _, again := range []string{"asked again", "opened"} {
			t.Run(step+"/"+again, func(t *testing.T) {
				w := newWorld(t)
				w.mustWake(1)
				w.write(1)
				passed := w.killAt(step)
				_, err := w.saver.Seal(t.Context(), session(1))
				if !*passed || err == nil {
					t.Fatalf("step passed: %t, error %v", *passed, err)
				}
				w.end()
				w.begin()
				if again == "asked again" {
					if _, err := w.saver.Seal(t.Context(), session(1)); err != nil {
						t.Fatalf("the sleep asked for again: %v", err)
					}
					rec, err := w.disks.Get(session(1).Key)
					if err != nil || rec.State != disk.Clean || rec.Base != w.sched.head || rec.Base == "" {
						t.Fatalf("after the sleep the record is %+v, the head %q, error %v", rec, w.sched.head, err)
					}
					w.elsewhere(2, 1)
					return
				}
				w.mustWake(2)
				if got := w.holds(); got != 1 {
					t.Fatalf("the disk holds state %d, want 1", got)
				}
			})
		}
	}
}

// TestKilledAtEveryStepOfARestore: an image that is half here is never handed out, and the next wake
// restores again.
func TestKilledAtEveryStepOfARestore(t *testing.T) {
	steps := []string{"key", "before restore", "after restore"}
	for _, s := range archive.Steps {
		if s == "load" || len(s) > 8 && s[:8] == "restore." {
			steps = append(steps, s)
		}
	}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			w := newWorld(t)
			w.mustWake(1)
			w.write(1)
			w.mustSeal(1)
			w.forget()
			passed := w.killAt(step)
			if err := w.wake(2); err == nil || !*passed {
				t.Fatalf("step passed: %t, error %v", *passed, err)
			}
			w.end()
			w.begin()
			w.mustWake(3)
			if got := w.holds(); got != 1 {
				t.Fatalf("the disk holds state %d, want 1", got)
			}
		})
	}
}

// TestASlowUploadCannotMoveTheHeadBack: a save that began in an older epoch, or on an older head, is
// refused, whoever finishes first.
func TestASlowUploadCannotMoveTheHeadBack(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	held, done := make(chan struct{}), make(chan error, 1)
	resume := make(chan struct{})
	w.at = func(step string) error {
		if step == "commit" {
			close(held)
			<-resume
		}
		return nil
	}
	go func() { _, err := w.saver.Save(context.Background(), session(1)); done <- err }()
	<-held
	w.sched.mu.Lock()
	w.sched.head, w.sched.epoch = "mnewer", session(2).Epoch // another host took over
	w.sched.mu.Unlock()
	w.at = nil
	close(resume)
	if err := <-done; !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("the old owner's commit ended with %v", err)
	}
	if w.sched.head != "mnewer" {
		t.Errorf("the head moved back to %q", w.sched.head)
	}
	if rec, err := w.disks.Get(session(1).Key); err != nil || rec.Usable("mnewer", session(2).Epoch) {
		t.Errorf("the old owner's image: %+v, usable %t, %v", rec, rec.Usable("mnewer", session(2).Epoch), err)
	}
}

// TestASleepEndsASaveUnderWay: a sleep never waits for a slow upload of an older state.
func TestASleepEndsASaveUnderWay(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	held, done := make(chan struct{}), make(chan error, 1)
	over := make(chan struct{})
	first := true
	w.at = func(step string) error {
		if step == "key" && first {
			first = false
			close(held)
			<-over
		}
		return nil
	}
	go func() { _, err := w.saver.Save(context.Background(), session(1)); done <- err }()
	<-held
	sealed := make(chan error, 1)
	go func() { _, err := w.saver.Seal(context.Background(), session(1)); sealed <- err }()
	w.ended(session(1).Key)
	close(over)
	if err := <-done; !errs.Is(err, errkind.Superseded) {
		t.Errorf("the save ended with %v", err)
	}
	if err := <-sealed; err != nil {
		t.Errorf("the sleep ended with %v", err)
	}
	w.elsewhere(2, 1)
}

// ended waits until a save under way was told to end.
func (w *world) ended(k disk.Key) { hurried(w.saver.job(k)) }

// hurried waits until somebody urgent waits.
func hurried(j *job) {
	for {
		j.mu.Lock()
		n := j.urgent
		j.mu.Unlock()
		if n > 0 {
			return
		}
	}
}

// TestASaveThatBeganBesideASleepIsEndedToo: one that waited in line, or had the turn and had not said
// yet that it may be ended, would hold up a sleep or a delete for as long as its upload takes.
func TestASaveThatBeganBesideASleepIsEndedToo(t *testing.T) {
	j := &job{turn: make(chan struct{}, 1)}
	leave, err := j.enter(t.Context(), false) // a save that has just got the turn
	if err != nil {
		t.Fatal(err)
	}
	slept := make(chan func(), 1)
	go func() {
		l, err := j.enter(context.Background(), true)
		if err != nil {
			t.Error(err)
		}
		slept <- l
	}()
	hurried(j)
	ctx, done := j.interruptible(t.Context())
	if !errs.Is(context.Cause(ctx), errkind.Superseded) {
		t.Errorf("the save goes on: %v", context.Cause(ctx))
	}
	done()
	leave()
	(<-slept)()
	ctx, done = j.interruptible(t.Context())
	defer done()
	if ctx.Err() != nil {
		t.Error("a save after the sleep is ended for it")
	}
}

// TestAnUnknownCommitIsSettledFirst: the answer of scheduler is lost; the next save asks again before
// it proposes anything, and neither manifest is lost.
func TestAnUnknownCommitIsSettledFirst(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	lost := false
	w.at = func(step string) error {
		if step == "committed" && !lost {
			lost = true
			return errs.E("commit", errkind.Deadline, "", "no answer")
		}
		return nil
	}
	if _, err := w.saver.Save(t.Context(), session(1)); !errs.Is(err, errkind.Deadline) {
		t.Fatalf("the save whose answer was lost: %v", err)
	}
	first := w.sched.head
	w.write(2)
	r, err := w.saver.Save(t.Context(), session(1))
	if err != nil || r.Parent != first {
		t.Fatalf("the next save has parent %q, want %q; error %v", r.Parent, first, err)
	}
	list, err := archive.Open(w.bucket, archive.Options{}).Snapshots(t.Context(), session(1).Disk(), w.sched.head)
	if err != nil || !slices.ContainsFunc(list, func(i archive.Info) bool { return i.ID == first }) {
		t.Errorf("the snapshots are %v, %v", list, err)
	}
}

// TestARestoreToEarlierKeepsTheStateBefore: what is brought back is the head at once, every local
// image is stale, and what was there until then can be brought back too.
func TestARestoreToEarlierKeepsTheStateBefore(t *testing.T) {
	w := newWorld(t)
	w.mustWake(1)
	w.write(1)
	first, err := w.saver.Save(t.Context(), session(1))
	if err != nil {
		t.Fatal(err)
	}
	w.write(2)
	w.mustSeal(1)
	before := w.sched.head
	w.sched.epoch = session(2).Epoch
	f, err := w.saver.Fetch(t.Context(), session(2), Wanted{Head: before, LastActive: w.sched.lastActive, Snapshot: first.ID})
	if err != nil {
		t.Fatal(err)
	}
	if f.Head != w.sched.head || f.Head == before || !f.AsOf.Equal(first.TakenAt) {
		t.Errorf("restored to %+v, the head is %q, the snapshot was taken at %s", f, w.sched.head, first.TakenAt)
	}
	w.mustWake(3)
	if got := w.holds(); got != 1 {
		t.Fatalf("the disk holds state %d, want 1", got)
	}
	w.mustSeal(3)
	w.sched.epoch = session(4).Epoch
	if _, err := w.saver.Fetch(t.Context(), session(4), Wanted{Head: w.sched.head, LastActive: w.sched.lastActive, Snapshot: before}); err != nil {
		t.Fatal(err)
	}
	w.mustWake(5)
	if got := w.holds(); got != 2 {
		t.Errorf("the state before the restore: the disk holds %d, want 2", got)
	}
}

func (w *world) mustSeal(epoch uint64) {
	w.t.Helper()
	if _, err := w.saver.Seal(context.Background(), session(epoch)); err != nil {
		w.t.Fatalf("seal: %v", err)
	}
	if err := w.saver.Stop(context.Background(), session(epoch).Key); err != nil {
		w.t.Fatal(err)
	}
}

// forget loses the host's images.
func (w *world) forget() {
	w.t.Helper()
	if err := os.RemoveAll(filepath.Join(w.dir, "sessions", session(0).Key.String())); err != nil {
		w.t.Fatal(err)
	}
}

// elsewhere checks that a host without any image gets this state from the head.
func (w *world) elsewhere(epoch uint64, state int) {
	w.t.Helper()
	if err := w.disks.Detach(context.Background(), session(0).Key); err != nil {
		w.t.Fatal(err)
	}
	w.forget()
	w.mustWake(epoch)
	if got := w.holds(); got != state {
		w.t.Errorf("another host gets state %d, want %d", got, state)
	}
}
