package lifecycle

import (
	"context"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// onSession arms what follows from one of scheduler's events.
func (s *service) onSession(ctx context.Context, ev *schedulerv1.Event) error {
	return s.act(ctx, core.Scheduled{Event: ev}, nil)
}

// onTimer handles a timer that is due. Every answer it needs it asks for anew,
// so a redelivery after a crash does the right thing.
func (s *service) onTimer(ctx context.Context, t *lifecyclev1.Timer) error {
	record, err := s.show(ctx, t.GetSession())
	if err != nil {
		return err
	}
	return s.act(ctx, core.TimerDue{Timer: t, Record: record}, t)
}

// act decides and runs the commands. An answer to a command is a new event.
func (s *service) act(ctx context.Context, ev core.Event, t *lifecyclev1.Timer) error {
	cmds, err := core.Decide(s.policy, ev, s.now())
	if err != nil {
		return errs.E("decide", errkind.Internal, "", err)
	}
	for _, cmd := range cmds {
		next, err := s.run(ctx, cmd, ev, t)
		if err != nil {
			return err
		}
		if next != nil {
			if err := s.act(ctx, next, t); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *service) run(ctx context.Context, cmd core.Command, ev core.Event, t *lifecyclev1.Timer) (core.Event, error) {
	switch c := cmd.(type) {
	case core.Publish:
		s.tell(ctx, c)
	case core.Arm:
		return nil, s.arm(ctx, c.Timer)
	case core.AskActivity:
		return s.askActivity(ctx, c, ev, t)
	case core.Sleep:
		return s.sleep(ctx, c, t)
	case core.Expire:
		return s.expire(ctx, c, ev, t)
	}
	return nil, nil
}

func (s *service) arm(ctx context.Context, t *lifecyclev1.Timer) error {
	tenant, err := ids.ParseTenant(t.GetSession().GetTenant())
	if err != nil {
		return err
	}
	session, err := ids.ParseSessionKey(t.GetSession().GetSession())
	if err != nil {
		return err
	}
	return s.conn.ArmTimer(ctx, tenant, session, t.GetKind(), t.GetDue().AsTime(), t)
}

func (s *service) show(ctx context.Context, ref *corev1.SessionRef) (*schedulerv1.SessionRecord, error) {
	reply, err := bus.Invoke[*schedulerv1.ShowReply](ctx, s.conn, "scheduler", "show",
		&schedulerv1.ShowRequest{Tenant: ref.GetTenant(), Session: ref.GetSession()})
	if errs.Is(err, errkind.NotFound) {
		return nil, nil
	}
	return reply.GetRecord(), err
}

// askActivity asks the owner host. A host that no longer holds this epoch has
// nothing to be put to sleep; scheduler's next event arms anew.
func (s *service) askActivity(ctx context.Context, c core.AskActivity, ev core.Event, t *lifecyclev1.Timer) (core.Event, error) {
	host, err := ids.ParseHost(c.Host)
	if err != nil {
		return nil, err
	}
	reply, err := bus.InvokeHost[*hostv1.ActivityReply](ctx, s.conn, host, "activity", &hostv1.ActivityRequest{Session: c.Ref})
	if errs.Is(err, errkind.StaleEpoch) || errs.Is(err, errkind.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	due, _ := ev.(core.TimerDue)
	return core.ActivityTold{Timer: t, Record: due.Record, Busy: reply.GetBusy(), Since: reply.GetIdleSince().AsTime()}, nil
}

// sleep is conditional: the host refuses in the same critical section that
// admits new work, and then the clock starts again from what it says.
func (s *service) sleep(ctx context.Context, c core.Sleep, t *lifecyclev1.Timer) (core.Event, error) {
	ref := c.Ref
	reply, err := bus.Invoke[*schedulerv1.SleepReply](ctx, s.conn, "scheduler", "sleep", &schedulerv1.SleepRequest{
		Tenant: ref.GetTenant(), Session: ref.GetSession(), Generation: ref.GetGeneration(), Epoch: ref.GetEpoch(),
		IdleSince: timestamppb.New(c.Since), Reason: "idle"})
	switch {
	case errs.Is(err, errkind.StaleEpoch) || errs.Is(err, errkind.NotFound) || errs.Is(err, errkind.Superseded):
		return nil, nil
	case errs.Is(err, errkind.Busy):
		return core.SleepRefused{Timer: t, Since: s.now()}, nil
	case err != nil:
		return nil, err
	}
	if busy := reply.GetBusySince(); busy != nil {
		return core.SleepRefused{Timer: t, Since: busy.AsTime()}, nil
	}
	return nil, nil
}

// expire is sent at the warning, which scheduler only notes, and at the end.
// Only scheduler can say yes; a no that may become a yes is asked for again.
func (s *service) expire(ctx context.Context, c core.Expire, ev core.Event, t *lifecyclev1.Timer) (core.Event, error) {
	ref := c.Ref
	_, err := bus.Invoke[*schedulerv1.DeleteReply](ctx, s.conn, "scheduler", "delete", &schedulerv1.DeleteRequest{
		Tenant: ref.GetTenant(), Session: ref.GetSession(), Expire: true, Warn: c.Warn,
		Generation: ref.GetGeneration(), Revision: c.Revision})
	due, _ := ev.(core.TimerDue)
	told := core.ExpireTold{Timer: t, Record: due.Record, Warn: c.Warn}
	switch errs.Kind(err) {
	case errkind.OK:
	case errkind.Conflict, errkind.Exhausted:
		told.Verdict = core.Early
	case errkind.Refused, errkind.StaleEpoch, errkind.NotFound, errkind.Superseded:
		told.Verdict = core.Moot
	default:
		return nil, err
	}
	if told.Verdict != core.Granted {
		s.log.Info("a session does not expire now", "session", ref.GetSession(), "warning", c.Warn, "reason", err)
	}
	return told, nil
}

// rebuild arms the timers that are missing: at start, once scheduler answers,
// and again and again, since a timer that was due while its host or scheduler
// was away for long went to BERTH_DEAD. A session that changes meanwhile is
// armed by its event.
func (s *service) rebuild(ctx context.Context, every time.Duration) {
	const first = 100 * time.Millisecond
	for retry := first; ctx.Err() == nil; {
		wait := every
		if err := s.rebuildOnce(ctx); err != nil {
			s.log.Debug("rebuilding timers", "error", err)
			wait, retry = retry, min(2*retry, 10*time.Second)
		} else {
			retry = first
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

func (s *service) rebuildOnce(ctx context.Context) error {
	armed, err := s.armed(ctx)
	if err != nil {
		return err
	}
	for after := ""; ; {
		page, err := bus.Invoke[*schedulerv1.ListReply](ctx, s.conn, "scheduler", "list",
			&schedulerv1.ListRequest{After: after, Limit: 500})
		if err != nil {
			return err
		}
		for _, r := range page.GetRecords() {
			key := r.GetSession().GetTenant() + "." + r.GetSession().GetSession()
			if err := s.act(ctx, core.Found{Record: r, Timers: armed[key]}, nil); err != nil {
				return err
			}
		}
		if after = page.GetNext(); after == "" {
			return nil
		}
	}
}

// armed tells which timers the stream holds: <tenant>.<session> -> kinds.
func (s *service) armed(ctx context.Context) (map[string]map[string]bool, error) {
	stream, err := s.conn.JetStream().Stream(ctx, "BERTH_TIMERS")
	if err != nil {
		return nil, errs.E("read timers", errkind.Unavailable, "", err)
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter("berth.v1.timer.>"))
	if err != nil {
		return nil, errs.E("read timers", errkind.Unavailable, "", err)
	}
	out := map[string]map[string]bool{}
	for subject := range info.State.Subjects {
		t := strings.Split(subject, ".") // berth v1 timer set|due tenant session kind
		if len(t) != 7 || t[3] != "set" {
			continue
		}
		key := t[4] + "." + t[5]
		if out[key] == nil {
			out[key] = map[string]bool{}
		}
		out[key][t[6]] = true
	}
	return out, nil
}
