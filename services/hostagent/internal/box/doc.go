// Package box is the data plane of one host: it answers the openings of streams to the sandboxes
// that are awake here and carries frames between a client and the guest.
//
// It guarantees that
//
//   - an opening is acted on only when it is sealed to this host, its grant is for exactly this
//     session, generation, epoch and host, its proof is by the key that the grant names, is at most
//     two minutes old and was never used before; frames and the answer go nowhere but into the
//     inbox of the frontend that the grant names;
//   - a grant opens only what its verbs cover; what the host knows of revocations is at most 5 seconds
//     old, or nothing opens; a stream ends, with the reason, as soon as the host hears that its grant
//     is revoked, and when its grant has expired and its holder has shown no renewed one;
//   - a stream ends with exactly one last frame (Exit, Result or Failure) unless the client
//     cancelled it, was not heard of for 45 seconds, or the connection to the bus was lost;
//   - output is addressed by the guest's own offsets: what a client missed it can ask for again
//     with ExecAttach, and an exec goes on while nobody is attached;
//   - whatever a client or a guest sends, memory is bounded: by the credit of each direction, by
//     the number of streams, and by the size of every message.
//
// No user process before the commit: host.wake answers before scheduler commits the session as
// active, but only a grant opens a stream, and credentials mints a grant for an epoch only after
// that commit. So the first good opening of an epoch is the proof of its commit; Gate.Admit is
// told and marks the disk as written from then on.
//
// Ordering: frames of one stream arrive in the order of their sequence numbers; a gap (a message
// that the bus dropped for a slow reader) ends the stream. Backpressure: credit, in bytes of data. The guest
// retains output until the client has given credit for it: a client gives credit at the latest when half of
// its first credit is used up.
package box

import "time"

const (
	// MaxCredit is the most that either side may send ahead, in bytes.
	MaxCredit = 1 << 20
	// MaxChunk is the largest piece of data in one frame.
	MaxChunk = 64 << 10
	// PingEvery is how often each side says that it is there.
	PingEvery = 15 * time.Second
	// GoneAfter is how long a client may be silent before its stream is given up.
	GoneAfter = 45 * time.Second
	// AttachAgainWithin bounds how long the guest retains all output of an exec after its stream broke. The SDK tries
	// to attach again for 1 minute.
	AttachAgainWithin = 90 * time.Second

	maxOpening   = 128 << 10 // an opening as it is on the bus
	maxFrame     = MaxChunk + 4096
	maxStreams   = 256 // of one session
	fewStreams   = 16  // have the whole credit each, more have less
	maxOpenings  = 128 // of one session at once
	maxKilled    = 1024
	maxArgs      = 4096
	maxText      = 96 << 10 // argv and environment together
	maxPath      = 4096
	openTime     = 30 * time.Second
	streamHeader = "Berth-Stream"
)
