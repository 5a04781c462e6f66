package replica

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/hashicorp/raft"
)

// machine is the raft FSM around the pure state.
type machine struct {
	mu      sync.RWMutex
	state   *core.State
	hub     hub
	onApply atomic.Pointer[func(core.Outcome)]
	applied atomic.Uint64
	members func([]raft.Server) // told of each change of the group

	reads   int           // newest format of entries and snapshots
	format  atomic.Int64  // of the state
	fatal   func(error)   // must end the process
	done    chan struct{} // closed with the replica
	started atomic.Bool   // raft runs: no caller receives an error of Restore
	broken  error         // why nothing more is applied
}

func newMachine() *machine {
	return &machine{state: core.NewState(), hub: hub{waits: map[string]chan struct{}{}, refs: map[string]int{}},
		reads: core.EntryVersion, fatal: func(err error) { panic(err) }, done: make(chan struct{})}
}

func (m *machine) view(f func(*core.State)) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	f(m.state)
}

// Apply implements raft.FSM.
func (m *machine) Apply(l *raft.Log) any { return m.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch implements raft.BatchingFSM.
func (m *machine) ApplyBatch(logs []*raft.Log) []any {
	entries := make([]core.Entry, len(logs))
	out := make([]any, len(logs))
	if err := m.failure(); err != nil {
		return failedAll(out, err)
	}
	for i, l := range logs {
		if l.Type == raft.LogConfiguration && m.members != nil {
			m.members(raft.DecodeConfiguration(l.Data).Servers)
		}
		if l.Type != raft.LogCommand {
			continue
		}
		e, err := m.decode(l.Data)
		if err != nil {
			err = fmt.Errorf("scheduler log at %d: %w", l.Index, err)
			m.halt(err)
			return failedAll(out, err)
		}
		entries[i] = e
	}
	m.mu.Lock()
	for i, l := range logs {
		if l.Type == raft.LogCommand {
			out[i] = m.state.Apply(l.Index, entries[i])
		}
	}
	m.format.Store(int64(m.state.Format))
	m.mu.Unlock()
	if n := len(logs); n > 0 {
		m.applied.Store(logs[n-1].Index)
	}
	m.tell(out)
	return out
}

// failedAll answers every entry of a batch with an error.
func failedAll(out []any, err error) []any {
	for i := range out {
		out[i] = err
	}
	return out
}

func (m *machine) tell(out []any) {
	f := m.onApply.Load()
	for _, o := range out {
		v, ok := o.(core.Outcome)
		if !ok {
			continue
		}
		for _, k := range v.Touched {
			m.hub.wake(k.String())
		}
		if f != nil {
			(*f)(v)
		}
	}
}

// Snapshot implements raft.FSM; entries go on while it is written.
func (m *machine) Snapshot() (raft.FSMSnapshot, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.broken != nil { // raft counts entries as applied that were not
		return nil, m.broken
	}
	return &snapshot{m.state.Freeze()}, nil
}

// Restore implements raft.FSM.
func (m *machine) Restore(r io.ReadCloser) error {
	defer r.Close()
	s, err := core.ReadState(r)
	if err == nil && s.Format > m.reads {
		err = core.NewerFormat{What: "snapshot", Format: s.Format, Reads: m.reads}
	}
	if _, newer := errors.AsType[core.NewerFormat](err); newer {
		m.halt(err) // raft would begin with an older snapshot, or try again for ever
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.state = s
	m.format.Store(int64(s.Format))
	m.mu.Unlock()
	m.applied.Store(s.Index)
	m.hub.wakeAll()
	return nil
}

type snapshot struct{ state *core.Frozen }

// Persist implements raft.FSMSnapshot.
func (s *snapshot) Persist(sink raft.SnapshotSink) error {
	if _, err := s.state.WriteTo(sink); err != nil {
		_ = sink.Cancel()
		return err
	}
	return sink.Close()
}

// Release implements raft.FSMSnapshot.
func (s *snapshot) Release() {}

// hub wakes who waits for a session to change.
type hub struct {
	mu    sync.Mutex
	waits map[string]chan struct{}
	refs  map[string]int
}

// wait returns a channel closed at the next change, and a release function.
func (h *hub) wait(key string) (<-chan struct{}, func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.waits[key]
	if c == nil {
		c = make(chan struct{})
		h.waits[key] = c
	}
	h.refs[key]++
	return c, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.waits[key] != c {
			return
		}
		if h.refs[key]--; h.refs[key] <= 0 {
			delete(h.refs, key)
			delete(h.waits, key)
		}
	}
}

func (h *hub) wake(key string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c := h.waits[key]; c != nil {
		close(c)
		delete(h.waits, key)
		delete(h.refs, key)
	}
}

func (h *hub) wakeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for k, c := range h.waits {
		close(c)
		delete(h.waits, k)
		delete(h.refs, k)
	}
}
