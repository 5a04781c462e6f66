package sim

// Mutation is a guard of the system that is switched off.
type Mutation string

// The mutations. Each is a defect that the simulation has to find.
const (
	None             Mutation = ""
	HostIgnoresLease Mutation = "hosts act and run without a lease"
	GiveAwayEarly    Mutation = "scheduler gives away before the lease is over on the host"
	CommitAnyEpoch   Mutation = "a manifest is committed without a lease and whatever its epoch"
	WakeTakesAnyDisk Mutation = "a wake takes the local disk whether or not it is the newest"
	KeysForAnybody   Mutation = "credentials does not ask who owns the session"
	NoVerify         Mutation = "a leader that was deposed goes on and answers without asking whether it still leads"
	OutboxSkips      Mutation = "the outbox leaves events out"
	ThawsUnseen      Mutation = "a host thaws before it compared itself with what it owns"
	AckBeforeCommit  Mutation = "a sleep is acknowledged though nothing was saved"
)

// Mutations lists them.
func Mutations() []Mutation {
	return []Mutation{HostIgnoresLease, GiveAwayEarly, CommitAnyEpoch, WakeTakesAnyDisk, KeysForAnybody, NoVerify, OutboxSkips, ThawsUnseen, AckBeforeCommit}
}
