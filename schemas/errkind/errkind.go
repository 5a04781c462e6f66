// Package errkind numbers the kinds of failure that cross Berth's wire. The
// list is append-only: a number never changes its meaning and is never
// reused; a test holds it to a golden file that only grows. A kind decides
// what becomes of the bus message whose handling failed.
package errkind

import "strconv"

// Kind is one kind of failure. The zero Kind means no failure.
type Kind uint16

// The kinds. Append only.
const (
	OK              Kind = 0
	Invalid         Kind = 1
	Unauthenticated Kind = 2
	Denied          Kind = 3
	Refused         Kind = 4
	NotFound        Kind = 5
	Conflict        Kind = 6
	Superseded      Kind = 7
	Busy            Kind = 8
	NoCapacity      Kind = 9
	Deadline        Kind = 10
	Unavailable     Kind = 11
	Internal        Kind = 12
	StaleEpoch      Kind = 13
	ReplayMismatch  Kind = 14
	TooLarge        Kind = 15
	Expired         Kind = 16
	Canceled        Kind = 17
	Exhausted       Kind = 18
	Unimplemented   Kind = 19
	DataLoss        Kind = 20
	NotLeader       Kind = 21
	Exists          Kind = 22
	Quota           Kind = 23
	Unplaceable     Kind = 24
	Unsaved         Kind = 25
)

// Disposition is what a consumer does with a message whose handler failed.
type Disposition uint8

const (
	// Ack: the outcome is final and was recorded; the message is done.
	Ack Disposition = iota
	// Nak: it may go well later; redeliver after a back-off.
	Nak
	// Term: it will never go well; copy to BERTH_DEAD and end it.
	Term
)

func (d Disposition) String() string { return [...]string{"ack", "nak", "term"}[d] }

// Info describes a kind.
type Info struct {
	Kind        Kind
	Name        string      // stable, lower-case
	HTTP        int         // the nearest HTTP status, for people
	Disposition Disposition // of a consumed message
	Retry       bool        // whether the same request may go well later
	Doc         string
}

var infos = [...]Info{
	{OK, "ok", 200, Ack, false, "No failure."},
	{Invalid, "invalid", 400, Term, false, "The input is malformed or absurd; nothing was changed."},
	{Unauthenticated, "unauthenticated", 401, Term, false, "The token, grant or proof is missing, expired or not ours."},
	{Denied, "denied", 403, Term, false, "The caller is known and may not do this."},
	{Refused, "refused", 403, Ack, false, "Policy or plan says no, with a reason for a person; the answer is final."},
	{NotFound, "not_found", 404, Term, false, "What was named does not exist."},
	{Conflict, "conflict", 409, Nak, true, "Somebody else changed it first; read again and retry."},
	{Superseded, "superseded", 409, Ack, false, "A later committed decision made this one moot."},
	{Busy, "busy", 409, Nak, true, "It is in use and may be free later."},
	{NoCapacity, "no_capacity", 503, Nak, true, "No host has room now."},
	{Deadline, "deadline", 504, Nak, true, "The time allowed ran out; whether it took effect is unknown."},
	{Unavailable, "unavailable", 503, Nak, true, "A needed part cannot be reached."},
	{Internal, "internal", 500, Nak, true, "A defect or an unexpected fault here."},
	{StaleEpoch, "stale_epoch", 409, Ack, false, "The generation or epoch named is not the current one."},
	{ReplayMismatch, "replay_mismatch", 409, Ack, false, "The request id was used before with another body."},
	{TooLarge, "too_large", 413, Term, false, "It is larger than the stated bound."},
	{Expired, "expired", 410, Ack, false, "It was asked for too long ago."},
	{Canceled, "canceled", 499, Nak, true, "The caller gave up or the service is stopping."},
	{Exhausted, "exhausted", 429, Nak, true, "A bounded queue or rate is full."},
	{Unimplemented, "unimplemented", 501, Term, false, "This version does not know that method or version."},
	{DataLoss, "data_loss", 500, Term, false, "Stored bytes are missing or fail their checksum; never replaced silently."},
	{NotLeader, "not_leader", 503, Nak, true, "Another replica leads; ask again."},
	{Exists, "exists", 409, Ack, false, "It exists already."},
	{Quota, "quota", 507, Ack, false, "The session's or tenant's limit is reached."},
	{Unplaceable, "unplaceable", 503, Ack, false, "No host could take it before the deadline."},
	{Unsaved, "unsaved", 503, Ack, false, "The disk is whole on its host, but what was written last is not saved outside it yet."},
}

// All returns every kind in order of its number.
func All() []Info { return append([]Info(nil), infos[:]...) }

// Known reports whether this version knows k.
func (k Kind) Known() bool { return int(k) < len(infos) }

// Info returns k's description; an unknown kind is treated as Internal.
func (k Kind) Info() Info {
	if !k.Known() {
		return infos[Internal]
	}
	return infos[k]
}

// String returns the kind's stable name.
func (k Kind) String() string {
	if !k.Known() {
		return "kind_" + strconv.Itoa(int(k))
	}
	return infos[k].Name
}

// Disposition says what becomes of a message whose handler failed with k.
func (k Kind) Disposition() Disposition { return k.Info().Disposition }

// Retry reports whether the same request may go well later.
func (k Kind) Retry() bool { return k.Info().Retry }

// Parse reads a kind's number in decimal, as the bus carries it. A number
// from a newer version is kept; anything else is Internal.
func Parse(code string) Kind {
	n, err := strconv.ParseUint(code, 10, 16)
	if err != nil || n == 0 {
		return Internal
	}
	return Kind(n)
}
