package session

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

// What was refused, failed or was reset like one told already is counted and told once in a time.
const (
	recordWindow = 10 * time.Second
	eventWindow  = time.Minute
	noticeEvery  = time.Second
	noticeAgain  = 2 * time.Second
	lastRefused  = 20
	maxNotice    = 48 << 10
	maxPath      = 512 // bytes of a path in a record
)

// told is what a session was told, and what it is to be told.
type told struct {
	mu      sync.Mutex
	records tally
	events  tally
	refused []refused // the oldest first
	greeted map[string]struct{}

	dirty   atomic.Bool
	pushing atomic.Bool
	nextAt  atomic.Int64 // nanoseconds of Now: not before
}

// Note implements Session. It fills in and may keep r, which must not be changed after it.
func (s *Bound) Note(r *egressv1.Record) error {
	now := s.t.cfg.Now()
	s.fill(r, now)
	if s.t.cfg.Noted != nil {
		s.t.cfg.Noted(r)
	}
	if r.GetVerdict() == egressv1.Verdict_VERDICT_ALLOWED {
		if err := s.record(r); err != nil {
			return err
		}
		s.greet(r)
		return nil
	}
	s.told.mu.Lock()
	s.remember(r, now)
	out, c, first := s.told.records.add(r, now, recordWindow)
	if first {
		c.record = out.GetId()
	}
	record := c.record
	event, tell := r, false
	if v := r.GetVerdict(); v == egressv1.Verdict_VERDICT_DENIED || v == egressv1.Verdict_VERDICT_RESET {
		event, c, tell = s.told.events.add(r, now, eventWindow)
		c.record = record
	}
	s.told.mu.Unlock()
	s.told.dirty.Store(true)
	if tell {
		s.t.cfg.Outlet.Event("denied", s.event(event, record, 1))
	}
	if first {
		return s.record(out)
	}
	return nil
}

// fill completes a record.
func (s *Bound) fill(r *egressv1.Record, now time.Time) {
	b := s.binding
	r.Id = s.newID()
	r.Session, r.Actor, r.Host, r.Sandbox = b.GetSession(), b.GetActor(), s.t.cfg.Host, b.GetSandbox()
	if r.GetEnded() == nil {
		r.Ended = timestamppb.New(now)
	}
	if r.GetBegan() == nil {
		r.Began = r.Ended
	}
	r.Authority, r.Path, r.Method = short(r.GetAuthority(), 260), short(r.GetPath(), maxPath), short(r.GetMethod(), 32)
}

func (s *Bound) newID() string { return "egress-" + s.t.cfg.Host + "-" + nuid.Next() }

// unfinished is the record of something that is open, should the gate die before it has another.
func (s *Bound) unfinished(req policy.Request, dec policy.Decision) *egressv1.Record {
	r := &egressv1.Record{Protocol: string(req.Protocol), Authority: string(req.Name), Port: uint32(req.Port), Method: req.Method, Path: req.Path,
		Verdict: egressv1.Verdict_VERDICT_RESET, Rule: dec.Rule, Layer: dec.Layer, PolicyGeneration: dec.Generation, Reason: string(policy.AuditAway), Reported: dec.Reported}
	s.fill(r, s.t.cfg.Now())
	return r
}

// cut marks a text that went on. No path or name that is judged holds it: there it would be encoded.
const cut = "…"

// short bounds what a sandbox chose, and keeps it valid text.
func short(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most-len(cut)], "") + cut
}

// record gives a record to the audit log.
func (s *Bound) record(r *egressv1.Record) error {
	if err := s.t.cfg.Audit.Record(r); err != nil {
		return &Refusal{policy.AuditAway, "it could not be recorded, so it is not let out"}
	}
	return nil
}

// greet tells that a host was reached for the first time.
func (s *Bound) greet(r *egressv1.Record) {
	s.told.mu.Lock()
	_, known := s.told.greeted[r.GetAuthority()]
	if !known && len(s.told.greeted) < maxHosts {
		if s.told.greeted == nil {
			s.told.greeted = map[string]struct{}{}
		}
		s.told.greeted[r.GetAuthority()] = struct{}{}
	} else {
		known = true // there are too many to tell
	}
	s.told.mu.Unlock()
	if !known {
		s.t.cfg.Outlet.Event("allowed", s.event(r, r.GetId(), 1))
	}
}

// event makes the event of a record; record is the id of the one that was written of it, or of its like.
func (s *Bound) event(r *egressv1.Record, record string, times uint64) *egressv1.Event {
	e := &egressv1.Event{Session: r.GetSession(), Host: r.GetHost(), At: r.GetEnded(), What: "denied", Authority: r.GetAuthority(),
		Port: r.GetPort(), Protocol: r.GetProtocol(), Method: r.GetMethod(), Path: r.GetPath(), Rule: r.GetRule(),
		PolicyGeneration: r.GetPolicyGeneration(), Reason: r.GetReason(), Times: times, Record: record}
	switch r.GetVerdict() {
	case egressv1.Verdict_VERDICT_ALLOWED:
		e.What, e.Text = "allowed", fmt.Sprintf("The session reached %s for the first time since it woke.", r.GetAuthority())
	case egressv1.Verdict_VERDICT_RESET:
		e.What, e.Text = "reset", s.sentence(r)
	default:
		e.Text = s.sentence(r)
	}
	return e
}

// flush tells what was counted; last: all of it, whenever it was.
func (s *Bound) flush(last bool) {
	now := s.t.cfg.Now()
	s.told.mu.Lock()
	records := s.told.records.due(now, recordWindow, last, s.newID)
	events := s.told.events.due(now, eventWindow, last, nil)
	s.told.mu.Unlock()
	for _, f := range records {
		r := proto.CloneOf(f.last)
		r.Id, r.Began, r.Times = f.record, timestamppb.New(f.first), f.times
		r.BytesOut, r.BytesIn = f.out, f.in
		if err := s.record(r); err != nil {
			s.t.cfg.Log.Warn("how often it was refused or failed is not recorded", "session", r.GetSession().GetSession(), "times", f.times, "error", err)
		}
	}
	for _, f := range events {
		s.t.cfg.Outlet.Event("denied", s.event(f.last, f.record, f.times))
	}
}

// push gives the sandbox its notice if that changed, at most once a second.
func (s *Bound) push(ctx context.Context) {
	now := s.t.cfg.Now()
	if !s.told.dirty.Load() || now.UnixNano() < s.told.nextAt.Load() || !s.told.pushing.CompareAndSwap(false, true) {
		return
	}
	select {
	case s.t.pushs <- struct{}{}:
	default: // others are at it
		s.told.pushing.Store(false)
		return
	}
	s.told.dirty.Store(false)
	s.told.nextAt.Store(now.Add(noticeEvery).UnixNano())
	go func() {
		defer func() { s.told.pushing.Store(false); <-s.t.pushs }()
		err := s.t.cfg.Outlet.Notice(ctx, s.binding, s.Notice())
		if err != nil && !errs.Is(err, errkind.StaleEpoch) {
			s.told.nextAt.Store(now.Add(noticeAgain).UnixNano())
			s.told.dirty.Store(true)
		}
	}()
}

// tally counts like records.
type tally struct{ by map[likeness]*counted }

// likeness is what like records have in common.
type likeness struct {
	authority, reason, protocol, door, rule string
	port                                    uint32
	verdict                                 egressv1.Verdict
}

type counted struct {
	at    time.Time // of the last that was told
	first time.Time // of those that are counted
	times uint64
	last  *egressv1.Record
	// bytes of those that are counted
	out, in uint64
	// record is the id of the last one that was written of them.
	record string
}

// maxLike is how many different ones are told apart; more of them are told as ones without an authority, so
// that a sandbox which asks for thousands of names fills neither the memory nor the audit log.
const maxLike = 200

// add counts a record with its like; true: it is to be told now, as it was returned.
func (t *tally) add(r *egressv1.Record, now time.Time, window time.Duration) (*egressv1.Record, *counted, bool) {
	k := likeness{r.GetAuthority(), r.GetReason(), r.GetProtocol(), r.GetDoor(), r.GetRule(), r.GetPort(), r.GetVerdict()}
	c := t.by[k]
	if c == nil && len(t.by) >= maxLike {
		r = proto.CloneOf(r)
		r.Authority, r.Port, r.Path, r.Method = "", 0, "", ""
		k.authority, k.port, k.rule = "", 0, ""
		c = t.by[k]
	}
	if t.by == nil {
		t.by = map[likeness]*counted{}
	}
	if c == nil {
		c = &counted{at: now}
		t.by[k] = c
		return r, c, true
	}
	if c.times == 0 {
		if now.Sub(c.at) >= window {
			c.at = now
			return r, c, true
		}
		c.first = now
	}
	c.times, c.last = c.times+1, r
	c.out, c.in = c.out+r.GetBytesOut(), c.in+r.GetBytesIn()
	return nil, c, false
}

// due are those whose time has come. What was not met again for a window is forgotten. id, if there is one,
// names the records that are to be written of them.
func (t *tally) due(now time.Time, window time.Duration, all bool, id func() string) []counted {
	var out []counted
	for k, c := range t.by {
		if !all && now.Sub(c.at) < window {
			continue
		}
		if c.times == 0 {
			delete(t.by, k)
			continue
		}
		if id != nil {
			c.record = id()
		}
		out = append(out, *c)
		*c = counted{at: now, record: c.record}
	}
	return out
}
