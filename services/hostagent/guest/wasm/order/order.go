// Package order is what the host's driver tells the supervisor of a WebAssembly sandbox: one message
// over a socket, with the files that the sandbox is made of. It guarantees nothing but its form;
// whoever sends it is trusted, and nobody else has the other end.
package order

import "time"

// Names of the program's parts, as its argv[0], and of the places inside a sandbox.
const (
	Supervisor = "berth-wasm-supervisor"
	Runner     = "berth-wasm-call"
	Compiler   = "berth-wasm-compile"

	Modules = "/usr/lib/wasm"   // where modules are found by name
	JS      = "js"              // the name of the JavaScript tool
	Binary  = "/dev/berth-wasm" // the program itself, for the processes of calls
)

// Socket is the descriptor of the socket to who started a part; 0 and 1 are the channel, 2 a log.
const Socket = 3

// Descriptors through which the host's driver executes the program. Found by its path, it would be a
// file of the new process's own copy of the host's mounts: that copy, with every disk in it, would
// live as long as the program runs, seen by nobody, for in a user namespace a mount stays with what
// it is mounted on when that is dropped. The program closes its descriptor at once.
const (
	SupervisorProgram = 4
	CompilerProgram   = 6
)

// Waits is the argument of a supervisor that is started before anybody needs it. It keeps nothing of the
// host's files, says Waiting, and takes its order when that comes.
const Waits = "waits"

// Waiting is what it says then.
const Waiting = "waiting"

// MaxMessage of the socket, in bytes.
const MaxMessage = 256 << 10

// Sandbox is the message to the supervisor. The files that come with it are, in this order: a copy of
// the mount of the image, of the session's disk, of the run folder, of /dev/null and of the program
// itself; the status file; then, if JS is true, the JavaScript module; then one folder for each of
// Compiled. The first five are mounts that are attached nowhere.
type Sandbox struct {
	Hostname string
	// Init is the only program of the sandbox, a module with its arguments; empty: the guest agent.
	Init []string
	Env  []string
	JS   bool
	// Compiled are modules that the host has compiled.
	Compiled []Compiled
	Limits   Limits
}

// Files are how many files come before the JavaScript module.
const Files = 6

// Compiled is a module whose machine code lies in a folder of the host that no sandbox writes.
type Compiled struct {
	Hash string // SHA-256 of the module, hexadecimal
	Size int64
}

// Limits of every call.
type Limits struct {
	MemoryBytes uint64        // of the whole sandbox
	Time        time.Duration // of one call
	OutputBytes uint64        // that one call may write to its standard output and error
	OpenFiles   uint64
	// Ahead: after a call of the JavaScript tool the next one's process is started ahead of it.
	Ahead bool
}

// Ready is the answer of the supervisor once the sandbox stands; any other answer is an error's text.
const Ready = "ready"

// Exit codes of a call that did not end by itself. What a module itself exits with is passed on.
const (
	ExitNotModule = 120 // the file is no module, is cut short, or needs what is not here
	ExitTrap      = 121 // the module did what WebAssembly forbids
	ExitMemory    = 122 // it needs more memory than its limit
	ExitOutput    = 123 // it wrote more than its limit
	ExitTime      = 124 // it ran longer than its limit
	ExitJail      = 125 // the call could not be walled off, and nothing of it ran
	ExitTooBig    = 126 // the module, or its exit code, is larger than what can be taken
)
