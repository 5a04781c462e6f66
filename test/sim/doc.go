// Package sim plays the whole of Berth, with everything that can go wrong, in virtual time: one seed
// decides all, so that what broke once can be looked at as often as one likes. It guarantees that a
// seed gives the same trace, byte for byte, in every process and on every machine: tasks are coroutines
// that hand over at known places, one event happens at a time, one generator draws all chance, and no
// order of a map is ever used.
//
// Real are the cores: scheduler's state machine with its log entries, snapshots, placement, Next, After,
// Before and Refused; hostagent's Decide and the rules of disk records (Usable, AttachedFor, Activated,
// Committed, Droppable); the cores of lifecycle, credentials and identity. They are reached by
// services/*/simcore.
//
// Modelled, as closely as possible on the service's own code: scheduler's leader (leases, the loop of
// each session, queue, drain, erasures, outbox), hostagent's shell (operations, lease, comparison, sweep,
// adoption, watchdog, saves), lifecycle's timers and consumer, credentials' store, identity's two doors.
//
// Invented are: the bus (delays, doubles, drops, cut links, late messages), the replicated log of the
// scheduler (a leader per term; entries in flight when it falls may stay or be lost, a deposed one goes on
// to believe; there is no raft below it), clocks (rates and skews within the bounds of ADR 17, jumps,
// suspension), disks whose content is a chain of writes, the store of snapshots, the stream of events,
// users who open, write, read, save, close, delete and ask again, and an operator. Not simulated are
// tokens and sealing, the data plane's streams, warm pools, egress, metering, restores of chosen snapshots,
// a restored control plane, and a stream that stores the end of a batch without its middle.
//
// After every step the invariants in truth.go are checked against what really happened; at the end all is
// healed, and everything has to come to rest within bounded time, with nothing left over.
package sim
