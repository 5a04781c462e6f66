//go:build linux

// Command probe is what runs inside a sandbox in the hostile suite: each argument list is one attempt
// to reach what the sandbox must not reach. It prints one JSON object that says whether the attempt
// came through, and what it saw; it exits 0 also when it was refused.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Outcome of one attempt. Through is true if the attempt did what it tried.
type Outcome struct {
	Through bool   `json:"through"`
	Detail  string `json:"detail"`
}

// attempt tries something. It returns what it got, or the error that stopped it.
type attempt func(args []string) (string, error)

func main() {
	signal.Ignore(syscall.SIGPIPE)
	if len(os.Args) < 2 {
		fmt.Println("usage: probe ATTEMPT [ARG ...]")
		os.Exit(2)
	}
	f := find(os.Args[1])
	if f == nil {
		fmt.Printf("no attempt %q\n", os.Args[1])
		os.Exit(2)
	}
	var o Outcome
	detail, err := f(os.Args[2:])
	o.Through, o.Detail = err == nil, detail
	if err != nil {
		o.Detail = err.Error()
	}
	raw, _ := json.Marshal(o)
	fmt.Println(string(raw))
}

func find(name string) attempt {
	for _, set := range []map[string]attempt{looks, calls, nets, files, greed} {
		if f := set[name]; f != nil {
			return f
		}
	}
	return nil
}
