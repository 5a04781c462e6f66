//go:build linux

// Command probe is what runs inside a sandbox in the egress suite: each argument list is one attempt to
// reach something. It prints one JSON object with what it got, and exits 0 also when it was refused.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// Outcome of one attempt. Error is empty if it did what it tried.
type Outcome struct {
	Status int               `json:"status,omitempty"`
	Header map[string]string `json:"header,omitempty"`
	Body   string            `json:"body,omitempty"`
	Error  string            `json:"error,omitempty"`
	Millis int64             `json:"ms"`
}

// args are key=value pairs.
type args map[string]string

func (a args) or(key, otherwise string) string {
	if v, ok := a[key]; ok {
		return v
	}
	return otherwise
}

type attempt func(args) (Outcome, error)

var attempts = map[string]attempt{
	"fetch": fetch, "twice": twice, "h2": streams, "websocket": websocket, "send": send, "redirect": redirect,
	"dial": dial, "udp": udp, "dns": query, "lookup": lookup, "ping": ping, "socket": socket, "unix": unixDial,
	"relay": relay, "stream": stream, "read": read, "spoof": spoof,
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "addresses" {
		addresses()
		return
	}
	if len(os.Args) < 2 || attempts[os.Args[1]] == nil {
		fmt.Println("usage: probe ATTEMPT [KEY=VALUE ...]")
		os.Exit(2)
	}
	a := args{}
	for _, kv := range os.Args[2:] {
		k, v, _ := strings.Cut(kv, "=")
		a[k] = v
	}
	began := time.Now()
	o, err := attempts[os.Args[1]](a)
	if err != nil {
		o.Error = err.Error()
	}
	o.Millis = time.Since(began).Milliseconds()
	raw, _ := json.Marshal(o)
	fmt.Println(string(raw))
}
