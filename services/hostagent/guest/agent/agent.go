// Package agent is the guest agent: PID 1 of every sandbox but wasm ones. It
// runs processes, keeps their output, serves files and reaps zombies, all over
// one channel of framed messages (package wire).
//
// # Guarantees
//
// An exec is named by a key that the host chose. Starting a key again returns
// the exec that it started, never a second process, as long as its record is
// kept: 10 minutes after its exit, and at most 8192 records.
//
// Output is addressed by offset per stream and kept in a replay ring of 4 MiB
// per exec. An exec is held from the moment a reader is given (by a start that
// is not detached, or by an attach) until the host detaches it by name. While
// it is held nothing is dropped that was not acknowledged: with a full ring its
// process blocks on write. The death of a host is no detach, since the guest
// cannot tell it from a slow host; a new host lists the execs and attaches or
// detaches each. Without a reader the oldest output goes and the next reader is
// told the exact range that is gone. The order is: output, exit, output of
// processes left behind, end. An exit follows all bytes that the process wrote.
//
// Stdin is addressed by offset too: bytes that were taken before are skipped, so
// a resend after a lost host doubles nothing.
//
// An exit status is the one that the kernel gave for this process, or unknown
// with a reason. A file write is acknowledged after fsync of file and directory.
//
// The agent never ends because of what it reads: after a bad frame it discards
// everything up to the next sync record and tells the host so.
package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Version is reported in the hello; it is for logs only.
const Version = "berth-guest/1"

// Bounds of the agent.
const (
	RingSize       = 4 << 20          // output kept per exec, bytes
	RingBudget     = 64 << 20         // output kept over all execs that nobody waits for, bytes
	RingCeiling    = 256 << 20        // output kept over all execs, above which starts are refused
	RecordLifetime = 10 * time.Minute // of an exec after its exit
	MaxRecords     = 8192
	MaxLiveExecs   = 1024
	MaxCalls       = 4096
	maxFileCalls   = 64
	maxWatches     = 32
)

// Options configure an agent. The zero value is a PID 1 without a log.
type Options struct {
	// Init makes the agent reap every child of the process, and Quiesce signal
	// every process of the namespace. It is only honoured when the process is
	// PID 1.
	Init bool
	// DefaultUser is used when a request names none; "root" if empty.
	DefaultUser string
	// Passwd and Group are the user databases; /etc/passwd and /etc/group if empty.
	Passwd, Group string
	// RecordLifetime and RingSize replace the constants when positive, for tests.
	RecordLifetime time.Duration
	RingSize       int
	Log            *slog.Logger
	// Program, if set, starts what execs name in the place of native programs; see Call.
	Program Program
	// MaxTime ends an exec that asked for no shorter time; 0: none.
	MaxTime time.Duration
	// Cgroup, if set, is the folder of the cgroup that every exec starts in.
	Cgroup *os.File
	// Enter: the sandbox is nobody's yet. The agent waits to be told the folder of its owner's root, and
	// does nothing else before it is there; see package enter.
	Enter bool
	// Disk is set in a virtual machine.
	Disk Disk
	// Upper is the session's own layer below the root, where Disk is set.
	Upper *os.File
}

// Agent is one guest agent. It outlives any number of attaches.
type Agent struct {
	opts     Options
	log      *slog.Logger
	instance string
	reaper   *reaper
	files    chan struct{} // bounds file calls
	watches  atomic.Int32
	ringUsed atomic.Int64
	calls    atomic.Int32
	accounts accounts
	entered  atomic.Bool

	mu       sync.Mutex
	execs    map[string]*execution
	live     int
	quiesced bool
}

// New returns an agent. Call Serve to let it work.
func New(opts Options) *Agent {
	if opts.DefaultUser == "" {
		opts.DefaultUser = "root"
	}
	if opts.Passwd == "" {
		opts.Passwd = "/etc/passwd"
	}
	if opts.Group == "" {
		opts.Group = "/etc/group"
	}
	if opts.RecordLifetime <= 0 {
		opts.RecordLifetime = RecordLifetime
	}
	if opts.RingSize <= 0 {
		opts.RingSize = RingSize
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	opts.Init = opts.Init && os.Getpid() == 1
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails, see crypto/rand
	a := &Agent{
		opts: opts, log: opts.Log, instance: hex.EncodeToString(id[:]),
		files: make(chan struct{}, maxFileCalls), execs: map[string]*execution{},
	}
	a.reaper = newReaper(opts.Init)
	return a
}

// Run reaps children until ctx is done. It must run for an Init agent and does
// nothing for another.
func (a *Agent) Run(ctx context.Context) { a.reaper.run(ctx) }

// lookup finds an exec whose process was started.
func (a *Agent) lookup(key string) *execution {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.execs[key]
}
