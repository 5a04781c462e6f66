package sdk

import (
	"context"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
)

// EndedError: the placement of the session in which a stream or a call was under way is over. Nobody
// on the lost host could say so: it was learned from the session's events. It comes as the cause of an
// [*Error] that is ErrStaleEpoch, and of an [*UnknownExitError]. [Session.Reopen] makes the handle good
// again.
type EndedError struct {
	Epoch string // that is over
	Host  string // where it was; empty where the event does not tell
	Event string // displaced, asleep, paused, failed or deleted; placed or active: it was seen elsewhere
	// Handoff: it wakes on another host without being asked; OnHandoff tells as of when.
	Handoff bool
	Reason  string // one sentence, for a person
}

func (e *EndedError) Error() string { return e.Reason }

// Handoff tells that a session that was awake on a lost, drained or removed host is awake on another.
type Handoff struct {
	From, To string // hosts; the same if it was back in time
	Epoch    string // the new one
	// Origin is Resumed (nothing is missing) or Restored: then what was written after RestoredAsOf is
	// gone. Processes did not come along.
	Origin       Origin
	RestoredAsOf time.Time
}

// hostsOwnWord is how long the host, where it lives, has for its own word on how a stream ended: an
// event of scheduler may overtake the last frames of the host.
const hostsOwnWord = time.Second

// attendant is a stream or a call under way in one epoch.
type attendant struct {
	epoch *corev1.Stamp
	end   func(error)
}

// newer reports whether epoch a was placed after b.
func newer(a, b *corev1.Stamp) bool {
	if a.GetIncarnation() != b.GetIncarnation() {
		return a.GetIncarnation() > b.GetIncarnation()
	}
	return a.GetIndex() > b.GetIndex()
}

// heed subscribes to the session's events for as long as the handle is used.
func (s *Session) heed() error {
	subject, err := s.c.eventSubject(EventFilter{Session: s.Key()})
	if err != nil {
		return err
	}
	s.told = s.current().GetSession().GetEpoch()
	sub, err := s.c.nc.Subscribe(subject, func(msg *nats.Msg) {
		if e, ok := EventOf(msg.Subject, msg.Header, msg.Data); ok {
			s.heard(e)
		}
	})
	if err != nil {
		return wrap("subscribe to the session's events", err)
	}
	context.AfterFunc(s.ctx, func() { _ = sub.Unsubscribe() })
	return nil
}

// heard judges one event: which epochs it ends, and whether it is a handoff.
func (s *Session) heard(e Event) {
	b, ok := e.Body.(*schedulerv1.Event)
	epoch := b.GetSession().GetEpoch()
	if !ok || epoch.GetIndex() == 0 {
		return
	}
	switch end := ended(e.Name, b); {
	case end == nil:
	case e.Name == "displaced": // the host has nothing more to say
		s.over(epoch, end)
	default:
		time.AfterFunc(hostsOwnWord, func() { s.over(epoch, end) })
	}
	if a := b.GetActive(); a.GetCause() == corev1.Cause_CAUSE_HANDOFF && newer(epoch, s.told) {
		s.told = epoch
		if s.opts.OnHandoff != nil {
			h := Handoff{From: a.GetFromHost(), To: a.GetHost(), Epoch: stamp(epoch), Origin: originOf(a.GetOrigin())}
			if t := a.GetRestoredAsOf(); t != nil {
				h.RestoredAsOf = t.AsTime()
			}
			go s.opts.OnHandoff(h)
		}
	}
}

// ended says why placements are over after an event, or nil. What an event of a newer placement ends
// is said of those before it.
func ended(name string, b *schedulerv1.Event) *EndedError {
	end := &EndedError{Event: name}
	switch name {
	case "displaced":
		d := b.GetDisplaced()
		end.Host, end.Handoff = d.GetHost(), d.GetHandoff()
		end.Reason = or(d.GetReason(), "it lost the session")
		if !strings.Contains(end.Reason, end.Host) {
			end.Reason = "host " + end.Host + ": " + end.Reason
		}
		if end.Handoff {
			end.Reason += "; the session is handed over to another host"
		} else {
			end.Reason += "; open the session again to wake it"
		}
	case "asleep":
		if a := b.GetAsleep(); a.GetReason() == "drain" {
			end.Host, end.Handoff = a.GetHost(), true
			end.Reason = "host " + a.GetHost() + " is drained; the session is handed over to another host"
			break
		}
		end.Host, end.Reason = b.GetAsleep().GetHost(), "the session fell asleep ("+or(b.GetAsleep().GetReason(), "no reason")+"); open it again to wake it"
	case "paused":
		end.Reason = "the session was paused (" + or(b.GetPaused().GetReason(), "no reason") + ")"
	case "failed":
		end.Reason = "the session failed (" + or(b.GetFailed().GetFailure().GetReason(), "no reason") + "); open it again to try again"
	case "deleted":
		end.Reason = "the session was deleted; open it again for a new one"
	case "placed":
		end.Reason = "the session moved to host " + b.GetPlaced().GetHost() + "; open it again"
	case "active":
		end.Reason = "the session moved to host " + b.GetActive().GetHost() + "; open it again"
	default:
		return nil
	}
	return end
}

// over ends what is under way in epochs up to one: that of the event, or, where the event is of a
// newer placement, all before it.
func (s *Session) over(epoch *corev1.Stamp, why *EndedError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	inclusive := why.Event != "placed" && why.Event != "active"
	hit := func(e *corev1.Stamp) bool { return newer(epoch, e) || inclusive && !newer(e, epoch) }
	if here := s.reply.GetSession().GetEpoch(); hit(here) && (s.last == nil || newer(here, s.lastEpoch)) {
		s.last, s.lastEpoch = why, here
	}
	for a := range s.attending {
		if hit(a.epoch) {
			delete(s.attending, a)
			a.end(endedIn(a.epoch, why))
		}
	}
}

// endedIn makes the error of something that was under way in epoch.
func endedIn(epoch *corev1.Stamp, why *EndedError) error {
	e := *why
	e.Epoch = stamp(epoch)
	return &Error{Kind: errkind.StaleEpoch, Reason: e.Reason, Cause: &e}
}

// attend has end called when epoch is over, at once if it is already; at most once, with a lock held.
func (s *Session) attend(epoch *corev1.Stamp, end func(error)) (leave func()) {
	a := &attendant{epoch, end}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && !newer(epoch, s.lastEpoch) {
		end(endedIn(epoch, s.last))
		return func() {}
	}
	s.attending[a] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.attending, a)
	}
}

// whyOver waits a moment for the event that tells why the handle's placement is over, which an attempt
// to use it found out first. It returns stale, that attempt's error, when none comes.
func (s *Session) whyOver(ctx context.Context, stale error) error {
	told := make(chan error, 1)
	defer s.attend(s.current().GetSession().GetEpoch(), func(err error) { told <- err })()
	select {
	case err := <-told:
		return err
	case <-time.After(2 * hostsOwnWord):
	case <-ctx.Done():
	}
	return stale
}
