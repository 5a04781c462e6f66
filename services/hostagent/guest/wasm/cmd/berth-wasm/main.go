//go:build linux

// Command berth-wasm runs the parts of a WebAssembly sandbox, each under a name of its own in argv[0].
// It guarantees what package wasm says and does nothing when it is started by hand.
package main

import (
	"fmt"
	"os"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

func main() {
	switch {
	case os.Args[0] == order.Supervisor:
		os.Exit(wasm.Supervise(len(os.Args) == 2 && os.Args[1] == order.Waits))
	case os.Args[0] == order.Runner && len(os.Args) == 2:
		os.Exit(wasm.RunCall(os.Args[1]))
	case os.Args[0] == order.Compiler:
		os.Exit(wasm.Compile())
	}
	fmt.Fprintln(os.Stderr, "berth-wasm is started by hostagent, as a part of a sandbox")
	os.Exit(2)
}
