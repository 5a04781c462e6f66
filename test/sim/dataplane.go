package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// boxReq is what a frontend asks of the data plane.
type boxReq struct {
	ref sched.Ref
	do  string
}

// rpcBox is the data plane: the gate, and behind it a write, a read or a checkpoint.
func (a *agent) rpcBox(t *task, c *ctx, _ ids.Host, req any) (any, error) {
	r := req.(boxReq)
	if err := a.target(t, c); err != nil {
		return nil, err
	}
	if err := a.check(); err != nil {
		return nil, err
	}
	s := a.session(r.ref.Session)
	if _, err := a.decide(s, host.Admit{Generation: r.ref.Generation, Epoch: r.ref.Epoch, At: t.p.wall()}, nil); err != nil {
		return nil, err
	}
	b := s.box
	defer func() {
		if a.m.a == a && s.st.Generation == r.ref.Generation && s.st.Epoch == r.ref.Epoch {
			_, _ = a.decide(s, host.Release{At: t.p.wall()}, nil)
		}
	}()
	if b == nil {
		return nil, fail(errkind.Unavailable, "the sandbox is being attached")
	}
	if img := b.img; img.rec.State != host.Dirty || img.rec.Epoch != r.ref.Epoch {
		if !img.attached || img.rec.Attached != r.ref.Epoch {
			return nil, fail(errkind.StaleEpoch, "the disk is attached for another epoch")
		}
		img.rec = img.rec.Activated(r.ref.Epoch)
	}
	b.wrote = true
	switch r.do {
	case "checkpoint":
		if s.inv.terms != nil && s.inv.terms.Ephemeral {
			return nil, fail(errkind.Refused, "an ephemeral session is never saved")
		}
		at := b.img.data
		if err := a.save(t, c, b.img, r.ref, s.inv.tenant); err != nil {
			return nil, err
		}
		a.w.cov.hit("checkpoint acknowledged")
		a.w.saved(r.ref, at)
		return at, nil
	case "work":
		_ = t.sleep(c, a.w.between(time.Second, 20*time.Second))
	}
	return a.write(t, c, b, r)
}

// write has a process in the sandbox write and sync, if it runs.
func (a *agent) write(t *task, c *ctx, b *box, r boxReq) (any, error) {
	for {
		if err := t.sleep(c, a.w.between(100*time.Microsecond, 3*time.Millisecond)); err != nil {
			return nil, err
		}
		switch {
		case a.m.boxes[b.id] != b:
			return nil, fail(errkind.Unavailable, "the sandbox ended")
		case a.m.frozen || a.m.suspended:
			t.wait(c, 100*time.Millisecond)
			continue
		}
		if r.do == "read" {
			return b.img.data, nil
		}
		b.img.data = &content{n: count(b.img.data) + 1, parent: b.img.data, epoch: b.epoch}
		b.img.synced = b.img.data
		a.w.wrote(a.m, r.ref, b.img.data)
		return b.img.data, nil
	}
}

func count(c *content) int {
	if c == nil {
		return 0
	}
	return c.n
}

// scribble is a background process of a sandbox that writes without anybody asking, and syncs nothing.
func (m *machine) scribble() {
	for _, id := range sortedKeys(m.boxes) {
		if b := m.boxes[id]; b.wrote && m.runs(b) && m.w.chance(0.5) {
			b.img.data = &content{n: count(b.img.data) + 1, parent: b.img.data, epoch: b.epoch}
		}
	}
}
