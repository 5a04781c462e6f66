package main

import (
	"encoding/json"
	"os"
	"unsafe"
)

// order asks the host what to run: it answers with the length of a JSON text and writes the text if
// room suffices. The answer may take as long as the process waits for its call.
//
//go:wasmimport berth order
//go:noescape
func order(at unsafe.Pointer, room uint32) uint32

// arguments waits for the call and makes its environment and folder this process's.
func arguments() ([]string, error) {
	b := make([]byte, 64<<10)
	n := order(unsafe.Pointer(&b[0]), uint32(len(b)))
	if int(n) > len(b) {
		b = make([]byte, n)
		n = order(unsafe.Pointer(&b[0]), uint32(len(b)))
	}
	var call struct {
		Args, Env []string
		Dir       string
	}
	if err := json.Unmarshal(b[:n], &call); err != nil {
		return nil, err
	}
	environment = call.Env
	if call.Dir != "" {
		_ = os.Chdir(call.Dir) // a folder that is gone is told by the first relative path
	}
	return call.Args, nil
}
