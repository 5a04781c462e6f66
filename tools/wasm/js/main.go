// Command js runs JavaScript: it is the tool that every WebAssembly sandbox has, built with
// GOOS=wasip1 GOARCH=wasm, and started by berth-wasm, which tells it what to run. It guarantees that a script's uncaught error ends with exit code 1 and its
// text and place on standard error, that the exit code is otherwise the script's own, and that it
// reads and writes only what its caller mounted.
//
//	js -e 'TEXT' [ARGS]   runs TEXT; the value of its last expression is not printed
//	js -p 'TEXT' [ARGS]   runs TEXT and prints that value
//	js FILE [ARGS]        runs a file
//	js - [ARGS], js       runs standard input
//
// The language is ECMAScript 5.1 with most of ES6 and later (github.com/dop251/goja): no modules, no
// import, no timers, no network. Scripts have console, print, args, env, readFile, readBytes,
// writeFile, appendFile, listDir, exists, stat, mkdir, remove, rename, stdin and exit.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/dop251/goja"
)

func main() {
	vm := goja.New() // before the call is there: the process may wait for it
	args, err := arguments()
	if err != nil || len(args) == 0 {
		fmt.Fprintln(os.Stderr, "js: no call:", err)
		os.Exit(2)
	}
	os.Exit(run(vm, args[1:]))
}

// ended is the script's own exit.
type ended int

func (e ended) Error() string { return fmt.Sprintf("exit %d", int(e)) }

func run(vm *goja.Runtime, args []string) int {
	name, text, rest, show, err := source(args)
	if err != nil {
		fmt.Fprintln(os.Stderr, "js:", err)
		return 2
	}
	out := newOutput()
	defer out.flush()
	vm.SetMaxCallStackSize(2048)
	provide(vm, out, rest)
	v, err := vm.RunScript(name, text)
	var stop *goja.InterruptedError
	if errors.As(err, &stop) {
		if code, ok := stop.Value().(ended); ok {
			return int(code)
		}
	}
	if err != nil {
		out.flush()
		fmt.Fprintln(os.Stderr, describe(err))
		return 1
	}
	if show {
		out.line(format(v))
	}
	return 0
}

// source finds the script's text, its name for messages, and its arguments.
func source(args []string) (name, text string, rest []string, show bool, err error) {
	if len(args) == 0 {
		args = []string{"-"}
	}
	switch first := args[0]; first {
	case "-e", "-p":
		if len(args) < 2 {
			return "", "", nil, false, errors.New(first + " needs the script's text")
		}
		return "<" + first + ">", args[1], args[2:], first == "-p", nil
	case "-":
		b, err := io.ReadAll(os.Stdin)
		return "<stdin>", string(b), args[1:], false, err
	default:
		b, err := os.ReadFile(first)
		return first, string(b), args[1:], false, err
	}
}

func describe(err error) string {
	var e *goja.Exception
	if errors.As(err, &e) {
		return "Uncaught " + e.String()
	}
	return err.Error()
}
