package hostagent

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"gocloud.dev/blob"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/box"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/diskpool"
	"github.com/berth-dev/berth/services/hostagent/internal/fence"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
	"github.com/berth-dev/berth/services/hostagent/internal/shelf"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// host is the running hostagent.
type host struct {
	cfg   Config
	id    ids.Host
	boot  string
	key   seal.XKey
	conn  *bus.Conn
	drv   driver.Driver
	caps  map[driver.Tier]driver.Capabilities
	tiers tiers
	// proof makes a sandbox of each tier and says why it could not; nil: the real one.
	proof  func(context.Context, []driver.Tier) map[driver.Tier]error
	bare   bool // sandboxes have no guest and no data plane
	disks  disks
	saves  saves
	vault  vault        // nil: disks are in memory
	bucket *blob.Bucket // of the vault
	pool   *diskpool.Pool
	images images
	inv    *inventory.Store
	box    *box.Server
	lease  *lease
	fence  *fence.Fence // nil: no cgroup holds the sandboxes
	keeper *warmKeeper  // of warm sandboxes
	net    *nets
	health health
	log    *slog.Logger
	meters meters
	steps  steps.Runner
	wakes  chan struct{}
	// ctx is that of operations: it ends when the process gives up waiting for them.
	ctx    context.Context
	cancel context.CancelFunc
	ops    sync.WaitGroup
	ready  chan struct{} // closed once what an earlier process left was taken over
	// removed is closed when scheduler said that this host was removed for good.
	removed chan struct{}
	// rejoin asks for a join and a sweep now, erase for a look at what the store still holds.
	rejoin, erase chan struct{}
	// eraseAfter is the lease clock's time before which no delete waits for the store.
	eraseAfter atomic.Int64
	// eraseHung counts the erasures that did not end with their context. While there are any, no delete
	// waits for the store.
	eraseHung atomic.Int32
	// retell asks for a renewal of the lease now, since what the host says with it has changed.
	retell chan struct{}
	// sweeping is the place of sweeps of the store after a sleep, one at a time.
	sweeping chan struct{}

	mu       sync.Mutex
	sessions map[ids.SessionKey]*session
	bySand   map[ids.SandboxID]*session
	oom      map[ids.SandboxID]time.Time
	limits   map[ids.SandboxID]map[driver.EventKind]time.Time // when a limit that was hit was told last
	empties  int
	facts    string
}

// session is what this host knows and runs of one session.
type session struct {
	h   *host
	key ids.SessionKey

	mu  sync.Mutex
	st  core.State
	rec inventory.Record
	op  *operation
	sb  *sandbox
	// touched is when the phase changed last, on the clock of leases.
	touched time.Duration
	// compute is what there is of compute, or nil. It is read without mu.
	compute atomic.Pointer[compute]
	// gone: the host forgot this; ask it for the session again.
	gone bool
}

// compute is what a session with compute counts for.
type compute struct {
	epoch  ids.Epoch
	kind   shelf.Kind
	memory uint64
	awake  bool
}

// count notes what the session counts for now. mu is held.
func (s *session) count() {
	if s.st.Phase == core.Absent || s.st.Phase == "" {
		s.compute.Store(nil)
		return
	}
	next := s.compute.Load()
	awake := s.st.Phase == core.Awake
	switch {
	case next == nil || next.epoch != s.st.Epoch:
		t := termsOf(s.rec)
		next = &compute{epoch: s.st.Epoch, kind: kindOf(t), memory: t.GetLimits().GetMemoryBytes(), awake: awake}
	case next.awake != awake:
		again := *next
		again.awake = awake
		next = &again
	}
	s.compute.Store(next)
}

// memory is what the sessions with compute may use in all.
func (h *host) memory() (sum uint64) {
	for _, s := range h.all() {
		if c := s.compute.Load(); c != nil {
			sum += c.memory
		}
	}
	return sum
}

// operation is a wake, sleep, drop or delete under way.
type operation struct {
	op     core.Op
	req    proto.Message
	rec    inventory.Record // as it was when it began
	sb     *sandbox         // what was awake then
	reason string           // why streams end
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{} // closed when reply and err are set
	reply  proto.Message
	err    error
}

// session returns the session of a key, made on the fly.
func (h *host) session(k ids.SessionKey) *session {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.sessions[k]
	if s == nil {
		s = &session{h: h, key: k, rec: inventory.Record{Session: k, Changed: time.Now().UTC()}}
		h.sessions[k] = s
	}
	return s
}

func (h *host) all() []*session {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]*session, 0, len(h.sessions))
	for _, s := range h.sessions {
		out = append(out, s)
	}
	return out
}

// act decides an event and sees it through: it returns the outcome of the operation that the event
// began, joined or found settled.
func (s *session) act(ctx context.Context, ev core.Event, req proto.Message) (proto.Message, error) {
	for pause := actAgain; ; {
		s.mu.Lock()
		if s.gone {
			s.mu.Unlock()
			return s.h.session(s.key).act(ctx, ev, req)
		}
		cmds, err := s.decide(ev, req)
		if err != nil {
			s.mu.Unlock()
			return nil, err
		}
		wait, again, settled := s.command(cmds, req)
		s.mu.Unlock()
		if settled != nil {
			return settled, nil
		}
		if wait == nil {
			return nil, nil
		}
		select {
		case <-wait.done:
		case <-ctx.Done():
			return nil, errs.E("wait for "+string(wait.op), errs.Kind(ctx.Err()), s.key.String(), ctx.Err())
		}
		if !again {
			return wait.reply, wait.err
		}
		if starts(cmds) == "" || wait.err == nil {
			continue
		}
		select { // what this call started itself failed: without a pause it would fail again and again
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-ctx.Done():
			return nil, errs.E("wait for "+string(wait.op), errs.Kind(ctx.Err()), s.key.String(), wait.err)
		}
	}
}

// actAgain is the first pause before an operation that failed on the way to another one is started again.
const actAgain = 20 * time.Millisecond

// decide moves the state by one event and stores what must be known after a crash. mu is held.
func (s *session) decide(ev core.Event, req proto.Message) ([]core.Command, error) {
	next, cmds, err := core.Decide(s.st, ev)
	if r := core.RefusalOf(err); r != nil {
		if r.Kind == errkind.StaleEpoch {
			s.h.meters.fenced(placeOf(ev))
		}
		return nil, errs.E("", r.Kind, s.key.String(), r)
	}
	rec, put := s.rec, s.h.inv.Put
	rec.Generation, rec.Epoch, rec.Phase = next.Generation, next.Epoch, string(next.Phase)
	rec.Spent, rec.Slept, rec.LastActivity = next.Spent, next.Slept, next.LastActivity
	if starts(cmds) == core.OpWake {
		// Nothing waits for the record of a beginning: until its end is stored, what is made is
		// found by the driver and by the disks' own records, and scheduler asks again.
		s.fill(&rec, req)
		put = s.h.inv.PutSoon
	}
	if end, ok := ev.(core.Ended); ok && end.Op == core.OpWake {
		// Nor for that of its end: a sandbox that is there without it is adopted once scheduler says that
		// it was told, and woken again or removed if not. It does not outlive the machine either way.
		put = s.h.inv.PutSoon
	}
	if sl, ok := req.(*hostv1.SleepRequest); ok && rec.Tenant == "" {
		rec.Tenant = ids.Tenant(sl.GetSession().GetTenant()) // saved at rest by a host that had forgotten it
	}
	if end, ok := ev.(core.Ended); ok && !end.Failed {
		rec.Reply = toJSON(req)
	}
	if stored(s.st, next) {
		rec.Changed = time.Now().UTC()
		if err := put(rec); err != nil {
			if _, ok := ev.(core.Ended); !ok {
				return nil, err
			}
			s.h.log.Error("cannot store the end of an operation", "session", s.key, "error", err)
		}
		s.touched = s.h.lease.now()
	}
	s.st, s.rec = next, rec
	s.count()
	return cmds, nil
}

// stored reports whether the change must survive a crash: all but work, activity and how far an
// operation is.
func stored(a, b core.State) bool {
	a.Running, a.Work, a.LastActivity = b.Running, b.Work, b.LastActivity
	a.Stopping, a.Recalled = b.Stopping, b.Recalled
	return a != b
}

func starts(cmds []core.Command) core.Op {
	for _, c := range cmds {
		if st, ok := c.(core.Start); ok {
			return st.Op
		}
	}
	return ""
}

// command runs commands. mu is held. wait is the operation that the caller waits for, and again
// says that it then decides once more.
func (s *session) command(cmds []core.Command, req proto.Message) (wait *operation, again bool, settled proto.Message) {
	reason := ""
	for _, c := range cmds {
		switch c := c.(type) {
		case core.Start:
			wait = s.start(c.Op, req, reason)
		case core.Cancel:
			s.op.cancel()
		case core.Join:
			wait = s.op
		case core.Retry:
			wait, again = s.op, true
		case core.Settled:
			settled = s.settled(req)
		case core.Unserve:
			reason = c.Reason
		case core.Report:
			s.h.report(s.rec, c)
		}
	}
	return wait, again, settled
}

// start begins an operation. mu is held.
func (s *session) start(op core.Op, req proto.Message, reason string) *operation {
	o := &operation{op: op, req: req, rec: s.rec, sb: s.sb, reason: reason, done: make(chan struct{})}
	o.ctx, o.cancel = context.WithCancel(s.h.ctx)
	s.op, s.sb = o, nil
	if o.sb != nil {
		s.h.unlink(o.sb)
	}
	s.h.ops.Add(1)
	go func() {
		defer s.h.ops.Done()
		defer o.cancel()
		s.perform(o)
	}()
	return o
}

// perform runs an operation to its end.
func (s *session) perform(o *operation) {
	if o.sb != nil && o.sb.box != nil {
		o.sb.box.Close(o.reason)
	}
	var sb *sandbox
	switch o.op {
	case core.OpWake:
		o.reply, sb, o.err = s.wake(o)
	case core.OpSleep:
		o.reply, o.err = s.sleep(o)
	case core.OpDrop:
		o.err = s.drop(o)
	case core.OpDelete:
		o.reply, o.err = s.erase(o)
	}
	s.mu.Lock()
	if s.st.Recalled {
		sb, o.err = o.sb.again(o.sb.guest), s.recalled()
		sb.saved = o.sb.saved
	}
	if o.op == core.OpWake && sb != nil {
		s.rec.Sandbox = string(sb.ID) // a claimed one keeps its name
	}
	ended := core.Ended{Op: o.op, At: time.Now(), Failed: o.err != nil}
	cmds, err := s.decide(ended, o.reply)
	if err != nil {
		s.h.log.Error("the end of an operation was refused", "session", s.key, "op", o.op, "error", err)
	}
	s.op = nil
	if sb != nil {
		s.sb = sb
		s.h.link(sb, s)
		s.h.keeper.moved(sb.ID)
	}
	s.mu.Unlock()
	if sb != nil && len(cmds) > 0 {
		if err := s.serveAgain(o, sb); err != nil && o.err == nil {
			o.reply, o.err = nil, err
		}
	}
	close(o.done)
}

// serveAgain serves what an operation gave: after a wake nothing runs in it yet.
func (s *session) serveAgain(o *operation, sb *sandbox) error {
	if o.op == core.OpWake || s.h.bare {
		return s.serve(sb, nil)
	}
	ctx, cancel := context.WithTimeout(s.h.ctx, s.h.cfg.Hello)
	defer cancel()
	running, err := box.RunningExecs(ctx, sb.guest)
	if err != nil {
		s.lose(sb, false, "the guest does not answer: "+err.Error())
		return err
	}
	return s.serve(sb, running)
}

func (h *host) link(sb *sandbox, s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bySand[sb.ID] = s
}

func (h *host) unlink(sb *sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.bySand, sb.ID)
	delete(h.oom, sb.ID)
	delete(h.limits, sb.ID)
}

// binding is what a grant for the session must name.
func (s *session) binding() grant.Binding {
	return grant.Binding{Tenant: s.rec.Tenant, Session: s.key, Generation: s.st.Generation, Epoch: s.st.Epoch, Host: s.h.id}
}

func stamp(e ids.Epoch) *corev1.Stamp {
	return &corev1.Stamp{Incarnation: e.Incarnation, Index: e.Index}
}

func toJSON(m proto.Message) json.RawMessage {
	if m == nil {
		return nil
	}
	b, err := protojson.Marshal(m)
	if err != nil {
		return nil
	}
	return b
}

// fromJSON reads what toJSON wrote, also by a newer version.
func fromJSON(raw json.RawMessage, m proto.Message) error {
	if len(raw) == 0 {
		return errs.E("read stored answer", errkind.NotFound, "", "there is none")
	}
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(raw, m)
}
