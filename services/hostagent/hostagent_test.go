package hostagent

import (
	"bytes"
	"crypto/rand"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

func resume(r *rig, last *corev1.SessionRef) func(*hostv1.WakeRequest) {
	return func(w *hostv1.WakeRequest) {
		w.Fresh, w.Manifest, w.LastActiveEpoch = false, r.sched.head(last), last.GetEpoch()
	}
}

func TestWakeWorkSleepResumeDelete(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	one := ref("ann", 5, 6)
	reply := r.mustWake(one, nil)
	if reply.GetOrigin() != corev1.Origin_ORIGIN_CREATED {
		t.Errorf("origin %s", reply.GetOrigin())
	}
	if got := stepNames(reply.GetTiming()); !strings.Contains(got, "host.disk.attach") || !strings.Contains(got, "host.driver.create") || !strings.Contains(got, "host.guest.hello") {
		t.Errorf("steps %s", got)
	}
	again := r.mustWake(one, nil)
	if again.GetTiming().GetTotal().AsDuration() != reply.GetTiming().GetTotal().AsDuration() {
		t.Error("a repeated wake did not give the stored answer")
	}
	c := r.client(one)
	if o := c.exec("x1", "sh", "-c", "echo out; echo err >&2; exit 3"); string(o.stdout) != "out\n" || string(o.stderr) != "err\n" || o.exit.GetCode() != 3 {
		t.Errorf("exec gave %q %q %v", o.stdout, o.stderr, o.exit)
	}
	cp := c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Checkpoint{Checkpoint: &boxv1.Checkpoint{}}})
	if m := cp.reply.GetResult().GetManifest(); m.GetId() == "" || r.sched.head(one) != m.GetId() {
		t.Errorf("checkpoint %v, head %q", m, r.sched.head(one))
	}
	r.sleepWhenIdle(one)
	slept, err := r.sleep(one, time.Now(), false) // again: the stored answer
	if err != nil || slept.GetBusy() || slept.GetManifest().GetId() == "" {
		t.Fatalf("sleep: %v %v", slept, err)
	}
	if drv.count() != 0 {
		t.Errorf("%d sandboxes are left", drv.count())
	}
	if m := r.sched.head(one); m != slept.GetManifest().GetId() {
		t.Errorf("committed head %q, answered %q", m, slept.GetManifest().GetId())
	}
	if _, err := r.wake(one, nil); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("a wake of a finished epoch gave %v", err)
	}
	r.sched.set(one, corev1.State_STATE_ASLEEP)
	two := ref("ann", 5, 9)
	reply = r.mustWake(two, resume(r, one))
	if reply.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
		t.Errorf("origin %s", reply.GetOrigin())
	}
	if _, err := c.open(execOp("x2", "true")); err == nil {
		t.Error("a grant of the old epoch opened a stream")
	}
	if err := r.delete(two); err != nil {
		t.Fatal(err)
	}
	if err := r.delete(two); err != nil {
		t.Fatalf("a second delete: %v", err)
	}
	inv, _ := r.disks.List()
	if drv.count() != 0 || len(inv.Disks) != 0 {
		t.Errorf("left after the delete: %d sandboxes, %d disks", drv.count(), len(inv.Disks))
	}
}

func stepNames(t *corev1.Timing) string {
	var names []string
	for _, s := range t.GetSteps() {
		names = append(names, s.GetName())
	}
	return strings.Join(names, " ")
}

// TestAnOldDiskIsNeverReplacedByAFreshOne: a wake that cannot have the newest disk is refused.
func TestAnOldDiskIsNeverReplacedByAFreshOne(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	_, err := r.wake(one, func(w *hostv1.WakeRequest) {
		w.Fresh, w.Manifest, w.LastActiveEpoch = false, "m1", &corev1.Stamp{Incarnation: 1, Index: 3}
	})
	if !errs.Is(err, errkind.NotFound) {
		t.Errorf("a resume without a disk gave %v", err)
	}
	r.mustWake(one, nil)
	if _, err := r.wake(ref("ann", 5, 5), nil); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("an older epoch gave %v", err)
	}
}

// TestSleepIsRefusedWhileBusy: a running exec keeps the session awake, attached or not.
func TestSleepIsRefusedWhileBusy(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	s := c.mustOpen(execOp("x1", "sh", "-c", "read x; exit 0"))
	s2 := c.mustOpen(execOp("x2", "sleep", "1"))
	before := time.Now()
	if got, err := r.sleep(one, before, false); err != nil || !got.GetBusy() {
		t.Fatalf("sleep while an exec runs: %v %v", got, err)
	}
	if _, err := s.drain(); err != nil { // its stdin is /dev/null, so it ends by itself
		t.Fatal(err)
	}
	s2.send(&boxv1.Frame{Body: &boxv1.Frame_Cancel{Cancel: &boxv1.Cancel{}}})
	if got, err := r.sleep(one, time.Now(), false); err != nil || !got.GetBusy() {
		t.Fatalf("sleep while a detached exec runs: %v %v", got, err)
	}
	act, err := bus.InvokeHost[*hostv1.ActivityReply](r.context(), r.lifecycle(), testHost, "activity", &hostv1.ActivityRequest{Session: one})
	if err != nil || !act.GetBusy() {
		t.Errorf("activity: %v %v", act, err)
	}
	eventually(t, 20*time.Second, "the end of the detached exec is noticed", func() bool {
		act, err := bus.InvokeHost[*hostv1.ActivityReply](r.context(), r.lifecycle(), testHost, "activity", &hostv1.ActivityRequest{Session: one})
		return err == nil && !act.GetBusy()
	})
	if got, err := r.sleep(one, before, false); err != nil || !got.GetBusy() {
		t.Errorf("sleep with an old idle time: %v %v", got, err)
	}
	if got, err := r.sleep(one, time.Now(), false); err != nil || got.GetBusy() {
		t.Errorf("sleep when idle: %v %v", got, err)
	}
}

// TestSleepAndOpeningRace: whatever the order, work is never admitted to a session that sleeps.
func TestSleepAndOpeningRace(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	last := ref("ann", 5, 6)
	r.mustWake(last, nil)
	for i := range 15 {
		c := r.client(last)
		result := make(chan error, 1)
		go func() {
			s, err := c.open(execOp("x1", "true"))
			if err == nil {
				var o outcomeOf
				if o, err = s.drain(); err == nil && o.exit.GetCode() != 0 {
					t.Errorf("exit %v", o.exit)
				}
			}
			result <- err
		}()
		time.Sleep(time.Duration(i%5) * 200 * time.Microsecond)
		got, err := r.sleep(last, time.Now(), false)
		opened := <-result
		if err != nil {
			t.Fatal(err)
		}
		if got.GetBusy() && opened != nil {
			t.Errorf("refused as busy, but the opening failed too: %v", opened)
		}
		if !got.GetBusy() {
			next := ref("ann", 5, uint64(100+i))
			r.mustWake(next, resume(r, last))
			last = next
		}
	}
}

func TestFiles(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	dir := t.TempDir()
	data := make([]byte, 3<<20+17)
	_, _ = rand.Read(data)
	path := filepath.Join(dir, "a", "big")
	res, err := c.upload(path, data)
	if err != nil || res.GetBytes() != uint64(len(data)) || res.GetFile().GetSize() != uint64(len(data)) {
		t.Fatalf("upload: %v %v", res, err)
	}
	got, err := c.download(path)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("download of %d bytes, %v", len(got), err)
	}
	op := func(o *boxv1.Operation) (*boxv1.Result, error) {
		s, err := c.open(o)
		if err != nil {
			return nil, err
		}
		return s.reply.GetResult(), nil
	}
	for _, step := range []*boxv1.Operation{
		{Op: &boxv1.Operation_MakeDir{MakeDir: &boxv1.MakeDir{Path: dir + "/d/e", Parents: true, Mode: 0o750}}},
		{Op: &boxv1.Operation_Move{Move: &boxv1.Move{From: path, To: dir + "/d/e/moved"}}},
	} {
		if _, err := op(step); err != nil {
			t.Fatal(err)
		}
	}
	st, err := op(&boxv1.Operation{Op: &boxv1.Operation_Stat{Stat: &boxv1.Stat{Path: dir + "/d/e/moved"}}})
	if err != nil || st.GetFile().GetKind() != "file" || st.GetFile().GetPath() != dir+"/d/e/moved" {
		t.Errorf("stat: %v %v", st, err)
	}
	ls, err := op(&boxv1.Operation{Op: &boxv1.Operation_ListDir{ListDir: &boxv1.ListDir{Path: dir + "/d"}}})
	if err != nil || len(ls.GetEntries()) != 1 || ls.GetEntries()[0].GetPath() != "e" || ls.GetEntries()[0].GetKind() != "dir" {
		t.Errorf("list: %v %v", ls, err)
	}
	if _, err := op(&boxv1.Operation{Op: &boxv1.Operation_Remove{Remove: &boxv1.Remove{Path: dir + "/d", Recursive: true}}}); err != nil {
		t.Error(err)
	}
	if _, err := c.download(dir + "/d/e/moved"); kindIn(err) != "not_found" {
		t.Errorf("reading a removed file: %v", err)
	}
	info, err := op(&boxv1.Operation{Op: &boxv1.Operation_Info{Info: &boxv1.Info{}}})
	if err != nil || !strings.Contains(info.GetPlaceJson(), `"network": "none"`) {
		t.Errorf("info: %v %v", info, err)
	}
}

func TestWatchDoesNotKeepAwake(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	dir := t.TempDir()
	s := c.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Watch{Watch: &boxv1.Watch{Path: dir}}})
	if _, err := c.upload(dir+"/new", []byte("x")); err != nil {
		t.Fatal(err)
	}
	f, err := s.recv(5 * time.Second)
	if err != nil || f.GetWatchEvent() == nil {
		t.Fatalf("watch: %v %v", f, err)
	}
	r.sleepWhenIdle(one) // the watch stays open meanwhile
	for {
		f, err := s.recv(5 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if x := f.GetFailure(); x != nil {
			if x.GetKind() != "unavailable" {
				t.Errorf("the watch ended with %v", x)
			}
			return
		}
	}
}

func (r *rig) lifecycle() *bus.Conn {
	if r.lc == nil {
		conn, err := r.bus.Connect(r.context(), subjects.Service("lifecycle"))
		must(r.t, err)
		r.t.Cleanup(conn.Close)
		r.lc = conn
	}
	return r.lc
}

// sleepWhenIdle puts a session to sleep once it is idle, as lifecycle does.
func (r *rig) sleepWhenIdle(ref *corev1.SessionRef) {
	r.t.Helper()
	eventually(r.t, 10*time.Second, "the session is idle and sleeps", func() bool {
		got, err := r.sleep(ref, time.Now(), false)
		if err != nil {
			r.t.Fatalf("sleep: %v", err)
		}
		return !got.GetBusy()
	})
}
