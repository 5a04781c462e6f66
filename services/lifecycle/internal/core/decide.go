package core

import (
	"fmt"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Kinds of timer. A session has at most one of each.
const (
	TimerIdle   = "idle"
	TimerWarn   = "warn"
	TimerExpire = "expire"
)

// Event is something that happened: one of the types below.
type Event interface{ isEvent() }

// OpenAsked: identity vouches for a request to be awake.
type OpenAsked struct {
	Verified *lifecyclev1.Verified
	Ask      *identityv1.OpenRequest
	// Fleet is what the hosts offer; the zero value when nobody knows.
	Fleet Fleet
}

// Scheduled: scheduler committed something about a session.
type Scheduled struct{ Event *schedulerv1.Event }

// TimerDue: a timer fired. Record is scheduler's present record of the session,
// nil when it knows none.
type TimerDue struct {
	Timer  *lifecyclev1.Timer
	Record *schedulerv1.SessionRecord
}

// ActivityTold: the owner host told of the last activity.
type ActivityTold struct {
	Timer  *lifecyclev1.Timer
	Record *schedulerv1.SessionRecord
	Busy   bool
	Since  time.Time
}

// SleepRefused: the host was busy after all.
type SleepRefused struct {
	Timer *lifecyclev1.Timer
	Since time.Time
}

// ExpireTold: scheduler's answer to Expire.
type ExpireTold struct {
	Timer   *lifecyclev1.Timer
	Record  *schedulerv1.SessionRecord
	Warn    bool
	Verdict Verdict
}

// Verdict is what scheduler says to an Expire.
type Verdict int

const (
	// Granted: the warning is noted, or the delete is committed.
	Granted Verdict = iota
	// Early: it may be right later: too little of scheduler's own time has
	// passed since the warning, or too many sessions end at once.
	Early
	// Moot: the session is gone, has changed since, or is kept without limit.
	Moot
)

// Found: scheduler lists a session, and these of its timers exist.
type Found struct {
	Record *schedulerv1.SessionRecord
	Timers map[string]bool
}

func (OpenAsked) isEvent()    {}
func (Scheduled) isEvent()    {}
func (TimerDue) isEvent()     {}
func (ActivityTold) isEvent() {}
func (SleepRefused) isEvent() {}
func (ExpireTold) isEvent()   {}
func (Found) isEvent()        {}

// Command is something to do: one of the types below.
type Command interface{ isCommand() }

// Wake asks scheduler for the session to be active.
type Wake struct{ Admission *corev1.Admission }

// Publish records an event of lifecycle.
type Publish struct {
	Name            string
	Tenant, Session string
	Body            proto.Message
}

// Arm sets the timer of that kind, replacing one that is set.
type Arm struct{ Timer *lifecyclev1.Timer }

// AskActivity asks the host for the session's last activity.
type AskActivity struct {
	Host string
	Ref  *corev1.SessionRef
}

// Sleep asks scheduler to put the session to sleep if it is idle since then.
type Sleep struct {
	Ref   *corev1.SessionRef
	Since time.Time
}

// Expire asks scheduler to delete the session if its retention is over; with
// Warn, only to note that its end was announced, from when it counts the notice.
type Expire struct {
	Ref      *corev1.SessionRef
	Revision uint64
	Warn     bool
}

func (Wake) isCommand()        {}
func (Publish) isCommand()     {}
func (Arm) isCommand()         {}
func (AskActivity) isCommand() {}
func (Sleep) isCommand()       {}
func (Expire) isCommand()      {}

// Decide says what to do about ev at now. The error is a refusal for a person
// to read; the commands that come with it still hold.
func Decide(p Policy, ev Event, now time.Time) ([]Command, error) {
	switch e := ev.(type) {
	case OpenAsked:
		return p.open(e, now)
	case Scheduled:
		return onScheduled(e.Event), nil
	case TimerDue:
		return onDue(e, now), nil
	case ActivityTold:
		return onActivity(e, now), nil
	case SleepRefused:
		return []Command{rearm(e.Timer, e.Since.Add(e.Timer.GetIdle().AsDuration()), now)}, nil
	case ExpireTold:
		return onExpireTold(e, now), nil
	case Found:
		return onFound(e, now), nil
	}
	return nil, fmt.Errorf("event %T is not known", ev)
}

func (p Policy) open(e OpenAsked, now time.Time) ([]Command, error) {
	v := e.Verified
	terms, decision, err := p.Terms(v, e.Ask, e.Fleet)
	wait := DefaultWait
	if w := e.Ask.GetWait(); w != nil && err == nil {
		if wait = w.AsDuration(); wait <= 0 || wait > MaxWait {
			err = fmt.Errorf("wait is %s; it must be more than 0 and at most %s", wait, MaxWait)
		}
	}
	stored := v.GetStoredAt().AsTime()
	deadline := stored.Add(wait)
	if err == nil && !now.Before(deadline) {
		err = fmt.Errorf("the request's deadline passed %s ago", now.Sub(deadline).Round(time.Millisecond))
	}
	if err != nil {
		return []Command{refused(v, err)}, err
	}
	return []Command{Wake{&corev1.Admission{
		Actor: v.GetActor(), Terms: terms, RequestId: v.GetRequestId(), BodyHash: v.GetBodyHash(),
		StoredAt: v.GetStoredAt(), Deadline: timestamppb.New(deadline), Cause: corev1.Cause_CAUSE_RESUME,
		SessionName: v.GetSessionName(), Keys: v.GetKeys(), TierDecision: decision,
	}}}, nil
}

func refused(v *lifecyclev1.Verified, err error) Publish {
	session := ""
	if keys := v.GetKeys(); len(keys) > 0 {
		session = keys[0]
	}
	tenant := v.GetActor().GetTenant()
	return Publish{Name: "refused", Tenant: tenant, Session: session, Body: &lifecyclev1.Refused{
		Tenant: tenant, Session: session, RequestId: v.GetRequestId(),
		Failure: &corev1.Failure{Kind: "refused", Reason: err.Error()},
	}}
}

// onScheduled arms what follows from a commit. Active and renewed start the
// idle clock; asleep starts the retention clock. Nothing needs disarming: a
// timer that fires late finds another revision and does nothing.
func onScheduled(ev *schedulerv1.Event) []Command {
	at := ev.GetAt().AsTime()
	switch d := ev.GetDetail().(type) {
	case *schedulerv1.Event_Active:
		return []Command{idleTimer(ev.GetSession(), ev.GetRevision(), at, d.Active.GetIdle().AsDuration())}
	case *schedulerv1.Event_Renewed:
		return []Command{idleTimer(ev.GetSession(), ev.GetRevision(), at, d.Renewed.GetIdle().AsDuration())}
	case *schedulerv1.Event_Asleep:
		if retention := d.Asleep.GetRetention().AsDuration(); retention > 0 { // else it is kept without limit
			return []Command{warnTimer(ev.GetSession(), ev.GetRevision(), at, retention)}
		}
	}
	return nil
}

func idleTimer(ref *corev1.SessionRef, revision uint64, at time.Time, idle time.Duration) Arm {
	return Arm{&lifecyclev1.Timer{Session: ref, Kind: TimerIdle, Revision: revision, ArmedAt: timestamppb.New(at),
		Due: timestamppb.New(at.Add(idle)), Idle: durationpb.New(idle)}}
}

func warnTimer(ref *corev1.SessionRef, revision uint64, at time.Time, retention time.Duration) Arm {
	return Arm{&lifecyclev1.Timer{Session: ref, Kind: TimerWarn, Revision: revision, ArmedAt: timestamppb.New(at),
		Due: timestamppb.New(at.Add(max(0, retention-Warning))), Retention: durationpb.New(retention)}}
}

func rearm(t *lifecyclev1.Timer, due, now time.Time) Arm {
	next := proto.Clone(t).(*lifecyclev1.Timer)
	next.Due, next.ArmedAt = timestamppb.New(due), timestamppb.New(now)
	return Arm{next}
}

func onDue(e TimerDue, now time.Time) []Command {
	t, r := e.Timer, e.Record
	if r == nil || !proto.Equal(r.GetSession().GetGeneration(), t.GetSession().GetGeneration()) {
		return nil
	}
	if t.GetKind() == TimerIdle {
		if r.GetState() != corev1.State_STATE_ACTIVE || !proto.Equal(r.GetSession().GetEpoch(), t.GetSession().GetEpoch()) {
			return nil
		}
		return []Command{AskActivity{Host: r.GetHost(), Ref: r.GetSession()}}
	}
	if r.GetState() != corev1.State_STATE_ASLEEP || r.GetRevision() != t.GetRevision() {
		return nil
	}
	if t.GetRetention().AsDuration() <= 0 {
		return nil
	}
	return []Command{Expire{Ref: r.GetSession(), Revision: r.GetRevision(), Warn: t.GetKind() == TimerWarn}}
}

// onExpireTold goes on from scheduler's answer: nothing is announced that it
// did not note, and nothing is given up that may be right later.
func onExpireTold(e ExpireTold, now time.Time) []Command {
	t, r := e.Timer, e.Record
	switch {
	case e.Verdict == Moot:
		return nil
	case e.Verdict == Early:
		return []Command{rearm(t, now.Add(ExpireRetry), now)}
	case !e.Warn:
		return []Command{publish("expire", r, &lifecyclev1.Expire{Session: r.GetSession(), ExpiredAt: timestamppb.New(now)})}
	}
	// The end is counted from the warning too: a late warning never shortens the notice.
	end := r.GetChangedAt().AsTime().Add(t.GetRetention().AsDuration())
	if end.Before(now.Add(Warning)) {
		end = now.Add(Warning)
	}
	last := rearm(t, end.Add(ExpireMargin), now)
	last.Timer.Kind = TimerExpire
	return []Command{publish("expiring", r, &lifecyclev1.Expiring{Session: r.GetSession(), ExpiresAt: timestamppb.New(end)}), last}
}

func onActivity(e ActivityTold, now time.Time) []Command {
	idle := e.Timer.GetIdle().AsDuration()
	if e.Busy {
		return []Command{rearm(e.Timer, now.Add(idle), now)}
	}
	if due := e.Since.Add(idle); due.After(now) {
		return []Command{rearm(e.Timer, due, now)}
	}
	return []Command{
		publish(TimerIdle, e.Record, &lifecyclev1.Idle{Session: e.Record.GetSession(),
			IdleSince: timestamppb.New(e.Since), Idle: e.Timer.GetIdle()}),
		Sleep{Ref: e.Record.GetSession(), Since: e.Since}}
}

func publish(name string, r *schedulerv1.SessionRecord, body proto.Message) Publish {
	return Publish{Name: name, Tenant: r.GetSession().GetTenant(), Session: r.GetSession().GetSession(), Body: body}
}

// onFound rebuilds a timer that is missing. An idle timer is due at once: the
// host's answer sets the right time.
func onFound(e Found, now time.Time) []Command {
	r := e.Record
	switch r.GetState() {
	case corev1.State_STATE_ACTIVE:
		if !e.Timers[TimerIdle] {
			arm := idleTimer(r.GetSession(), r.GetRevision(), now, r.GetTerms().GetIdle().AsDuration())
			arm.Timer.Due = timestamppb.New(now)
			return []Command{arm}
		}
	case corev1.State_STATE_ASLEEP:
		if !e.Timers[TimerWarn] && !e.Timers[TimerExpire] && r.GetTerms().GetRetention().AsDuration() > 0 {
			return []Command{warnTimer(r.GetSession(), r.GetRevision(), r.GetChangedAt().AsTime(), r.GetTerms().GetRetention().AsDuration())}
		}
	}
	return nil
}
