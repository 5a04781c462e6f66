//go:build wasip1

// Command wasmprobe is the attacker of the WebAssembly tier, a WASI module: each argument list is one
// attempt to reach what the sandbox must not reach. It guarantees one JSON object on standard output
// that says whether the attempt came through and what it saw, unless the attempt ends the module.
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

type attempt func(args []string) (string, error)

func main() {
	if len(os.Args) < 2 || attempts[os.Args[1]] == nil {
		fmt.Println("usage: wasmprobe ATTEMPT [ARG ...]")
		os.Exit(2)
	}
	detail, err := attempts[os.Args[1]](os.Args[2:])
	through := err == nil
	if err != nil {
		detail = err.Error()
	}
	raw, _ := json.Marshal(map[string]any{"through": through, "detail": detail})
	fmt.Println(string(raw))
}
