// Package shelf decides what a host does with its warm sandboxes: which may be made, which one a wake
// gets, which are removed. It holds no sandbox and does no work; the time is an argument. Whoever uses it
// holds one lock around every call. It guarantees that
//
//   - no command of an older leader of the pool is taken once a newer one was heard of, until Unhear;
//   - a prepare never makes more of one template and tier than its cap, counting all that are here in
//     whatever state, until each is a session's or is gone for good;
//   - a sandbox is taken by one wake at a time, and once its claim has begun it never comes back: it is
//     that session's, or it is removed;
//   - a name that was claimed or removed is refused for longer than any command with it can be on its way.
package shelf

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Kind is what warm sandboxes are counted by.
type Kind struct {
	Template string
	Tier     string
}

func (k Kind) String() string { return k.Template + "/" + k.Tier }

// State of one sandbox.
type State string

// The states.
const (
	Preparing State = "preparing" // being made
	Ready     State = "ready"     // waits for a wake
	Taken     State = "taken"     // one wake has it, and has not touched it
	Claiming  State = "claiming"  // a session is being bound to it: there is no way back
	Claimed   State = "claimed"   // it is a session's, whose wake has not ended yet
	Retiring  State = "retiring"  // being removed; nobody gets it any more
)

// Item is one sandbox on the shelf.
type Item struct {
	Name           ids.SandboxID
	Kind           Kind
	TemplateDigest string
	// ImageRef is what the template calls its image, ImageDigest what that was when it was made.
	ImageRef    string
	ImageDigest string
	Memory      uint64
	MadeAt      time.Time
	State       State
	// Stale says why no new session would get one like it; it may still fit an older one.
	Stale string

	order uint64
	// recalled: it was retired while a wake has it, and is not put back.
	recalled bool
}

// Use is what became of the demand for one kind.
type Use struct{ Claimed, Missed uint64 }

// Refusal says why a command changes nothing.
type Refusal struct {
	Kind   errkind.Kind
	Reason string
}

func (r *Refusal) Error() string { return r.Reason }

func refuse(kind errkind.Kind, format string, args ...any) error {
	return &Refusal{Kind: kind, Reason: fmt.Sprintf(format, args...)}
}

// Times of commands. A name is remembered for longer than a command with it may be under way.
const (
	// MaxAhead is how far ahead the deadline of a prepare may lie.
	MaxAhead = 30 * time.Minute
	// Remember is how long a name that is used up is refused.
	Remember = 2 * MaxAhead
)

// Shelf is all warm sandboxes of this boot. Use New.
type Shelf struct {
	term  uint64
	items map[ids.SandboxID]*Item
	kinds map[Kind]*kind
	spent map[ids.SandboxID]end
	queue []ids.SandboxID // of spent, oldest first
	uses  map[Kind]*Use   // of every kind that has a pool, as far as this boot knows
	made  uint64
	// memory is what Memory tells.
	memory uint64
}

// kind is what is here of one kind, counted as it changes: a host may have thousands.
type kind struct {
	count, ready int
	// line is what waits, as wakes get it. What does not wait any more is dropped when a wake meets it.
	line []*Item
}

type end struct {
	at      time.Time
	claimed bool
}

// New makes an empty shelf.
func New() *Shelf {
	return &Shelf{items: map[ids.SandboxID]*Item{}, kinds: map[Kind]*kind{}, spent: map[ids.SandboxID]end{}, uses: map[Kind]*Use{}}
}

// Hear refuses a command of an older leader than the newest that was heard of. StaleEpoch, or Invalid.
func (s *Shelf) Hear(term uint64) error {
	switch {
	case term == 0:
		return refuse(errkind.Invalid, "the command names no term")
	case term < s.term:
		return refuse(errkind.StaleEpoch, "the command is of term %d, this host has heard of %d", term, s.term)
	}
	s.term = term
	return nil
}

// Unhear has any term taken next: the control plane that gave the one before is no more.
func (s *Shelf) Unhear() { s.term = 0 }

// Begin puts a sandbox on the shelf that is to be made now, unless there are cap of its kind. begun is
// false if it is there already: then it is what the same command made before. Conflict: the name is used
// up, or means another one. NoCapacity: there are as many as there may be.
func (s *Shelf) Begin(it Item, most int, now time.Time) (begun bool, err error) {
	s.forget(now)
	if have := s.items[it.Name]; have != nil {
		switch {
		case have.Kind != it.Kind || have.TemplateDigest != it.TemplateDigest:
			return false, refuse(errkind.Conflict, "%s is of template %s", it.Name, have.Kind)
		case have.State == Preparing || have.State == Ready:
			return false, nil
		}
		return false, refuse(errkind.Conflict, "%s is %s; a name is used once", it.Name, have.State)
	}
	if e, ok := s.spent[it.Name]; ok {
		return false, refuse(errkind.Conflict, "%s was %s; a name is used once", it.Name, e.word())
	}
	s.Pooled(it.Kind)
	if n := s.Count(it.Kind); n >= most {
		return false, refuse(errkind.NoCapacity, "%d of %s are here already, and %d may be", n, it.Kind, most)
	}
	s.made++
	it.order = s.made
	s.items[it.Name] = &it
	s.kind(it.Kind).count++
	s.move(&it, Preparing)
	return true, nil
}

func (s *Shelf) kind(k Kind) *kind {
	if s.kinds[k] == nil {
		s.kinds[k] = &kind{}
	}
	return s.kinds[k]
}

// move changes a sandbox's state, and the counts with it.
func (s *Shelf) move(it *Item, to State) {
	k := s.kind(it.Kind)
	if it.State == Ready {
		k.ready--
	}
	if it.State.idle() {
		s.memory -= it.Memory
	}
	it.State = to
	if to == Ready {
		k.ready++
	}
	if to.idle() {
		s.memory += it.Memory
	}
}

// drop takes a sandbox out of everything.
func (s *Shelf) drop(it *Item) {
	s.move(it, "")
	delete(s.items, it.Name)
	if k := s.kinds[it.Kind]; k.count > 1 {
		k.count--
	} else {
		delete(s.kinds, it.Kind)
	}
}

// idle: no session has it or is about to.
func (s State) idle() bool { return s == Preparing || s == Ready || s == Retiring }

func (e end) word() string {
	if e.claimed {
		return "claimed"
	}
	return "removed"
}

// Pooled notes that there is a pool of a kind.
func (s *Shelf) Pooled(k Kind) *Use {
	if s.uses[k] == nil {
		s.uses[k] = &Use{}
	}
	return s.uses[k]
}

// HasPool reports whether there is a pool of a kind, for all that this boot knows.
func (s *Shelf) HasPool(k Kind) bool { return s.uses[k] != nil }

// Count is how many of a kind are on the shelf. One that is claimed counts until its wake has ended: that
// may fail yet, and then it is to be removed like others.
func (s *Shelf) Count(k Kind) int {
	if s.kinds[k] == nil {
		return 0
	}
	return s.kinds[k].count
}

// Made says that a sandbox waits now. False if it is to be removed instead: it was retired meanwhile.
func (s *Shelf) Made(name ids.SandboxID, imageDigest string, now time.Time) bool {
	it := s.items[name]
	if it == nil || it.State != Preparing {
		return false
	}
	it.ImageDigest, it.MadeAt = imageDigest, now
	s.move(it, Ready)
	k := s.kind(it.Kind)
	k.line = append(k.line, it)
	return true
}

// Take gives one wake the best of a kind that has the image and fits: one that is not stale before one
// that is, then the oldest. why says what was there when none was taken; empty: nothing of the kind.
func (s *Shelf) Take(k Kind, imageDigest string, fits func(ids.SandboxID) string) (name ids.SandboxID, why string) {
	have := s.kinds[k]
	if have == nil {
		return "", ""
	}
	have.line = slices.DeleteFunc(have.line, func(it *Item) bool { return it.State != Ready })
	for _, stale := range []bool{false, true} {
		for _, it := range have.line {
			switch {
			case (it.Stale != "") != stale:
			case it.ImageDigest != imageDigest:
				why = cmp.Or(why, "the warm ones have another image than the session's disk")
			default:
				reason := fits(it.Name)
				if reason == "" {
					s.move(it, Taken)
					return it.Name, ""
				}
				why = reason
			}
		}
	}
	return "", why
}

// PutBack ends a Take whose claim has not begun. remove as of Retire: it was retired meanwhile.
func (s *Shelf) PutBack(name ids.SandboxID) (remove bool) {
	it := s.items[name]
	switch {
	case it == nil || it.State != Taken:
		return false
	case it.recalled:
		s.move(it, Retiring)
		return true
	}
	s.move(it, Ready)
	k := s.kind(it.Kind)
	k.line = append([]*Item{it}, slices.DeleteFunc(k.line, func(o *Item) bool { return o == it })...)
	return false
}

// Claim begins the claim of one that was taken: it is the wake's for good. False if it is not there.
func (s *Shelf) Claim(name ids.SandboxID) bool {
	it := s.items[name]
	if it == nil || it.State != Taken {
		return false
	}
	s.move(it, Claiming)
	return true
}

// before orders sandboxes as wakes get them.
func before(a, b *Item) int {
	return cmp.Or(boolInt(a.Stale != "")-boolInt(b.Stale != ""), cmp.Compare(a.order, b.order))
}

// sorted lists copies in the order in which wakes get them.
func (s *Shelf) sorted() []Item {
	out := make([]Item, 0, len(s.items))
	for _, it := range s.items {
		out = append(out, *it)
	}
	slices.SortFunc(out, func(a, b Item) int { return before(&a, &b) })
	return out
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Bind says that a sandbox whose claim began is its session's now. It leaves the shelf with Moved.
func (s *Shelf) Bind(name ids.SandboxID) {
	if it := s.items[name]; it != nil && it.State == Claiming {
		s.move(it, Claimed)
		s.Pooled(it.Kind).Claimed++
	}
}

// Moved says that the wake which claimed a sandbox has ended well: it is among the host's sessions.
func (s *Shelf) Moved(name ids.SandboxID, now time.Time) {
	if it := s.items[name]; it != nil && it.State == Claimed {
		s.drop(it)
		s.spend(name, end{now, true})
	}
}

// Missed counts a wake that started cold though there is a pool of its kind.
func (s *Shelf) Missed(k Kind) {
	if u := s.uses[k]; u != nil {
		u.Missed++
	}
}

// Retire takes a sandbox off the shelf for good. remove says that whoever asks has to remove it and then
// call Gone; claimed that it is or was a session's, or is about to be. If it does not come to that, PutBack
// has it removed.
func (s *Shelf) Retire(name ids.SandboxID, now time.Time) (remove, claimed bool) {
	s.forget(now)
	it := s.items[name]
	if it == nil {
		e, ok := s.spent[name]
		if !ok { // a prepare that is on its way comes too late
			s.spend(name, end{at: now})
		}
		return false, e.claimed
	}
	switch it.State {
	case Taken, Claiming, Claimed:
		it.recalled = true
		return false, true
	case Retiring:
		return false, false
	}
	s.move(it, Retiring)
	return true, false
}

// GiveUp is Retire of one that a wake has: its claim failed, or the wake later. remove as there.
func (s *Shelf) GiveUp(name ids.SandboxID) (remove bool) {
	it := s.items[name]
	if it == nil || it.State == Retiring {
		return false
	}
	s.move(it, Retiring)
	return true
}

// Gone says that nothing of a sandbox is left.
func (s *Shelf) Gone(name ids.SandboxID, now time.Time) {
	if it := s.items[name]; it != nil {
		s.drop(it)
		s.spend(name, end{at: now})
	}
}

func (s *Shelf) spend(name ids.SandboxID, e end) {
	if _, ok := s.spent[name]; !ok {
		s.queue = append(s.queue, name)
	}
	s.spent[name] = e
}

// forget drops the names that no command can mean any more.
func (s *Shelf) forget(now time.Time) {
	for len(s.queue) > 0 && now.Sub(s.spent[s.queue[0]].at) > Remember {
		delete(s.spent, s.queue[0])
		s.queue = s.queue[1:]
	}
}

// Has reports whether a sandbox is on the shelf, in whatever state.
func (s *Shelf) Has(name ids.SandboxID) bool { return s.items[name] != nil }

// Is returns the state of a sandbox, empty if it is not on the shelf.
func (s *Shelf) Is(name ids.SandboxID) State {
	if it := s.items[name]; it != nil {
		return it.State
	}
	return ""
}

// Get returns a copy of one that is on the shelf.
func (s *Shelf) Get(name ids.SandboxID) (Item, bool) {
	it := s.items[name]
	if it == nil {
		return Item{}, false
	}
	return *it, true
}

// All lists what is on the shelf, in the order in which wakes get it.
func (s *Shelf) All() []Item { return s.sorted() }

// Ready counts what waits, by kind; a kind with a pool and nothing left is there with 0.
func (s *Shelf) Ready() map[Kind]int {
	out := map[Kind]int{}
	for k := range s.uses {
		out[k] = 0
	}
	for k, have := range s.kinds {
		if have.ready > 0 {
			out[k] = have.ready
		}
	}
	return out
}

// Uses lists the kinds that have a pool and what became of their demand.
func (s *Shelf) Uses() map[Kind]Use {
	out := map[Kind]Use{}
	for k, u := range s.uses {
		out[k] = *u
	}
	return out
}

// Memory is what the sandboxes may use in all that no session has, or is about to have.
func (s *Shelf) Memory() uint64 { return s.memory }

// Mark notes of every sandbox that waits why it is stale: why says so of one, empty if it is not.
func (s *Shelf) Mark(why func(Item) string) {
	for _, it := range s.items {
		if it.State == Ready {
			it.Stale = why(*it)
		}
	}
}

// Excess names sandboxes that wait and together hold at least this much memory, those first that wakes
// would get last.
func (s *Shelf) Excess(memory uint64) (out []ids.SandboxID) {
	for _, it := range slices.Backward(s.sorted()) {
		if memory == 0 {
			return out
		}
		if it.State == Ready {
			out = append(out, it.Name)
			memory -= min(memory, it.Memory)
		}
	}
	return out
}

// Names lists everything on the shelf in the states.
func (s *Shelf) Names(in ...State) []ids.SandboxID {
	out := slices.Sorted(maps.Keys(s.items))
	return slices.DeleteFunc(out, func(n ids.SandboxID) bool { return !slices.Contains(in, s.items[n].State) })
}
