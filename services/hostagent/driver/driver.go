// Package driver is the contract between hostagent and what makes sandboxes on one host.
//
// A driver guarantees that Create gives either a running sandbox, walled off as its Capabilities
// say, or nothing at all; that everything it ever made is found again by List, also half-made and
// by a later process; and that Stop takes all of it away. It never touches a session's disk beyond
// mounting it, and never takes a mounted disk away: that is the caller's.
//
// The suite in drivertest holds every driver to this.
package driver

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Tier is the isolation wall, as named in configuration and on the bus.
type Tier string

// The tiers that drivers here know.
const (
	Container Tier = "container"
	GVisor    Tier = "gvisor"
	Kata      Tier = "kata"
	MicroVM   Tier = "microvm"
	WASM      Tier = "wasm"
	Null      Tier = "null"
)

// VM reports whether sandboxes of the tier have a kernel of their own, which writes the session's
// disk itself: the host never mounts such an image again.
func (t Tier) VM() bool { return t == Kata || t == MicroVM }

// Driver makes and removes sandboxes. It is safe for concurrent use; calls that concern one
// sandbox wait for each other. Errors are of internal/errs.
type Driver interface {
	// Capabilities tells of every tier that the driver knows what it does on this host, or why it
	// cannot run here.
	Capabilities() map[Tier]Capabilities
	// Create starts the sandbox of spec and returns when its first process runs; what that says is
	// for the caller to read from the channel. It is idempotent: the same session, generation and
	// epoch again return the sandbox that runs. Kinds: Invalid (the spec), Busy (another epoch of
	// the session has compute here, or the disk is in use), NoCapacity, Unavailable (the runtime
	// does not answer; try again), Unimplemented (the tier or a limit that cannot be honoured),
	// Deadline, Internal. After an error nothing of it is left, or List shows what is.
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	// Stop kills the sandbox and removes all that was made for it. A sandbox that does not exist,
	// or is half gone, is fine. Kinds: Busy (a mount is still in use), Unavailable, Internal; call
	// it again until it is nil.
	Stop(ctx context.Context, id ids.SandboxID) error
	// List returns everything that this driver made on this host, in whatever state it is. An
	// error means that nothing is known: never take it for an empty list.
	List(ctx context.Context) ([]Found, error)
	// Close lets go of the driver's own resources; running sandboxes go on for the next driver.
	Close() error
}

// Watcher tells of the end of sandboxes. Events that happened while nobody watched are told once
// the watch begins, as far as the state still shows them. The channel closes with ctx; a watcher
// that falls behind blocks nobody but itself.
type Watcher interface {
	Watch(ctx context.Context) (<-chan Event, error)
}

// Meter reads what a sandbox uses. NotFound if it does not run.
type Meter interface {
	Stats(ctx context.Context, id ids.SandboxID) (Stats, error)
}

// Freezer stops every process of a sandbox from running, and lets them run again. Idempotent;
// NotFound if it does not run.
type Freezer interface {
	Freeze(ctx context.Context, id ids.SandboxID) error
	Thaw(ctx context.Context, id ids.SandboxID) error
}

// Checker says in one clear sentence why this host cannot run the driver's sandboxes, before
// anything is made.
type Checker interface {
	Preflight(ctx context.Context) error
}

// Snapshotter makes what sandboxes of an image are cloned from: a machine that was booted once, with
// its memory. Create makes it when it is missing; who calls Snapshot first keeps users from waiting.
// Idempotent. Kinds as Create.
type Snapshotter interface {
	Snapshot(ctx context.Context, t Tier, img Image, l Limits) error
}

// Resizer changes the limits of a running sandbox. Unimplemented, with the reason, for a change that
// it cannot make; then nothing was changed.
type Resizer interface {
	Resize(ctx context.Context, id ids.SandboxID, l Limits) error
}

// DiskResizer tells a running sandbox that its disk image has grown to bytes. For tiers whose kernel
// is their own; the file system inside is grown by the guest.
type DiskResizer interface {
	ResizeDisk(ctx context.Context, id ids.SandboxID, bytes uint64) error
}

// Networker names the network namespace on the host that is the sandbox's own: /proc/PID/ns/net or a file
// that it is bound to. What a sandbox with a Link sends leaves through the link alone, which for a tap is
// not in there. NotFound if it does not run.
type Networker interface {
	Netns(ctx context.Context, id ids.SandboxID) (string, error)
}

// Capabilities are what a driver really does in one tier on this host. The suite skips by them alone.
type Capabilities struct {
	// Absent says why this host cannot run the tier; empty if it can.
	Absent string
	// Accel is what runs a kernel of its own: kvm, or tcg (emulated); empty in other tiers.
	Accel string
	// Native: programs of the machine's own kind run, with processes, users and /proc. Otherwise only
	// WebAssembly modules do.
	Native bool
	// Isolated: own PID, IPC, UTS, network and mount namespaces (or a kernel of its own).
	Isolated bool
	// OwnKernel: a virtual machine; system calls end in a kernel that is not the host's.
	OwnKernel bool
	// UserNamespace: root inside is nobody outside.
	UserNamespace bool
	// Disk: the root is the image with the session's disk on top.
	Disk bool
	// RawDisk: the driver wants the disk's image file (Spec.DiskImage), not where it is mounted.
	RawDisk bool
	// Memory, PIDs, CPU, DiskIO, OpenFiles: the limit is enforced.
	Memory, PIDs, CPU, DiskIO, OpenFiles bool
	// OOMKillsAll: running out of memory ends the whole sandbox, not one process.
	OOMKillsAll bool
	// Adopts: a new driver on the same state finds and serves what runs.
	Adopts bool
	// Holds: the guest's input stays open when its only writer dies.
	Holds bool
	// Clones: sandboxes start from a memory snapshot.
	Clones bool
	// Warm: sandboxes can be prepared before anybody needs them (Preparer).
	Warm bool
	// Network: a sandbox can be given a link (Spec.Link); Tap: it has to be a tap, not a veth.
	Network, Tap bool
	// Missing says for people what was tried and is not there.
	Missing []string
}

// Limits of one sandbox; CPU, memory and processes are required.
type Limits struct {
	CPUMillis   uint32 // thousandths of a core
	MemoryBytes uint64
	PIDs        uint32
	// DiskBytesPerSecond and DiskOpsPerSecond of reads and writes together; 0: no limit. Where
	// Capabilities.DiskIO is false they are not enforced.
	DiskBytesPerSecond uint64
	DiskOpsPerSecond   uint64
	// OpenFiles of one process (RLIMIT_NOFILE); 0: the driver's own.
	OpenFiles uint64
}

// Image is an unpacked image. Lower is a folder that no sandbox can write; Block is the same as a
// read-only file system in a file (EROFS), for tiers with a kernel of their own, empty until made.
type Image struct {
	Digest string
	Lower  string
	Block  string
	Env    []string
}

// Spec asks for one sandbox.
type Spec struct {
	Session    ids.SessionKey
	Generation ids.Generation
	Epoch      ids.Epoch
	Tier       Tier
	Image      Image
	// Disk is where the session's disk is mounted on the host; it holds the folders upper and work.
	Disk string
	// DiskImage is the session's disk as an ext4 image file, for a driver with RawDisk; Disk is empty
	// then. The driver opens it itself; nothing on the host mounts it.
	DiskImage string
	// RunDir on the host appears read-only as /run/berth; files that are renamed into it later
	// appear as well.
	RunDir string
	// Guest is the host's path of the guest agent, which appears as /run/berth/guest (RunDir gets a
	// file of that name); empty if the image brings its own Init.
	Guest string
	// Init is the first process; empty means the guest agent.
	Init     []string
	Env      []string
	Hostname string
	Limits   Limits
	// Link is the sandbox's network: beside lo it has one interface, eth0, with the link's addresses and
	// its way out. nil: there is only lo, and no way out of it. The link is the caller's, who makes it
	// before and removes it after; one whose sandbox failed or was stopped may be gone and is not used again.
	Link *network.Link
	// Over are files that lie over those of the sandbox's root.
	Over []Over
}

// Over is a file of the run folder that is bound over one of the sandbox's root when it gets that root, read-only
// for good. What is at To is left as it is below it: a file, or a symbolic link, whose target is not touched
// where the link itself can be covered and is covered where not; no link leads anywhere but into the
// sandbox's own root file system. Where nothing is at To, or a folder, or it lies in another file system
// of the sandbox (/proc, /run), it is passed over; only /etc/resolv.conf, which every libc wants, is made,
// empty, if it is missing. Nothing else of it is ever written to the session's disk. The file is
// looked at once: what is renamed into the run folder later under the same name does not appear at To.
type Over struct {
	From string // name in the run folder, of a regular file
	To   string // absolute path in the sandbox
}

// Channel is the byte stream to the first process: two named pipes, or a stream socket. The caller
// opens them; the driver keeps the guest's ends alive while nobody has them open. A socket takes one
// connection at a time, again and again.
type Channel struct {
	Stdin  string
	Stdout string
	Socket string // path of a unix socket; Stdin and Stdout are empty then
}

// Sandbox is running compute.
type Sandbox struct {
	ID         ids.SandboxID
	Session    ids.SessionKey
	Generation ids.Generation
	Epoch      ids.Epoch
	Tier       Tier
	Channel    Channel
	// PID of the first process as the host sees it; 0 if it has none.
	PID int
	// Cgroup is the path of the sandbox's cgroup below each hierarchy's root; empty if none.
	Cgroup string
	// Enter is set where the first process itself has to make the session's root its own after a Claim
	// (the guest's message Enter), before anything else is asked of it: the folder in the sandbox where
	// that root is.
	Enter string
	// Steps of the Create that made it; empty when it was adopted.
	Steps []steps.Time
}

// State of something that List found.
type State string

const (
	// Running: the first process lives.
	Running State = "running"
	// Exited: it ran and ended by itself; Stop removes the rest.
	Exited State = "exited"
	// Waiting: this driver prepared it and nobody has claimed it.
	Waiting State = "waiting"
	// Partial: half-made or half-removed; Stop removes it.
	Partial State = "partial"
)

// Found is one sandbox, or what is left of one. Session, Generation and Epoch are zero if no
// record tells them any more.
type Found struct {
	Sandbox
	State State
	// Parts names what exists of it, for people.
	Parts []string
}

// EventKind says what happened to a sandbox.
type EventKind string

const (
	// EventExited: the first process ended; ExitStatus says how.
	EventExited EventKind = "exited"
	// EventOOM: a process was killed for memory.
	EventOOM EventKind = "oom"
	// EventPIDs: a process could not be made, since the limit of processes was reached.
	EventPIDs EventKind = "pids"
)

// Event is the news of one sandbox.
type Event struct {
	ID         ids.SandboxID
	Kind       EventKind
	ExitStatus uint32 // the process's own; 255 also where that is not known, never made up
	At         time.Time
}

// Stats is what a sandbox uses now, and used since it began.
type Stats struct {
	CPU         time.Duration
	MemoryBytes uint64
	Processes   uint32
	OOMKills    uint64
	// PIDsHits is how often no process could be made for the limit.
	PIDsHits uint64
}

// ID names the sandbox that Create makes for one epoch. It follows from the three, so that whoever
// repeats a Create or a Stop means the same sandbox. One that was claimed has the name of the warm one.
func ID(s ids.SessionKey, g ids.Generation, e ids.Epoch) ids.SandboxID {
	sum := sha256.Sum256([]byte(s.String() + "." + g.String() + "." + e.String()))
	enc := base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)
	return ids.SandboxID("b" + enc.EncodeToString(sum[:16]))
}

// ID names the sandbox that the spec asks for.
func (s Spec) ID() ids.SandboxID { return ID(s.Session, s.Generation, s.Epoch) }
