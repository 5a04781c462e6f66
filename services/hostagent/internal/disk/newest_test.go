package disk

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/schemas/ids"
)

// world is a session, its scheduler and the hosts that have an image of it. What a disk holds is the
// text of all that was written into it.
type world struct {
	next       uint64 // epochs and manifests
	head       string
	manifests  map[string]string
	lastActive ids.Epoch
	owner      *localDisk // that is attached, nil if nobody
	active     bool       // the owner's epoch is the last active
	hosts      [3]*localDisk
	newest     string // what the last active owner has written
	rewound    bool   // since then the head was moved to an earlier time
}

type localDisk struct {
	has  bool
	rec  Record
	text string
}

func (w *world) id() uint64 { w.next++; return w.next }

// wake wakes the session on a host as Store does, and checks what it is handed.
func (w *world) wake(t *rapid.T, d *localDisk, becomesActive, activated bool) {
	epoch := ep(w.id())
	switch {
	case d.has && d.rec.Usable(w.head, w.lastActive):
		if d.rec.Pending.ID != "" && d.rec.Pending.ID == w.head {
			d.rec = d.rec.committed(time.Time{})
		}
		want := w.newest
		if w.rewound {
			want = w.manifests[w.head]
		}
		if d.text != want && d.text != w.manifests[w.head] {
			t.Fatalf("handed out %q; the newest is %q, the head %q", d.text, want, w.manifests[w.head])
		}
		if d.rec.State == Dirty && d.text != want {
			t.Fatalf("dirty with %q, the newest is %q", d.text, want)
		}
	case w.head != "":
		*d = localDisk{has: true, text: w.manifests[w.head], rec: Record{State: Clean, Base: w.head, Epoch: w.lastActive}}
	case w.lastActive.IsZero():
		*d = localDisk{has: true, rec: Record{State: Blank}}
	default:
		return // its only disk is on another host: the scheduler waits
	}
	d.rec = d.rec.attachedFor(Want{Epoch: epoch, LastActive: w.lastActive})
	w.owner, w.active = d, false
	if !becomesActive {
		w.owner = nil
		return
	}
	w.active, w.lastActive, w.newest, w.rewound = true, epoch, d.text, false
	if activated {
		d.rec = d.rec.activated(epoch)
	}
}

func (w *world) write() {
	d := w.owner
	d.rec = d.rec.activated(w.lastActive) // before the first effect
	d.text += string(rune('a' + w.id()%26))
	w.newest = d.text
}

// propose takes a shot; the scheduler may commit it, and the host may hear of it.
func (w *world) propose(sealed, commits, heard bool) {
	d := w.owner
	if d.rec.Pending.ID != "" || sealed && d.rec.State == Clean {
		return
	}
	d.rec = d.rec.activated(w.lastActive)
	id := fmt.Sprintf("m%d", w.id())
	d.rec.Pending = Pending{ID: id, Epoch: w.lastActive, Sealed: sealed}
	if commits && w.head == d.rec.Base {
		w.head, w.manifests[id] = id, d.text
		if heard {
			d.rec = d.rec.committed(time.Time{})
		}
	}
	if sealed {
		w.owner = nil
	}
}

// TestNoOtherThanTheNewestDiskIsHandedOut: whatever is proposed, committed, lost, restored or moved,
// a local image that is usable is the newest disk; and the newest one is never called stale.
func TestNoOtherThanTheNewestDiskIsHandedOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{manifests: map[string]string{}}
		for i := range w.hosts {
			w.hosts[i] = &localDisk{}
		}
		t.Repeat(map[string]func(*rapid.T){
			"wake": func(t *rapid.T) {
				if w.owner == nil {
					w.wake(t, rapid.SampledFrom(w.hosts[:]).Draw(t, "host"), rapid.Bool().Draw(t, "active"), rapid.Bool().Draw(t, "activated"))
				}
			},
			"write": func(*rapid.T) {
				if w.owner != nil {
					w.write()
				}
			},
			"shot": func(t *rapid.T) {
				if w.owner != nil {
					w.propose(rapid.Bool().Draw(t, "sealed"), rapid.Bool().Draw(t, "commits"), rapid.Bool().Draw(t, "heard"))
				}
			},
			"hear": func(*rapid.T) { // an answer that came late
				if d := w.owner; d != nil && d.rec.Pending.ID != "" && d.rec.Pending.ID == w.head {
					d.rec = d.rec.committed(time.Time{})
				}
			},
			"die": func(*rapid.T) { w.owner = nil },
			"lose": func(t *rapid.T) {
				if d := rapid.SampledFrom(w.hosts[:]).Draw(t, "host"); d != w.owner && w.head != "" {
					d.has = false
				}
			},
			"rewind": func(t *rapid.T) {
				if w.owner == nil && w.head != "" {
					id := fmt.Sprintf("m%d", w.id())
					w.manifests[id] = w.manifests[w.head][:rapid.IntRange(0, len(w.manifests[w.head])).Draw(t, "to")]
					w.head, w.rewound = id, true
				}
			},
			"": func(t *rapid.T) {
				if d := w.owner; d != nil && w.active && !d.rec.Usable(w.head, w.lastActive) && d.rec.State != Clean {
					t.Fatalf("the owner's disk is called stale: %+v, head %q, last active %s", d.rec, w.head, w.lastActive)
				}
				if d := w.owner; d != nil && !strings.HasPrefix(d.text, w.manifests[w.head]) {
					t.Fatalf("the owner has %q, the head %q", d.text, w.manifests[w.head])
				}
			},
		})
	})
}
