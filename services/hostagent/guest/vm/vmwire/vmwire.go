// Package vmwire is what the host and the first process of a virtual machine say to each other over
// the control port (virtio-serial, named Control): lines of JSON, each one Message of at most MaxLine
// bytes. A machine starts without knowing whose it is; it says Ready and waits for the one Personalise
// that makes it somebody's. Nothing of a user runs before that.
//
// # Order
//
// Guest: ready, once, unasked. Host: hello, any number of times; each is answered by a ready that
// bears its nonce, so whoever opens the port drops what was said before. Host: personalise. Guest:
// answer, with the id of the request. A personalise with the id of one that was obeyed is answered
// again and changes nothing; any other is refused. If the answer is not OK the machine is of no use
// any more and powers off. Afterwards the host may send call (answered by done with its id), and the
// guest sends event; before, the only call is OpRehearse, during which a personalise waits. A line that
// is no message, and a type that is not known, is ignored.
//
// # Guarantees
//
// Decode never panics, takes no line above MaxLine, and hands out a message only if exactly the part
// that its type names is there and within its bounds; each side bounds what the other says. Unknown
// fields are ignored. Reader holds one line at most and goes on after one that is too long or wrong.
package vmwire

import (
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// The names of the virtio-serial ports.
const (
	Control = "berth.control"
	Channel = "berth.channel" // the guest protocol (package wire) after personalise
	// Events may be missing. Every event is written to it as well; its host side keeps what nobody
	// reads (a ring buffer), so that the end of a machine is known to who was not there.
	Events = "berth.events"
)

// The versions of this protocol that this package speaks.
const (
	MinVersion = 1
	MaxVersion = 1
)

// Bounds.
const (
	MaxLine   = 1 << 20 // bytes of one line with its end
	MinSeed   = 64      // bytes of entropy in a Personalise
	MaxSeed   = 1024
	MaxFiles  = 64
	MaxEnv    = 4096
	MaxArgv   = 256
	MaxText   = 4096 // bytes of a text that only people read
	MaxSteps  = 64
	MaxIDSize = 128
	MaxOver   = 64
)

// Type of a message.
type Type string

// The types, with who sends them.
const (
	TypeHello       Type = "hello"       // host
	TypeReady       Type = "ready"       // guest
	TypePersonalise Type = "personalise" // host
	TypeAnswer      Type = "answer"      // guest
	TypeCall        Type = "call"        // host
	TypeDone        Type = "done"        // guest
	TypeEvent       Type = "event"       // guest
)

// Message is one line. Exactly the part that Type names is set.
type Message struct {
	Type        Type         `json:"type"`
	Hello       *Hello       `json:"hello,omitempty"`
	Ready       *Ready       `json:"ready,omitempty"`
	Personalise *Personalise `json:"personalise,omitempty"`
	Answer      *Answer      `json:"answer,omitempty"`
	Call        *Call        `json:"call,omitempty"`
	Done        *Done        `json:"done,omitempty"`
	Event       *Event       `json:"event,omitempty"`
}

// Hello asks for a Ready that bears Nonce.
type Hello struct {
	Min   int    `json:"min"`
	Max   int    `json:"max"`
	Nonce string `json:"nonce"`
}

// Ready says that the machine waits to be personalised, or was (Personalised).
type Ready struct {
	Min          int    `json:"min"`
	Max          int    `json:"max"`
	Nonce        string `json:"nonce,omitempty"` // of the hello that asked; empty in the first
	Personalised bool   `json:"personalised,omitempty"`
	Kernel       string `json:"kernel,omitempty"`   // for logs
	Software     string `json:"software,omitempty"` // for logs
	// Uptime of the machine, nanoseconds, and Steps of its start.
	Uptime int64  `json:"uptime,omitempty"`
	Steps  []Step `json:"steps,omitempty"`
}

// Step is one part of the work and what it took, nanoseconds by the guest's clock.
type Step struct {
	Name string `json:"name"`
	Took int64  `json:"took"`
}

// Personalise makes the machine somebody's.
type Personalise struct {
	Version int    `json:"version"` // of this protocol, chosen by Negotiate
	ID      string `json:"id"`      // names this request
	// Hostname; "berth" if empty.
	Hostname string `json:"hostname,omitempty"`
	// Env is what the first process gets, NAME=value.
	Env []wire.Text `json:"env,omitempty"`
	// Files appear read-only in /run/berth by name; "guest" is there without being sent.
	Files map[string]File `json:"files,omitempty"`
	// Time is the host's clock, unix nanoseconds, when this was sent.
	Time int64 `json:"time"`
	// Seed is at least MinSeed bytes from the host's random source, for this machine alone.
	Seed   []byte `json:"seed"`
	Limits Limits `json:"limits"`
	// Init is the first process, with the channel as stdin and stdout; empty means the guest agent.
	Init []wire.Text `json:"init,omitempty"`
	// Root is the device of the image (read-only EROFS); "vda" if empty.
	Root string `json:"root,omitempty"`
	// Disk of the session; without it the writable layer is memory that goes with the machine.
	Disk *Disk `json:"disk,omitempty"`
	// Network address; without it there is only the loopback.
	Network *Network `json:"network,omitempty"`
	// Over are files of /run/berth that lie over those of the root (package cover).
	Over []Over `json:"over,omitempty"`
}

// Over is one of Files, by name, and the absolute path of what it lies over.
type Over struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// File is a small file of /run/berth.
type File struct {
	Data []byte `json:"data"`
	Mode uint32 `json:"mode,omitempty"` // permission bits; 0444 if 0
}

// Limits that the guest's kernel enforces inside. 0: the guest's own.
type Limits struct {
	PIDs      uint32 `json:"pids,omitempty"`
	OpenFiles uint64 `json:"open_files,omitempty"` // of one process
	// Memory is what the session may use, bytes; it sizes /tmp as in other tiers. What the kernel of
	// the machine needs is not in it: never more than the machine has is given away.
	Memory uint64 `json:"memory,omitempty"`
}

// Disk is the session's block device with its ext4 file system.
type Disk struct {
	// Device is the name in /dev; "vdb" if empty.
	Device string `json:"device,omitempty"`
	// Bytes that the device must have before it is mounted; 0: not looked at. A device that the host
	// resized under a clone is waited for.
	Bytes uint64 `json:"bytes,omitempty"`
	// Create makes the folders upper and work if they are missing (a new disk).
	Create bool `json:"create,omitempty"`
	// Grow grows the file system to its device after mounting.
	Grow bool `json:"grow,omitempty"`
}

// Network is what the machine's one device has: these addresses and no other.
type Network struct {
	Device  string   `json:"device,omitempty"`  // "eth0" if empty
	Address string   `json:"address"`           // with prefix length: 10.1.2.3/30
	Gateway string   `json:"gateway,omitempty"` // of the default route; it need not be in the address's network
	DNS     []string `json:"dns,omitempty"`
	MAC     string   `json:"mac,omitempty"` // set on the device if not empty
	MTU     int      `json:"mtu,omitempty"`
	// Address6 and Gateway6 are the same of IPv6.
	Address6 string `json:"address6,omitempty"`
	Gateway6 string `json:"gateway6,omitempty"`
	// GatewayMAC is the hardware address of both gateways, for good; without it they are asked for.
	GatewayMAC string `json:"gateway_mac,omitempty"`
}

// The limits that an Answer can name as enforced.
const (
	EnforcedPIDs      = "pids"
	EnforcedOpenFiles = "open_files"
	EnforcedMemory    = "memory" // by the guest's kernel, below what the machine has
)

// Reason classifies why a machine could not be personalised, or a call failed. Append-only; treat
// what is not known as ReasonInternal.
type Reason string

// The reasons.
const (
	ReasonInvalid  Reason = "invalid"  // the request makes no sense, or comes at the wrong time
	ReasonVersion  Reason = "version"  // no version in common
	ReasonRoot     Reason = "root"     // the image cannot be mounted
	ReasonDisk     Reason = "disk"     // the session's file system is damaged or is none
	ReasonFull     Reason = "full"     // no space
	ReasonInit     Reason = "init"     // the first process does not start
	ReasonNetwork  Reason = "network"  // the address cannot be set
	ReasonDeadline Reason = "deadline" // a step took too long
	ReasonInternal Reason = "internal"
)

// Answer says what became of a Personalise.
type Answer struct {
	ID      string `json:"id"`
	OK      bool   `json:"ok"`
	Reason  Reason `json:"reason,omitempty"`
	Error   string `json:"error,omitempty"` // for people
	Version int    `json:"version"`
	Steps   []Step `json:"steps,omitempty"`
	// Enforced names the limits that the guest's kernel holds.
	Enforced []string `json:"enforced,omitempty"`
	// Repaired: the file system replayed its journal, so it was not unmounted last time.
	Repaired bool `json:"repaired,omitempty"`
}

// Op is what a Call asks for.
type Op string

// The operations.
const (
	OpFreeze Op = "disk.freeze" // writes out and stops the session's file system
	OpThaw   Op = "disk.thaw"   // idempotent
	OpGrow   Op = "disk.grow"   // grows the file system to its device, which must have Bytes
	OpFiles  Op = "run.files"   // replaces or adds Files in /run/berth, each at once
	OpOff    Op = "off"         // ends every process, unmounts, powers off; done comes before
	// OpRehearse is the only one for a machine that is nobody's: it goes through all that makes it
	// somebody's and takes that back, so that the real one is quick. Error of a Done that is OK says
	// what did not work. One that is not OK: the machine is of no use any more.
	OpRehearse Op = "rehearse"
)

// Call asks a personalised machine for something.
type Call struct {
	ID string `json:"id"`
	Op Op     `json:"op"`
	// Bytes: see OpGrow.
	Bytes uint64 `json:"bytes,omitempty"`
	// Hold is how long a freeze lasts when nobody thaws, nanoseconds; at most, and if 0, MaxFreeze.
	Hold  int64           `json:"hold,omitempty"`
	Files map[string]File `json:"files,omitempty"`
}

// MaxFreeze is when a frozen file system thaws by itself: the host may have died. Nanoseconds.
const MaxFreeze = int64(10e9)

// Done answers a Call.
type Done struct {
	ID     string `json:"id"`
	OK     bool   `json:"ok"`
	Reason Reason `json:"reason,omitempty"`
	Error  string `json:"error,omitempty"`
	// Bytes is the size of the file system after OpGrow.
	Bytes uint64 `json:"bytes,omitempty"`
	// Expired, for OpThaw: the freeze had ended by itself, so what was copied meanwhile is no snapshot.
	Expired bool `json:"expired,omitempty"`
}

// EventKind says what an Event tells.
type EventKind string

// The kinds of events.
const (
	EventOOM    EventKind = "oom"    // the guest's kernel killed a process for memory
	EventPIDs   EventKind = "pids"   // a fork was refused for the number of processes
	EventExited EventKind = "exited" // the first process ended; the machine powers off
	EventDisk   EventKind = "disk"   // the session's file system met errors (Count)
)

// Event is news of a personalised machine.
type Event struct {
	Kind  EventKind `json:"kind"`
	Count uint64    `json:"count,omitempty"` // so far
	// Code of EventExited: the exit code, or 128 + signal.
	Code int    `json:"code,omitempty"`
	Text string `json:"text,omitempty"`
}
