//go:build linux

// Package early takes the signals of a call's process before anything else of the program is made
// ready. It guarantees that a signal which comes while the process starts is not taken for an end with
// the code that Go's runtime gives it.
//
// It works from init, and in the process of a call alone.
package early

import (
	"os"
	"os/signal"
	"syscall"
)

// Signals that ask the process to end, from its first moment on.
var Signals = make(chan os.Signal, 16)

func init() {
	if len(os.Args) == 2 && os.Args[0] == "berth-wasm-call" { // order.Runner
		signal.Notify(Signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT,
			syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGPIPE)
	}
}
