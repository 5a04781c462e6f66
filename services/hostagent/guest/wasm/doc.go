//go:build linux

// Package wasm is what runs inside a WebAssembly sandbox: the supervisor, which is its first process
// and serves the guest protocol, and the process of one call, which runs one module.
//
// # Guarantees
//
// No module's code runs in the supervisor. Each call is a process of its own, in user, mount, PID,
// network, IPC and UTS namespaces of its own, without a capability, behind a filter of system calls
// that knows no new process, no program, no socket and no mount. It serves one call and ends: nothing
// of one call is seen by another but the files that it left.
//
// wazero's mounted folder follows links out of itself; the wall is the root of the process, which
// holds the session's disk and nothing of the host.
//
// A module's machine code is taken from where no sandbox can write, or from what this sandbox's own
// calls compiled, which they do before the module runs and through a folder that is closed by then.
//
// The exit code of a call is the module's own; package order lists the codes of calls that were ended,
// each with a line on standard error that begins with "berth-wasm:".
package wasm
