package archive

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// model is a scheduler, two hosts and one store. An owner that was replaced does not notice: it
// goes on to write, save, commit in vain and sweep with what it knows.
type model struct {
	t     *testing.T
	shelf *shelf
	now   time.Time
	keep  Keep

	head    string // what the scheduler has committed
	epoch   uint64
	owner   *machine
	hosts   [2]*machine
	content map[string]image // of every manifest that may ever become the head
	scratch *os.File
}

type machine struct {
	d        *Depot
	epoch    uint64
	disk     image
	base     *Index // the head that this host knows
	was      image  // the disk at base
	inFlight *Index // proposed, and its commit unknown
	shot     image
	crash    int // steps until the next call fails; 0: never
}

var errCrash = errors.New("killed")

func newModel(t *testing.T, r *rapid.T) *model {
	m := &model{t: t, shelf: newShelf(), now: day0, content: map[string]image{}, epoch: 1, keep: defaults}
	if rapid.Bool().Draw(r, "short") {
		m.keep = Keep{All: 2 * time.Minute}
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "scratch"))
	if err != nil {
		t.Fatal(err)
	}
	m.scratch = f
	for i := range m.hosts {
		h := &machine{disk: make(image, 10*ChunkSize)}
		h.d = Open(m.shelf.bucket(t), Options{Backoff: time.Microsecond, Attempts: 2, Workers: 1, Fault: func(string) error {
			if h.crash > 0 {
				if h.crash--; h.crash == 0 {
					return errCrash
				}
			}
			return nil
		}})
		h.d.packSize = 700
		m.hosts[i] = h
	}
	m.owner = m.hosts[0]
	m.owner.epoch = 1
	return m
}

func (m *model) close() { _ = m.scratch.Close(); _ = os.Remove(m.scratch.Name()) }

func (m *model) meta(h *machine) Meta {
	return Meta{Epoch: ids.Epoch{Incarnation: 1, Index: h.epoch}, TakenAt: m.now, Image: "i", Keep: m.keep}
}

func (m *model) pass(r *rapid.T) {
	step := rapid.SampledFrom([]time.Duration{time.Minute, time.Minute, 20 * time.Minute, 5 * time.Hour, 50 * time.Hour, -3 * time.Hour}).Draw(r, "passes")
	m.now = m.now.Add(step)
}

func (h *machine) write(r *rapid.T) {
	for range rapid.IntRange(1, 3).Draw(r, "writes") {
		pos := rapid.IntRange(0, 9).Draw(r, "chunk") * ChunkSize
		if rapid.IntRange(0, 3).Draw(r, "what") == 0 {
			clear(h.disk[pos : pos+ChunkSize])
		} else {
			h.disk.fill(pos, 128, rapid.Uint64Range(0, 30).Draw(r, "seed"))
		}
	}
}

func (m *model) save(h *machine) {
	if h.epoch == 0 || h.inFlight != nil && !m.commit(h, false) {
		return
	}
	shot := bytes.Clone(h.disk)
	ix, _, err := h.d.Save(context.Background(), testDisk, testKey, image(shot).source(h.was, h.base), m.meta(h))
	if err != nil {
		if !errors.Is(err, errCrash) {
			m.t.Fatal(err)
		}
		return
	}
	if ix == h.base {
		return
	}
	m.content[ix.info.ID] = shot
	h.inFlight, h.shot = ix, shot
}

// commit proposes what is in flight; the answer may be lost. A host takes only a yes for an answer:
// a refusal may be that of a second try whose first one was accepted.
func (m *model) commit(h *machine, lost bool) bool {
	if h.inFlight == nil {
		return true
	}
	if info := h.inFlight.info; m.head != info.ID {
		if h.epoch != m.epoch || m.head != info.Parent {
			return false
		}
		m.head = info.ID
	}
	if lost {
		return false
	}
	h.base, h.was, h.inFlight = h.inFlight, h.shot, nil
	return true
}

// move gives the session to a host, which knows nothing but the head.
func (m *model) move(h *machine) {
	m.epoch++
	h.epoch, h.crash, h.inFlight, h.base, h.was = m.epoch, 0, nil, nil, nil
	m.owner = h
	if m.head == "" {
		clear(h.disk)
		return
	}
	ix, err := h.d.Load(context.Background(), testDisk, testKey, m.head)
	if err != nil {
		m.t.Fatal(err)
	}
	h.base, h.was = ix, bytes.Clone(m.content[m.head])
	h.disk = bytes.Clone(h.was)
}

func (m *model) rewind(r *rapid.T, h *machine) {
	if h.base == nil || h.inFlight != nil {
		return
	}
	all := append([]Info{h.base.info}, h.base.history...)
	to := rapid.SampledFrom(all).Draw(r, "to").ID
	ix, err := h.d.Rewind(context.Background(), testDisk, testKey, h.base, to, m.meta(h))
	if err != nil {
		if h == m.owner && !errors.Is(err, errCrash) {
			m.t.Fatal(err)
		}
		return // what an old owner knows may be gone
	}
	m.content[ix.info.ID] = m.content[to]
	h.inFlight, h.shot = ix, bytes.Clone(m.content[to])
	h.disk = bytes.Clone(h.shot)
}

func (m *model) sweep(r *rapid.T, h *machine) {
	head, also := "", []string{}
	if h.base != nil {
		head = h.base.info.ID
	}
	if h.inFlight != nil {
		also = append(also, h.inFlight.info.ID)
	}
	left := rapid.IntRange(0, 40).Draw(r, "alive for")
	alive := func() error {
		if left--; left < 0 {
			return errs.E("", errkind.StaleEpoch, "", "gone")
		}
		return nil
	}
	_, err := h.d.Sweep(context.Background(), testDisk, ids.Epoch{Incarnation: 1, Index: h.epoch}, head, alive, also...)
	if err != nil && h == m.owner && !errors.Is(err, errCrash) && !errs.Is(err, errkind.StaleEpoch) && !errs.Is(err, errkind.Invalid) {
		m.t.Fatal(err)
	}
}

// check reads back, with nothing but the store, all that must be readable.
func (m *model) check() {
	need := map[string]bool{}
	roots := []string{m.head}
	if m.owner.inFlight != nil {
		roots = append(roots, m.owner.inFlight.info.ID)
	}
	fresh := depot(m.shelf.bucket(m.t))
	for _, root := range roots {
		if root == "" {
			continue
		}
		list, err := fresh.Snapshots(context.Background(), testDisk, root)
		if err != nil {
			m.t.Fatalf("list from %s: %v", root, err)
		}
		for _, s := range list {
			need[s.ID] = true
		}
	}
	for id := range need {
		ix, err := fresh.Load(context.Background(), testDisk, testKey, id)
		if err != nil {
			m.t.Fatalf("head %s, load %s: %v", m.head, id, err)
		}
		if err := fresh.Restore(context.Background(), testKey, ix, m.scratch, nil); err != nil {
			m.t.Fatalf("head %s, restore %s: %v", m.head, id, err)
		}
		got := make([]byte, ix.info.Size)
		if _, err := m.scratch.ReadAt(got, 0); err != nil || !bytes.Equal(got, m.content[id]) {
			m.t.Fatalf("snapshot %s differs, %v", id, err)
		}
	}
}

// TestSweepNeverTakesWhatIsNeeded: saves, commits with lost answers, owners that were replaced and
// go on, rewinds, thinning, clocks that jump, calls killed at any step, and sweeps, in any order.
func TestSweepNeverTakesWhatIsNeeded(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		m := newModel(t, r)
		defer m.close()
		for range rapid.IntRange(5, 40).Draw(r, "steps") {
			h := m.owner
			if rapid.IntRange(0, 3).Draw(r, "who") == 0 {
				h = m.hosts[rapid.IntRange(0, 1).Draw(r, "host")]
			}
			if h.epoch == 0 {
				continue
			}
			h.crash = 0
			if rapid.IntRange(0, 4).Draw(r, "killed") == 0 {
				h.crash = rapid.IntRange(1, 12).Draw(r, "at")
			}
			m.pass(r)
			switch rapid.IntRange(0, 9).Draw(r, "what") {
			case 0, 1, 2, 3:
				h.write(r)
				m.save(h)
				m.commit(h, rapid.IntRange(0, 3).Draw(r, "lost") == 0)
			case 4:
				m.save(h)
			case 5:
				m.commit(h, false)
			case 6:
				m.rewind(r, h)
			case 7:
				m.move(m.hosts[rapid.IntRange(0, 1).Draw(r, "to host")])
			default:
				m.sweep(r, h)
				m.check()
			}
		}
		m.check()
	})
}

// TestSweepTakesAllThatIsDead: after a sweep nothing is left but what the head and its history need.
func TestSweepTakesAllThatIsDead(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	m := make(image, 8*ChunkSize)
	var ix *Index
	var base image
	meta := metaAt(1, 0)
	meta.Keep = Keep{}
	for n := range 30 {
		m.fill((n%8)*ChunkSize, 1000, uint64(n))
		meta.TakenAt = day0.Add(time.Duration(n) * time.Hour)
		ix, _ = save(t, d, m.source(base, ix), meta)
		base = bytes.Clone(m)
	}
	lost, _ := save(t, d, make(image, ChunkSize).fill(0, 100, 99).source(nil, nil), metaAt(1, 0)) // never committed
	newer, _ := save(t, d, make(image, ChunkSize).fill(0, 100, 98).source(nil, nil), metaAt(3, 0))
	dead := len(s.keys("manifests/")) - 1 - len(ix.history) - 2
	alive := func() error { return nil }
	out, err := d.Sweep(t.Context(), testDisk, ids.Epoch{Incarnation: 1, Index: 2}, ix.info.ID, alive, lost.info.ID)
	if err != nil || out.Manifests != dead || out.Packs == 0 || out.Bytes == 0 || out.Left != 2 {
		t.Fatalf("%+v, %v", out, err)
	}
	mustBe(t, d, lost, make(image, ChunkSize).fill(0, 100, 99))
	mustBe(t, d, newer, make(image, ChunkSize).fill(0, 100, 98))
	if _, err := d.Sweep(t.Context(), testDisk, ids.Epoch{Incarnation: 1, Index: 3}, ix.info.ID, alive); err != nil {
		t.Fatal(err)
	}
	needed, err := d.mark(t.Context(), testDisk, []string{ix.info.ID})
	if err != nil || len(needed) != len(s.keys("")) {
		t.Fatalf("%d are needed, %d are there, %v", len(needed), len(s.keys("")), err)
	}
	if len(ix.history) != keepNewest {
		t.Fatalf("%d in the history", len(ix.history))
	}
}

// TestSweepNeedsACompleteAnswer: a manifest of the history that is missing, damaged or out of reach
// stops the sweep before it deletes anything.
func TestSweepNeedsACompleteAnswer(t *testing.T) {
	s := newShelf()
	m := make(image, 4*ChunkSize).fill(0, 1000, 1)
	first, _ := save(t, depot(s.bucket(t)), m.source(nil, nil), metaAt(1, 0))
	before := bytes.Clone(m)
	m.fill(ChunkSize, 1000, 2)
	head, _ := save(t, depot(s.bucket(t)), m.source(before, first), metaAt(1, time.Minute))
	if _, _, err := depot(s.bucket(t)).Save(t.Context(), testDisk, testKey, m.source(nil, nil), metaAt(1, 0)); err != nil {
		t.Fatal(err)
	}
	n := len(s.keys(""))
	key := testDisk.manifest(first.info.ID)
	good := s.objects[key]
	alive := func() error { return nil }
	sweep := func() error {
		_, err := depot(s.bucket(t)).Sweep(t.Context(), testDisk, ids.Epoch{Incarnation: 1, Index: 1}, head.info.ID, alive)
		return err
	}
	delete(s.objects, key)
	if err := sweep(); !errs.Is(err, errkind.DataLoss) || len(s.keys("")) != n-1 {
		t.Fatal(err)
	}
	_, front, err := openHeader(first.info.ID, good)
	if err != nil {
		t.Fatal(err)
	}
	for at := range front {
		s.objects[key] = bytes.Clone(good)
		s.objects[key][at] ^= 1
		if err := sweep(); !errs.Is(err, errkind.DataLoss) || len(s.keys("")) != n {
			t.Fatalf("flipped at %d: %v", at, err)
		}
	}
	s.objects[key] = good
	s.fail = func(_ context.Context, op, _ string) error {
		if op == "list" {
			return errors.New("away")
		}
		return nil
	}
	if err := sweep(); !errs.Is(err, errkind.Unavailable) || len(s.keys("")) != n {
		t.Fatal(err)
	}
	s.fail = nil
	if err := sweep(); err != nil || len(s.keys("")) != n-2 {
		t.Fatalf("%d of %d, %v", len(s.keys("")), n, err)
	}
	if err := depot(s.bucket(t)).Erase(t.Context(), testDisk); err != nil {
		t.Fatal(err)
	}
	if err := sweep(); !errs.Is(err, errkind.DataLoss) {
		t.Fatalf("a sweep of nothing: %v", err)
	}
}
