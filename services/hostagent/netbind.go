package hostagent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// binding says that the link of one sandbox is a session's, in one generation and epoch. It is noted before
// the gate or the kernel hears of it, and ended before its sandbox is stopped.
type binding struct {
	id   ids.SandboxID
	link network.Link
	msg  *egressv1.Binding // not to be changed

	mu    sync.Mutex
	open  bool // the kernel lets it through
	ended bool
	noted bool // the gate has said what its session reads, beside its answers
}

// bindingOf says whose a link is, by the record of a wake.
func bindingOf(rec inventory.Record, l network.Link) *egressv1.Binding {
	t := termsOf(rec)
	return &egressv1.Binding{
		Session: refOf(rec), Sandbox: l.Sandbox, SessionName: rec.Name, Plan: t.GetPlan(), Template: t.GetTemplate(), Tier: t.GetTier(),
		Actor: actorOf(rec), Address4: l.Address4.Addr().String(), Address6: l.Address6.Addr().String(),
	}
}

// actorOf is who had the session woken; nil if nobody said.
func actorOf(rec inventory.Record) *corev1.Actor {
	a := &corev1.Actor{}
	if err := fromJSON(rec.Actor, a); err != nil {
		return nil
	}
	return a
}

// put notes a binding. One that is noted already for the same epoch is kept.
func (n *nets) put(l network.Link, msg *egressv1.Binding, open bool) *binding {
	id := ids.SandboxID(l.Sandbox)
	n.mu.Lock()
	defer n.mu.Unlock()
	if old := n.all[id]; old != nil {
		if proto.Equal(old.msg, msg) {
			return old
		}
		old.end(n.h.meters)
	}
	b := &binding{id: id, link: l, msg: msg, open: open}
	if open {
		n.h.meters.lets(1)
	}
	n.all[id] = b
	n.changes++
	return b
}

func (n *nets) find(id ids.SandboxID) *binding {
	if n == nil {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.all[id]
}

func (n *nets) bindings() []*binding {
	all, _ := n.now()
	return all
}

// now lists the bindings, and how often they changed until then.
func (n *nets) now() (all []*binding, changes uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, b := range n.all {
		all = append(all, b)
	}
	slices.SortFunc(all, func(a, b *binding) int { return cmp.Compare(a.id, b.id) })
	return all, n.changes
}

// bind makes a sandbox's link the session's: the gate is told, and then the kernel. Without a gate the
// session goes on with no way out; it has one as soon as the gate answers.
func (n *nets) bind(ctx context.Context, l network.Link, msg *egressv1.Binding) error {
	began := time.Now()
	b := n.put(l, msg, false)
	err := n.bindNow(ctx, b)
	n.h.meters.bind(time.Since(began), err)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	if errs.Is(err, errkind.StaleEpoch) || errors.Is(err, network.ErrNoLink) {
		return err
	}
	n.h.log.Warn("a session wakes without a way out", "session", msg.GetSession().GetSession(), "sandbox", b.id, "reason", err)
	n.ask()
	return nil
}

func (n *nets) bindNow(ctx context.Context, b *binding) error {
	if !n.answers() { // whoever waits for it is told at once when it does
		return errs.E("bind", errkind.Unavailable, string(b.id), "the gate of this host does not answer")
	}
	notice, err := n.tellBind(ctx, b)
	if err != nil {
		return err
	}
	if len(notice) > 0 {
		if err := n.note(b, notice, false); err != nil {
			n.h.log.Warn("a session cannot read what it may reach", "sandbox", b.id, "error", err)
		}
	}
	return n.admit(ctx, b)
}

// tellBind has the gate take whose the link is.
func (n *nets) tellBind(ctx context.Context, b *binding) ([]byte, error) {
	h := n.h
	ctx, cancel := context.WithTimeout(ctx, h.cfg.Network.GateTimeout)
	defer cancel()
	r, err := bus.InvokeGate[*egressv1.BindReply](ctx, h.conn, h.id, "bind", &egressv1.BindRequest{Binding: b.msg, LeaseUntil: h.lease.untilNanos()})
	if err != nil {
		n.answered(err)
	}
	return r.GetNotice(), err
}

// end has nobody let the link through for this binding any more.
func (b *binding) end(m meters) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open {
		m.lets(-1)
	}
	b.open, b.ended = false, true
}

// admit has the kernel let the link through, unless the binding has ended.
func (n *nets) admit(ctx context.Context, b *binding) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.ended:
		return errs.E("bind", errkind.StaleEpoch, string(b.id), "the sandbox is not the session's any more")
	case b.open:
		return nil
	}
	if err := n.h.may("bind"); err != nil {
		return err
	}
	if err := n.links.Bind(ctx, b.link); err != nil {
		return errs.E("bind", errkind.Unavailable, string(b.id), err)
	}
	b.open = true
	n.h.meters.lets(1)
	return nil
}

// unbind ends what leaves a sandbox, before it is stopped. It needs no lease. The gate hears of it beside.
func (n *nets) unbind(ctx context.Context, id ids.SandboxID) error {
	if n == nil || n.links == nil {
		return nil
	}
	n.mu.Lock()
	b := n.all[id]
	if b != nil {
		delete(n.all, id)
		n.changes++
	}
	n.mu.Unlock()
	if b != nil {
		b.end(n.h.meters)
		n.tellUnbind(b)
	}
	l, ok, err := n.linkOf(ctx, id, b)
	if err == nil && ok {
		err = n.links.Unbind(ctx, l)
	}
	if err != nil {
		return errs.E("unbind", errkind.Unavailable, string(id), err)
	}
	return nil
}

// linkOf finds the link of a sandbox, also one that nobody has a binding for.
func (n *nets) linkOf(ctx context.Context, id ids.SandboxID, b *binding) (l network.Link, ok bool, err error) {
	if b != nil {
		return b.link, true, nil
	}
	f, ok, err := n.lookUp(ctx, id)
	return f.Link, ok, err
}

func (n *nets) lookUp(ctx context.Context, id ids.SandboxID) (f network.Found, ok bool, err error) {
	all, err := n.list(ctx)
	i := slices.IndexFunc(all, func(f network.Found) bool { return f.Link.Sandbox == string(id) })
	if err != nil || i < 0 {
		return f, false, err
	}
	return all[i], true, nil
}

// tellUnbind has the gate reset what is open. One that does not hear it hears so from the next list.
func (n *nets) tellUnbind(b *binding) {
	h := n.h
	if !n.answers() {
		return
	}
	h.ops.Add(1)
	go func() {
		defer h.ops.Done()
		ctx, cancel := context.WithTimeout(h.ctx, h.cfg.Network.GateTimeout)
		defer cancel()
		_, err := bus.InvokeGate[*egressv1.UnbindReply](ctx, h.conn, h.id, "unbind", &egressv1.UnbindRequest{Session: b.msg.GetSession(), Sandbox: string(b.id)})
		if err != nil {
			n.ask()
		}
	}()
}

// adopt takes over the binding of a sandbox that an earlier process woke. The kernel has kept it, or it is
// bound with the next list.
func (n *nets) adopt(ctx context.Context, rec inventory.Record, id ids.SandboxID) {
	f, ok, err := n.lookUp(ctx, id)
	if err != nil {
		n.h.log.Error("a session that was taken over has no way out", "session", rec.Session, "error", err)
	}
	if !ok {
		return // it was made without one
	}
	n.put(f.Link, bindingOf(rec, f.Link), f.Bound)
	n.ask()
}

// maxNotice is the largest content of egress.json.
const maxNotice = 64 << 10

// rpcNotice puts what the gate says into the run folder of exactly the sandbox that it says it of.
func (h *host) rpcNotice(ctx context.Context, _ bus.Request, req *egressv1.NoticeRequest) (*egressv1.NoticeReply, error) {
	const op = "host.notice"
	s, err := h.target(ctx, op, req.GetSession())
	if err != nil {
		return nil, err
	}
	switch text := req.GetNotice(); {
	case len(text) > maxNotice:
		return nil, errs.Errorf(op, errkind.TooLarge, "a notice has at most %d bytes", maxNotice)
	case !json.Valid(text):
		return nil, errs.E(op, errkind.Invalid, s.key.String(), "the notice is no JSON")
	}
	if err := h.may("notice"); err != nil {
		return nil, err
	}
	b := h.net.find(ids.SandboxID(req.GetSandbox()))
	if b == nil || !proto.Equal(b.msg.GetSession(), req.GetSession()) {
		err = errs.E(op, errkind.StaleEpoch, s.key.String(), "the sandbox is not the session's in this generation and epoch")
	} else {
		err = h.net.note(b, req.GetNotice(), true)
	}
	if errs.Is(err, errkind.StaleEpoch) {
		h.meters.fenced("notice")
	}
	if err != nil {
		return nil, err
	}
	return &egressv1.NoticeReply{}, nil
}

// note writes egress.json, unless the binding has ended. said: the gate said so by itself, which is newer than
// what it answers to a bind.
func (n *nets) note(b *binding, text []byte, said bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return errs.E("write notice", errkind.StaleEpoch, string(b.id), "the sandbox is not the session's any more")
	}
	if b.noted && !said {
		return nil
	}
	b.noted = b.noted || said
	return writeInto(n.h.runFolder(b.id), noticeFile, text)
}

// network makes the sandbox's link, if its tier has one; a claimed one has its own.
func (m *making) network(ctx context.Context) (err error) {
	if m.claimed || m.link != nil {
		return nil
	}
	m.link, err = m.s.h.net.make(ctx, m.coldID(), m.tier())
	return err
}

// connectCold makes the link the session's, unless the claim did.
func (m *making) connectCold(ctx context.Context) error {
	if m.claimed {
		return nil
	}
	return m.connect(ctx)
}

// connect makes the link the session's: nothing of the user's runs in the sandbox yet.
func (m *making) connect(ctx context.Context) error {
	if m.link == nil {
		return nil
	}
	rec := inventory.Record{Tenant: ids.Tenant(m.req.GetSession().GetTenant()), Session: m.key.Session, Generation: m.key.Generation,
		Epoch: m.epoch, Name: m.req.GetSessionName(), Terms: toJSON(m.req.GetTerms()), Actor: actorJSON(m.req)}
	return m.s.h.net.bind(ctx, *m.link, bindingOf(rec, *m.link))
}

// disconnect undoes connect.
func (m *making) disconnect(ctx context.Context) error {
	if m.link == nil {
		return nil
	}
	return m.s.h.net.unbind(ctx, ids.SandboxID(m.link.Sandbox))
}

func (m *making) tier() driver.Tier { return driver.Tier(tierName(m.req.GetTerms().GetTier())) }
