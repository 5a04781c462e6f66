package chaos

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// at is a time so many seconds after a fixed one.
func at(seconds float64) time.Time {
	return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(time.Duration(seconds * float64(time.Second)))
}

// book is a session in which, in epoch 6, a was saved, b written over after that, c written and not
// saved, and of d nobody knows whether it was written.
func book(s save) *ledger {
	l := newLedger()
	write := func(path, sum string, when float64) {
		l.begin(path, sum, epoch(6))
		l.done(path, at(when))
	}
	write("a", "a1", 1)
	write("b", "b1", 2)
	l.saved(at(3), s)
	write("b", "b2", 4)
	write("c", "c1", 5)
	l.begin("d", "d1", epoch(6))
	return l
}

var checkpointed = save{epoch: epoch(6)}

func back(asOf float64, e uint64) []restore { return []restore{{at(asOf), epoch(e), at(10)}} }

// TestTheLedgerFindsPlantedLosses plants one difference at a time.
func TestTheLedgerFindsPlantedLosses(t *testing.T) {
	whole := map[string]string{"a": "a1", "b": "b2", "c": "c1"}
	for name, c := range map[string]struct {
		path, sum string // planted; without a sum the file is removed
		restores  []restore
		wrong     string // empty: nothing is wrong
	}{
		"nothing":                            {"a", "a1", nil, ""},
		"an unknown write took place":        {"d", "d1", nil, ""},
		"a saved file is gone":               {"a", "", nil, "a is lost"},
		"a saved file is gone after restore": {"a", "", back(3, 7), "a is lost"},
		"even from before it was saved":      {"a", "", back(0, 7), "a is lost"},
		"other bytes":                        {"a", "a2", back(3, 7), "a has a content that was never written"},
		"another file's bytes":               {"a", "b1", back(3, 7), "a has a content that was never written"},
		"an unsaved file is gone":            {"c", "", nil, "c is lost"},
		"an unsaved file is gone, restored":  {"c", "", back(3, 7), ""},
		"an old version":                     {"b", "b1", nil, "b is lost"},
		"an old version, restored":           {"b", "b1", back(3, 7), ""},
		"no version, restored":               {"b", "", back(3, 7), "b is lost"},
		"written before the snapshot":        {"c", "", back(6, 7), "c is lost"},
		"written after the restore":          {"c", "", back(3, 6), "c is lost"},
		"a file of another life":             {"z", "z1", nil, "z is there, and was not written"},
	} {
		found := seen{maps.Clone(whole), at(20), epoch(7)}
		if found.files[c.path] = c.sum; c.sum == "" {
			delete(found.files, c.path)
		}
		wrong := strings.Join(book(checkpointed).check(found, c.restores), "\n")
		if c.wrong == "" && wrong != "" || !strings.Contains(wrong, c.wrong) {
			t.Errorf("%s: found %q, want %q", name, wrong, c.wrong)
		}
	}
}

// TestACloseSavesWhatWasThere: a close is a save like a checkpoint, but not of what a restore before it
// had taken away.
func TestACloseSavesWhatWasThere(t *testing.T) {
	for closed, wrong := range map[float64]int{9: 1, 11: 0} {
		found := seen{map[string]string{"b": "b1", "c": "c1"}, at(20), epoch(7)}
		if got := book(save{epoch(6), at(closed)}).check(found, back(0, 7)); len(got) != wrong {
			t.Errorf("a is gone after a restore at 10 and a close at %v: %v", closed, got)
		}
	}
}

// TestTheLedgerGoesOnFromWhatItFound: what was lost with notice is not missed again, and what was
// found is held to afterwards.
func TestTheLedgerGoesOnFromWhatItFound(t *testing.T) {
	l := book(checkpointed)
	if wrong := l.check(seen{map[string]string{"a": "a1", "b": "b2", "c": "c1"}, at(9), epoch(6)}, nil); wrong != nil {
		t.Fatal(wrong)
	}
	found := seen{map[string]string{"a": "a1", "b": "b1", "d": "d1"}, at(20), epoch(7)}
	for range 2 {
		if wrong := l.check(found, back(3, 7)); wrong != nil {
			t.Fatal(wrong)
		}
	}
	delete(found.files, "d")
	if wrong := l.check(found, back(3, 7)); len(wrong) != 1 {
		t.Errorf("d is gone after it was seen: %v", wrong)
	}
}

var aLife = life{"s1", ids.Generation{Incarnation: 1, Index: 5}}

func epoch(n uint64) ids.Epoch { return ids.Epoch{Incarnation: 1, Index: n} }

// TestTwoOwnersAreFound plants sandboxes of an earlier epoch that can run after a later one is active.
func TestTwoOwnersAreFound(t *testing.T) {
	old, later := driver.ID("s1", aLife.gen, epoch(6)), driver.ID("s1", aLife.gen, epoch(7))
	for name, c := range map[string]struct {
		oldActive     bool
		oldRan        float64
		first         bool // the look comes before the events
		other         life
		double, leave int
	}{
		"stopped before":       {true, 9, false, aLife, 0, 0},
		"runs on":              {true, 10.5, false, aLife, 1, 1},
		"runs on, seen first":  {true, 10.5, true, aLife, 1, 1},
		"never was the owner":  {false, 10.5, false, aLife, 0, 1},
		"of another session":   {true, 10.5, false, life{"s2", aLife.gen}, 0, 0},
		"of another, deleted":  {true, 10.5, false, life{"s1", ids.Generation{Incarnation: 1, Index: 4}}, 0, 0},
		"seen first, in order": {true, 9, true, aLife, 0, 0},
	} {
		o := newOwners()
		look := func() {
			o.ran(driver.ID(c.other.session, c.other.gen, epoch(6)), "host-1", at(c.oldRan))
			o.ran(later, "host-2", at(11))
		}
		if c.first {
			look()
		}
		o.placed(c.other, epoch(6), time.Time{})
		if c.oldActive {
			o.placed(c.other, epoch(6), at(1))
		}
		o.placed(aLife, epoch(7), time.Time{})
		o.placed(aLife, epoch(7), at(10))
		if !c.first {
			look()
		}
		if got := o.double(); len(got) != c.double {
			t.Errorf("%s: double owners %v, want %d (sandboxes %s, %s)", name, got, c.double, old, later)
		}
		if got := o.double(); len(got) != 0 {
			t.Errorf("%s: told twice: %v", name, got)
		}
		if got := o.leftovers(at(10)); len(got) != c.leave {
			t.Errorf("%s: left over %v, want %d", name, got, c.leave)
		}
	}
}

// TestALiveCgroupCanRunAndAFrozenOneCannot looks at a real one.
func TestALiveCgroupCanRunAndAFrozenOneCannot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: cgroups cannot be made")
	}
	parent := cgroupsOf([]string{"berth-chaos-" + strconv.Itoa(os.Getpid())})[0]
	dir := filepath.Join(parent, "bsandbox", "box")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Skipf("cgroups cannot be made here: %v", err)
	}
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for _, d := range []string{dir, filepath.Dir(dir), parent} {
			for end := time.Now().Add(5 * time.Second); os.Remove(d) != nil && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			}
		}
	}()
	seen := func() bool {
		o := newOwners()
		o.look("host-1", parent)
		return len(o.all) > 0 && o.all["bsandbox"] != nil
	}
	if seen() {
		t.Error("an empty cgroup counts as able to run")
	}
	put := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(cmd.Process.Pid))
	if !seen() {
		t.Error("a living process is not seen")
	}
	file, on, off := filepath.Join(dir, "..", "freezer.state"), "FROZEN", "THAWED"
	if _, err := os.Stat(file); err != nil {
		file, on, off = filepath.Join(dir, "..", "cgroup.freeze"), "1", "0"
	}
	put(file, on)
	for end := time.Now().Add(5 * time.Second); seen() && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
	}
	if seen() {
		t.Error("a frozen one counts as able to run")
	}
	put(file, off)
}

// TestDisorderInEventsIsFound plants events out of order.
func TestDisorderInEventsIsFound(t *testing.T) {
	ev := func(rev, gen, e uint64, detail any) sdk.Event {
		b := &schedulerv1.Event{Revision: rev, At: timestamppb.New(at(float64(rev))), Session: &corev1.SessionRef{Session: "s1",
			Generation: &corev1.Stamp{Incarnation: 1, Index: gen}, Epoch: &corev1.Stamp{Incarnation: 1, Index: e}}}
		switch d := detail.(type) {
		case *schedulerv1.Placed:
			b.Detail = &schedulerv1.Event_Placed{Placed: d}
		case *schedulerv1.Active:
			b.Detail = &schedulerv1.Event_Active{Active: d}
		case *schedulerv1.Erased:
			b.Detail = &schedulerv1.Event_Erased{Erased: d}
		}
		return sdk.Event{Session: "s1", Revision: rev, Body: b}
	}
	placed, active, erased := &schedulerv1.Placed{Host: "host-1"}, &schedulerv1.Active{Host: "host-1", RestoredAsOf: timestamppb.New(at(0))}, &schedulerv1.Erased{}
	for name, c := range map[string]struct {
		events []sdk.Event
		wrong  int
	}{
		"in order, some twice":         {[]sdk.Event{ev(1, 5, 6, placed), ev(2, 5, 6, active), ev(1, 5, 6, placed), ev(2, 5, 6, active)}, 0},
		"a revision after a later one": {[]sdk.Event{ev(2, 5, 6, active), ev(1, 5, 6, placed)}, 1},
		"an epoch that went back":      {[]sdk.Event{ev(1, 5, 8, placed), ev(2, 5, 7, active)}, 1},
		"placed twice in one epoch":    {[]sdk.Event{ev(1, 5, 8, placed), ev(2, 5, 8, placed)}, 1},
		"erased late":                  {[]sdk.Event{ev(1, 5, 6, placed), ev(4, 9, 10, placed), ev(3, 5, 6, erased)}, 0},
	} {
		h := newHistory(newOwners())
		for _, e := range c.events {
			h.take(e)
		}
		if got := h.problems(); len(got) != c.wrong {
			t.Errorf("%s: %v", name, got)
		}
	}
	h := newHistory(newOwners())
	h.take(ev(1, 5, 6, placed))
	h.take(ev(2, 5, 6, active))
	ctx, cancel := context.WithCancel(t.Context())
	got, err := h.restoresOf(ctx, aLife, epoch(6))
	cancel()
	if err != nil || len(got) != 1 || !got[0].asOf.Equal(at(0)) || got[0].epoch != epoch(6) {
		t.Errorf("restores %v %v", got, err)
	}
	if _, err := h.restoresOf(ctx, aLife, epoch(7)); err == nil {
		t.Error("an epoch that was never told active has restores")
	}
	if left := h.unended(); len(left) != 1 {
		t.Errorf("without an end: %v", left)
	}
}
