package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	life "github.com/berth-dev/berth/services/lifecycle/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// due handles timers whose time has come, modelled on services/lifecycle/timers.go.
func (s *lifecycle) due(t *task) {
	for {
		t.sleep(nil, 500*time.Millisecond)
		if !s.w.stream.p.running() {
			continue
		}
		for _, k := range s.w.stream.sortedTimers() {
			m := s.w.stream.timers[k]
			if m == nil || s.w.now < m.at || m.t.GetDue().AsTime().After(s.p.wall()) && !(s.w.stream.early && k.kind != life.TimerIdle) {
				continue
			}
			err := s.fire(t, m.t)
			if now := s.w.stream.timers[k]; now != m {
				continue // it was armed anew meanwhile
			}
			if err != nil {
				m.late++
				m.at = s.w.now + min(time.Second<<min(m.late, 4), 10*time.Second)
				continue
			}
			delete(s.w.stream.timers, k)
		}
	}
}

func (s *stream) sortedTimers() []timerKey {
	out := make([]timerKey, 0, len(s.timers))
	for k := range s.timers {
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b timerKey) int {
		return cmp.Or(cmp.Compare(a.session, b.session), cmp.Compare(a.kind, b.kind))
	})
	return out
}

func (s *lifecycle) fire(t *task, m *lifecyclev1.Timer) error {
	c := s.w.within(nil, 60*time.Second)
	reply, err := ask[showReply](t, c, "scheduler", "show", showReq{tenant: ids.Tenant(m.GetSession().GetTenant()), key: ids.SessionKey(m.GetSession().GetSession())})
	if err != nil && !is(err, errkind.NotFound) {
		return err
	}
	ev := life.TimerDue{Timer: m}
	if reply.s != nil {
		ev.Record = recordOf(reply.s)
	}
	return s.act(t, c, ev, m)
}

// act decides and runs the commands. An answer to a command is a new event.
func (s *lifecycle) act(t *task, c *ctx, ev life.Event, m *lifecyclev1.Timer) error {
	cmds, err := life.Decide(s.policy, ev, s.p.wall())
	if err != nil {
		s.w.breaks("lifecycle-decides", "%v", err)
		return nil
	}
	for _, cmd := range cmds {
		next, err := s.run(t, c, cmd, ev, m)
		if err != nil {
			return err
		}
		if next != nil {
			if err := s.act(t, c, next, m); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *lifecycle) run(t *task, c *ctx, cmd life.Command, ev life.Event, m *lifecyclev1.Timer) (life.Event, error) {
	due, _ := ev.(life.TimerDue)
	switch x := cmd.(type) {
	case life.Arm:
		k := timerKey{x.Timer.GetSession().GetTenant(), x.Timer.GetSession().GetSession(), x.Timer.GetKind()}
		s.w.stream.timers[k] = &timer{t: x.Timer}
		if s.w.stream.early {
			s.w.stream.timers[k].at = s.w.now + 5*time.Second
		}
	case life.AskActivity:
		reply, err := t.call(s.w.within(c, 10*time.Second), "host."+x.Host, "activity", activityReq{refFrom(x.Ref)})
		if gone(err) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		r := reply.(activityReply)
		return life.ActivityTold{Timer: m, Record: due.Record, Busy: r.busy, Since: r.since}, nil
	case life.Sleep:
		return s.sleep(t, c, x, m)
	case life.Expire:
		return s.expire(t, c, x, due.Record, m)
	}
	return nil, nil
}

func (s *lifecycle) sleep(t *task, c *ctx, x life.Sleep, m *lifecyclev1.Timer) (life.Event, error) {
	ref := refFrom(x.Ref)
	s.w.cov.hit("idle sleep asked for")
	r, err := ask[closeReply](t, s.w.within(c, 60*time.Second), "scheduler", "sleep", &sched.SleepCmd{Tenant: ids.Tenant(x.Ref.GetTenant()), Keys: []ids.SessionKey{ref.Session},
		Generation: ref.Generation, Epoch: ref.Epoch, IdleSince: sched.At(x.Since), Reason: "idle"})
	switch {
	case gone(err), is(err, errkind.Superseded):
		return nil, nil
	case is(err, errkind.Busy):
		return life.SleepRefused{Timer: m, Since: s.p.wall()}, nil
	case err != nil:
		return nil, err
	case r.busy != 0:
		s.w.cov.hit("idle sleep refused as busy")
		return life.SleepRefused{Timer: m, Since: r.busy.Std()}, nil
	}
	return nil, nil
}

func (s *lifecycle) expire(t *task, c *ctx, x life.Expire, rec *schedulerv1.SessionRecord, m *lifecyclev1.Timer) (life.Event, error) {
	ref := refFrom(x.Ref)
	_, err := ask[closeReply](t, c, "scheduler", "delete", &sched.Delete{Tenant: ids.Tenant(x.Ref.GetTenant()), Keys: []ids.SessionKey{ref.Session},
		Expire: &sched.Expire{Generation: ref.Generation, Revision: x.Revision, WarnOnly: x.Warn, Notice: expireNotice, MaxPerHour: 100}})
	told := life.ExpireTold{Timer: m, Record: rec, Warn: x.Warn}
	switch kindOf(err) {
	case errkind.OK:
		if x.Warn {
			s.w.cov.hit("end of retention announced")
		} else {
			s.w.cov.hit("retention ended")
		}
	case errkind.Conflict, errkind.Exhausted:
		s.w.cov.hit("end of retention refused as too early")
		told.Verdict = life.Early
	case errkind.Refused, errkind.StaleEpoch, errkind.NotFound, errkind.Superseded:
		told.Verdict = life.Moot
	default:
		return nil, err
	}
	return told, nil
}

// rebuild arms the timers that are missing.
func (s *lifecycle) rebuild(t *task) {
	for {
		c := s.w.within(nil, 30*time.Second)
		all, err := ask[[]*sched.Session](t, c, "scheduler", "list", nil)
		if err != nil {
			t.sleep(nil, time.Second)
			continue
		}
		for _, x := range all {
			armed := map[string]bool{}
			for _, kind := range []string{life.TimerIdle, life.TimerWarn, life.TimerExpire} {
				armed[kind] = s.w.stream.timers[timerKey{string(x.Tenant), string(x.Key), kind}] != nil
			}
			_ = s.act(t, c, life.Found{Record: recordOf(x), Timers: armed}, nil)
		}
		t.sleep(nil, 20*time.Second)
	}
}
