// Package core decides, without any I/O, which grants are issued, when
// signing keys come and go, which generations are dead and who may have a
// data key or a tenant's secret. It guarantees that a grant is never issued for a generation that
// was revoked, never lives longer than the policy allows since the user's own
// token was verified, and is signed by a key that verifiers could fetch before.
package core

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

// Policy holds the times that decisions follow.
type Policy struct {
	// TTL is the life of a grant.
	TTL time.Duration
	// MaxAuth is how long grants are given after the last verification of the
	// user's own token.
	MaxAuth time.Duration
	// Rotate is how long one key signs.
	Rotate time.Duration
	// Ahead is how long a key is in the key set before it signs.
	Ahead time.Duration
}

// Generation names one life of a session.
type Generation struct {
	Tenant     ids.Tenant
	Session    ids.SessionKey
	Generation ids.Generation
}

// Session is one placement of one life of a session.
type Session struct {
	Generation
	Epoch ids.Epoch
}

// Actor is on whose behalf something happens.
type Actor struct {
	Tenant   ids.Tenant
	Frontend ids.Frontend
	Issuer   string
	Subject  string
	// Acting and Role say who acts for the user, or that it is no user; for the
	// record only.
	Acting, Role string
}

// SigningKey is in the key set from the moment it is made until its
// successor has signed for longer than a grant lives.
type SigningKey struct {
	ID   ids.KeyID
	From time.Time
}

// State is what credentials remembers in memory. Decide owns the state that
// it is given; its maps are changed in place.
type State struct {
	Policy  Policy
	Keys    []SigningKey // oldest first
	Revoked map[Generation]time.Time
	// Ended are the grants that ended before their time.
	Ended grant.Endings
	// Latest is the latest iat of a grant, in Unix seconds.
	Latest int64
}

// NewState returns a state without keys; Tick asks for the first one.
func NewState(p Policy) State {
	return State{Policy: p, Revoked: map[Generation]time.Time{}, Ended: grant.Endings{}}
}

// Refusal is why a request is not granted.
type Refusal struct {
	Kind   errkind.Kind
	Reason string
}

func (r *Refusal) Error() string { return r.Reason }

func refuse(kind errkind.Kind, format string, args ...any) error {
	return &Refusal{kind, fmt.Sprintf(format, args...)}
}

// Event is something that happened or is asked for.
type Event interface{ event() }

// Tick: time passed.
type Tick struct{}

// KeyMade: a signing key is stored.
type KeyMade struct{ Key SigningKey }

// Mint: identity asks for a grant for a session that was just opened.
type Mint struct {
	Session  Session
	Actor    Actor
	Host     ids.Host
	Confirm  grant.Confirmation
	Verified time.Time // when the user's token was verified
	ID       string    // of the new grant, unused before
	Verbs    []grant.Verb
	Once     bool          // it cannot be renewed
	TTL      time.Duration // a shorter life than the policy's; zero: the policy's
}

// Renew: identity hands on a grant whose signature, times and proof are good.
type Renew struct {
	Old   grant.Claims
	Actor Actor // issuer and subject are empty when no live token came along
	// Verified is when a token that came along was verified, else zero.
	Verified time.Time
	ID       string
}

// Revoke: scheduler deleted a generation.
type Revoke struct {
	Generation Generation
	Reason     string
}

// DataKey: a host asks for the data key of a generation. Record is what
// scheduler says of the session at this moment.
type DataKey struct {
	Host    ids.Host
	Session Session
	Record  Record
}

// Record is scheduler's record of a session, as far as it matters here.
type Record struct {
	Found   bool
	Session Session
	Host    ids.Host
	Awake   bool // waking, active or sleeping: the states with compute
	Ending  bool // sleeping: nothing of it goes out any more
	Deleted bool // or being deleted
}

// Ended reports whether a generation that once had an epoch has none to come.
func (r Record) Ended(g Generation) bool {
	return !r.Found || r.Session.Generation != g || r.Deleted
}

func (Tick) event()    {}
func (KeyMade) event() {}
func (Mint) event()    {}
func (Renew) event()   {}
func (Revoke) event()  {}
func (DataKey) event() {}

// Command is what the shell has to do. Each can be repeated.
type Command interface{ command() }

// MakeKey: make and store a signing key, then report KeyMade.
type MakeKey struct{ Key SigningKey }

// DropKey: erase a signing key that verifies nothing any more.
type DropKey struct{ ID ids.KeyID }

// Sign: sign these claims with this key; the result is the answer.
type Sign struct {
	Key    ids.KeyID
	Claims grant.Claims
}

// EndGeneration: make a revocation durable, then overwrite and remove the
// data key of the generation.
type EndGeneration struct {
	Generation Generation
	Until      time.Time
}

// DropRevocation: no grant of the generation can be alive any more.
type DropRevocation struct{ Generation Generation }

// GiveDataKey: read or create the data key and seal it to the host.
type GiveDataKey struct{ Generation Generation }

// Audit: record what was decided.
type Audit struct {
	What    string
	Session Session
	Actor   Actor
	GrantID string
	Expires time.Time
	Reason  string
}

func (MakeKey) command()        {}
func (DropKey) command()        {}
func (Sign) command()           {}
func (EndGeneration) command()  {}
func (DropRevocation) command() {}
func (GiveDataKey) command()    {}
func (Audit) command()          {}

// Decide applies one event. With an error come only commands that record the
// refusal, and the state is unchanged.
func Decide(s State, ev Event, now time.Time) (State, []Command, error) {
	switch e := ev.(type) {
	case Tick:
		return tick(s, now)
	case KeyMade:
		return keyMade(s, e)
	case Mint:
		return mint(s, e, now)
	case Renew:
		return renew(s, e, now)
	case Revoke:
		return revoke(s, e, now)
	case DataKey:
		return dataKey(s, e)
	case EndGrants:
		return endGrants(s, e, now)
	case Reveal:
		return reveal(s, e)
	case PutSecret:
		return putSecret(s, e)
	case RemoveSecret:
		return removeSecret(s, e)
	}
	return s, nil, refuse(errkind.Internal, "unknown event %T", ev)
}

func tick(s State, now time.Time) (State, []Command, error) {
	var out []Command
	if len(s.Keys) == 0 {
		out = append(out, MakeKey{SigningKey{"k1", now}})
	} else if last := s.Keys[len(s.Keys)-1]; !now.Before(last.From.Add(s.Policy.Rotate - s.Policy.Ahead)) {
		from := last.From.Add(s.Policy.Rotate)
		if soonest := now.Add(s.Policy.Ahead); from.Before(soonest) {
			from = soonest
		}
		out = append(out, MakeKey{SigningKey{following(last.ID), from}})
	}
	for len(s.Keys) > 1 && now.After(s.Keys[1].From.Add(s.Policy.TTL+grant.Skew)) {
		out = append(out, DropKey{s.Keys[0].ID})
		s.Keys = slices.Clone(s.Keys[1:])
	}
	var over []Generation
	for g, until := range s.Revoked {
		if now.After(until) {
			over = append(over, g)
		}
	}
	slices.SortFunc(over, compareGenerations)
	for _, g := range over {
		delete(s.Revoked, g)
		out = append(out, DropRevocation{g})
	}
	return s, append(out, s.dropEndings(now)...), nil
}

func compareGenerations(a, b Generation) int {
	return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Session, b.Session), a.Generation.Compare(b.Generation))
}

// following counts k1, k2, ...
func following(id ids.KeyID) ids.KeyID {
	n, _ := strconv.ParseUint(string(id[1:]), 10, 64)
	return ids.KeyID("k" + strconv.FormatUint(n+1, 10))
}

func number(id ids.KeyID) uint64 {
	n, _ := strconv.ParseUint(string(id[1:]), 10, 64)
	return n
}

func keyMade(s State, e KeyMade) (State, []Command, error) {
	if len(e.Key.ID) < 2 || number(e.Key.ID) == 0 {
		return s, nil, refuse(errkind.DataLoss, "signing key %q has no number", e.Key.ID)
	}
	for _, k := range s.Keys {
		if k.ID == e.Key.ID {
			return s, nil, nil
		}
	}
	s.Keys = append(slices.Clone(s.Keys), e.Key)
	slices.SortFunc(s.Keys, func(a, b SigningKey) int { return cmp.Compare(number(a.ID), number(b.ID)) })
	return s, []Command{Audit{What: "rotated", Reason: "signing key " + string(e.Key.ID)}}, nil
}

// signing returns the newest key that signs now; a clock that was set back
// falls on the oldest.
func (s State) signing(now time.Time) (ids.KeyID, bool) {
	for _, k := range slices.Backward(s.Keys) {
		if !k.From.After(now) {
			return k.ID, true
		}
	}
	if len(s.Keys) > 0 {
		return s.Keys[0].ID, true
	}
	return "", false
}

func revoke(s State, e Revoke, now time.Time) (State, []Command, error) {
	until := now.Add(s.Policy.TTL + grant.Skew).Truncate(time.Second)
	if had, ok := s.Revoked[e.Generation]; ok {
		until = had
	}
	s.Revoked[e.Generation] = until
	return s, []Command{
		EndGeneration{e.Generation, until},
		Audit{What: "revoked", Session: Session{Generation: e.Generation}, Reason: e.Reason},
	}, nil
}

func dataKey(s State, e DataKey) (State, []Command, error) {
	if err := s.owns(e.Host, e.Session, e.Record); err != nil {
		return s, []Command{Audit{What: "refused", Session: e.Session, Reason: "data key for host " + string(e.Host) + ": " + err.Reason}}, err
	}
	return s, []Command{
		GiveDataKey{e.Session.Generation},
		Audit{What: "issued", Session: e.Session, Reason: "data key for host " + string(e.Host)},
	}, nil
}

// owns says why a host does not own a session's epoch now; nil if it does.
func (s State) owns(host ids.Host, on Session, r Record) *Refusal {
	no := func(kind errkind.Kind, reason string) *Refusal { return &Refusal{kind, reason} }
	if _, dead := s.Revoked[on.Generation]; dead {
		return no(errkind.Superseded, "the session was deleted")
	}
	switch {
	case !r.Found:
		return no(errkind.NotFound, "scheduler knows no such session")
	case r.Session != on:
		return no(errkind.StaleEpoch, "this generation and epoch are not the session's current ones")
	case host == "" || r.Host != host:
		return no(errkind.Denied, "the host does not own this epoch")
	case !r.Awake:
		return no(errkind.StaleEpoch, "the session is not awake in this epoch")
	}
	return nil
}
