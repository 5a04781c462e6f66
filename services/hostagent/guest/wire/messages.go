package wire

import (
	"encoding/json"
	"fmt"
	"time"
)

// The protocol versions that this package speaks.
const (
	MinVersion = 1
	MaxVersion = 1
)

// Hello is the first frame of each side after the sync records.
type Hello struct {
	Min int `json:"min"` // oldest version spoken
	Max int `json:"max"` // newest version spoken
	// Version is the guest's choice, 0 in the host's hello.
	Version int `json:"version,omitempty"`
	// Capabilities names what is optional in this version.
	Capabilities []string `json:"capabilities,omitempty"`
	// Instance is random per guest process: when it differs, all execs are gone.
	Instance string `json:"instance,omitempty"`
	// Software is for logs only.
	Software string `json:"software,omitempty"`
}

// Negotiate returns the newest version that both sides speak.
func Negotiate(a, b Hello) (int, error) {
	version := min(a.Max, b.Max)
	if version < max(a.Min, b.Min) || version < 1 {
		return 0, fmt.Errorf("wire: no common version: %d..%d and %d..%d", a.Min, a.Max, b.Min, b.Max)
	}
	return version, nil
}

// Request opens a call.
type Request struct {
	Method string          `json:"m"`
	Params json.RawMessage `json:"p,omitempty"`
}

// The methods.
const (
	MethodStart   = "exec.start"  // ExecStart -> ExecInfo, then output
	MethodAttach  = "exec.attach" // ExecAttach -> ExecInfo, then output
	MethodDetach  = "exec.detach" // ExecRef -> ExecInfo
	MethodSignal  = "exec.signal" // ExecSignal
	MethodResize  = "exec.resize" // ExecResize
	MethodExecs   = "exec.list"   // ExecList -> ExecPage
	MethodStdin   = "exec.stdin"  // ExecRef -> ACK, then DATA and END from the host
	MethodRead    = "fs.read"     // FileRead -> FileInfo, DATA, END
	MethodWrite   = "fs.write"    // FileWrite, DATA and END from the host -> FileInfo
	MethodStat    = "fs.stat"     // FileStat -> FileInfo
	MethodList    = "fs.list"     // FileList -> FilePage
	MethodMkdir   = "fs.mkdir"    // FileMkdir
	MethodMove    = "fs.move"     // FileMove
	MethodRemove  = "fs.remove"   // FileRemove
	MethodWatch   = "fs.watch"    // FileWatch -> empty, then EVENT
	MethodImport  = "fs.import"   // FileImport, DATA and END from the host -> FileImported
	MethodPing    = "sys.ping"    // -> Pong
	MethodStats   = "sys.stats"   // -> Stats
	MethodQuiesce = "sys.quiesce" // Quiesce -> Quiesced
	MethodResume  = "sys.resume"  // undo the refusal of starts after a quiesce
	MethodSync    = "sys.sync"    // write the file systems out while processes run
	MethodEnter   = "sys.enter"   // Enter -> Entered; guests with capability "enter" only, before all else
	MethodFreeze  = "disk.freeze" // DiskFreeze; machines with capability "disk" only, as the next two
	MethodThaw    = "disk.thaw"   // -> DiskThawed
	MethodGrow    = "disk.grow"   // DiskGrow -> DiskGrown
	MethodUsage   = "disk.usage"  // -> DiskUsage
	MethodExport  = "fs.export"   // -> empty, DATA, END with FileExported; capability "disk"
)

// Size is a terminal size in character cells.
type Size struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Offsets addresses output: the number of bytes of each stream that came before.
type Offsets struct {
	Stdout uint64 `json:"stdout"`
	Stderr uint64 `json:"stderr"`
}

// ExecStart starts a process, or finds the one that this key started.
type ExecStart struct {
	Key     Text   `json:"key"`
	Argv    []Text `json:"argv"`
	Env     []Text `json:"env,omitempty"` // NAME=value, added to the default environment
	Cwd     Text   `json:"cwd,omitempty"`
	User    Text   `json:"user,omitempty"` // name or uid, with optional :group or :gid
	PTY     *Size  `json:"pty,omitempty"`
	Stdin   bool   `json:"stdin,omitempty"`   // otherwise /dev/null; always true for a PTY
	Timeout int64  `json:"timeout,omitempty"` // nanoseconds, 0 for none
	// Detached starts without a reader; From is where the reader begins otherwise.
	Detached bool    `json:"detached,omitempty"`
	From     Offsets `json:"from"`
}

// ExecAttach makes the calling stream the reader of an exec. Everything before
// From counts as acknowledged.
type ExecAttach struct {
	Key  Text    `json:"key"`
	From Offsets `json:"from"`
}

// ExecRef names an exec.
type ExecRef struct {
	Key Text `json:"key"`
}

// ExecSignal sends a signal to the process group of an exec.
type ExecSignal struct {
	Key    Text `json:"key"`
	Signal int  `json:"signal"`
}

// ExecResize sets the terminal size.
type ExecResize struct {
	Key  Text `json:"key"`
	Size Size `json:"size"`
}

// Exit says how a process ended. Exactly one of Code, Signal and Unknown is set.
type Exit struct {
	Code    *int   `json:"code,omitempty"`
	Signal  int    `json:"signal,omitempty"`
	Unknown string `json:"unknown,omitempty"` // why the status is not known
	// TimedOut is true when the timeout of the start killed the process group.
	TimedOut bool `json:"timed_out,omitempty"`
	// Output is the end of each stream when the process ended. What follows was
	// written by processes that it left behind.
	Output  Offsets   `json:"output"`
	EndedAt time.Time `json:"ended_at"` // clock of the guest
}

// ExecInfo is the state of an exec.
type ExecInfo struct {
	Key       Text      `json:"key"`
	Pid       int       `json:"pid"`
	Existing  bool      `json:"existing,omitempty"` // a start that found the key in use
	PTY       bool      `json:"pty,omitempty"`
	Held      bool      `json:"held,omitempty"` // has a reader, or had one that never said goodbye
	StartedAt time.Time `json:"started_at"`
	Exit      *Exit     `json:"exit,omitempty"` // nil while it runs
	First     Offsets   `json:"first"`          // oldest output still kept
	End       Offsets   `json:"end"`            // end of the output so far
	Acked     Offsets   `json:"acked"`          // what the reader acknowledged
	Stdin     uint64    `json:"stdin"`          // bytes of stdin taken so far
	StdinOpen bool      `json:"stdin_open,omitempty"`
}

// ExecList asks for a page of execs in the order of their keys.
type ExecList struct {
	After Text `json:"after,omitempty"`
}

// ExecPage is a page of execs.
type ExecPage struct {
	Execs []ExecInfo `json:"execs"`
	More  bool       `json:"more,omitempty"`
}

// Pong answers a ping.
type Pong struct {
	Time time.Time `json:"time"` // clock of the guest
}

// Stats describes the sandbox from inside.
type Stats struct {
	LiveExecs  int   `json:"live_execs"`
	PTYs       int   `json:"ptys"`       // live execs with a terminal
	Processes  int   `json:"processes"`  // all but the agent, zombies too
	Background int   `json:"background"` // processes that are not the main process of a live exec
	Zombies    int   `json:"zombies"`
	Records    int   `json:"records"`    // execs remembered, live or finished
	RingBytes  int64 `json:"ring_bytes"` // output kept for replay
	MemTotal   int64 `json:"mem_total"`  // bytes, as /proc/meminfo has it
	MemFree    int64 `json:"mem_available"`
	AgentRSS   int64 `json:"agent_rss"`
	// Top holds the processes with the largest resident memory, at most 50.
	Top      []Process `json:"top,omitempty"`
	Quiesced bool      `json:"quiesced,omitempty"`
}

// Process is one process of the sandbox.
type Process struct {
	Pid   int    `json:"pid"`
	PPid  int    `json:"ppid"`
	State string `json:"state"`
	Name  Text   `json:"name"`
	RSS   int64  `json:"rss"` // bytes
}

// Quiesce ends all user processes and syncs the file systems.
type Quiesce struct {
	Grace int64 `json:"grace"` // nanoseconds between SIGTERM and SIGKILL
}

// Quiesced is the result.
type Quiesced struct {
	Killed    bool `json:"killed,omitempty"` // SIGKILL was needed
	Remaining int  `json:"remaining"`        // processes that could not be ended
}

// CapabilityEnter is that of a guest that was started before its sandbox was anybody's: until it has made
// the session's root its own it answers nothing but a ping.
const CapabilityEnter = "enter"

// Enter makes a folder, below which the host has mounted the session's root, the root of the sandbox.
type Enter struct {
	Folder string `json:"folder"`
}

// Entered is the result.
type Entered struct {
	// Already: it was the root before.
	Already bool `json:"already,omitempty"`
}

// CapabilityDisk is that of a machine whose kernel writes the session's disk.
const CapabilityDisk = "disk"

// DiskFreeze writes the session's file system out and keeps it as it is until a thaw.
type DiskFreeze struct {
	// Hold is when it thaws by itself, nanoseconds; bounded by the guest, and its bound if 0.
	Hold int64 `json:"hold,omitempty"`
}

// DiskThawed is the result of a thaw.
type DiskThawed struct {
	// Expired: the freeze had ended by itself before.
	Expired bool `json:"expired,omitempty"`
}

// DiskGrow grows the session's file system to its device, once that has Bytes.
type DiskGrow struct {
	Bytes uint64 `json:"bytes"`
}

// DiskUsage is how full the session's file system is, in bytes.
type DiskUsage struct {
	Size uint64 `json:"size"`
	Used uint64 `json:"used"`
	Free uint64 `json:"free"` // what a user can still write
}

// DiskGrown is the result.
type DiskGrown struct {
	Bytes uint64 `json:"bytes"` // of the file system
}
