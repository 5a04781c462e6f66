// Package hostend is the host's side of the guest channel: it attaches to the
// agent of one sandbox and turns frames into calls.
//
// # Guarantees
//
// A Conn exists only after the guest answered in this very attach, so having one
// means that the guest is ready. A Conn is safe for concurrent use. It trusts
// nothing that the guest says: memory per call is bounded by the window of 1 MiB
// per stream (2 for an exec) plus what a page may hold (1 MiB), and a guest that
// breaks the protocol costs its own Conn and nothing else.
//
// A Conn is never repaired. When the channel is lost all its calls return
// ErrChannelLost; whoever owns the sandbox attaches again on the same streams,
// lists the execs, and attaches or detaches each. What a lost call did is
// unknown, so calls can be repeated: a start by its key, output and stdin by
// offset, a write of a file as a whole. An exec's exit is unknown only if the
// guest then says ErrNoSuchExec.
//
// Only one Conn may use a channel at a time. Close waits until the old one has
// stopped reading, so that the next one gets every byte.
//
// # Ordering and back-pressure
//
// Calls run in parallel and in no order. Output of an exec comes in order per
// stream; an exit comes after all bytes the process wrote. A consumer that does
// not take its bytes stops its own exec and nothing else. A context ends the
// waiting, not what the guest was asked to do.
package hostend
