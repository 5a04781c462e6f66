//go:build wasip1

// Command tool is what the tests of the wasm driver run in a sandbox.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

//go:wasmimport wasi_snapshot_preview1 fd_fdstat_get
//go:noescape
func fdstat(fd int32, at *[24]byte) uint32

var sink [][]byte

func main() {
	args := append(os.Args[1:], "", "")
	switch args[0] {
	case "exit":
		n, _ := strconv.Atoi(args[1])
		os.Exit(n)
	case "loop":
		for i := 0; ; i++ {
		}
	case "flood":
		b := bytes.Repeat([]byte("x"), 1<<16)
		for {
			if _, err := os.Stdout.Write(b); err != nil {
				os.Exit(9)
			}
		}
	case "grow":
		for {
			b := make([]byte, 8<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			sink = append(sink, b)
		}
	case "cat":
		b, err := os.ReadFile(args[1])
		report(err)
		_, _ = os.Stdout.Write(b)
	case "write":
		report(os.WriteFile(args[1], []byte(args[2]), 0o644))
	case "append": // a file until it is full
		f, err := os.Create(args[1])
		report(err)
		for {
			_, err := f.Write(make([]byte, 1<<20))
			report(err)
		}
	case "link":
		report(os.Symlink(args[2], args[1]))
	case "stdin":
		b, err := io.ReadAll(os.Stdin)
		report(err)
		fmt.Printf("%d:%s", len(b), b)
	case "fds":
		for fd := int32(0); fd < 128; fd++ {
			var st [24]byte
			if fdstat(fd, &st) == 0 {
				fmt.Print(fd, " ")
			}
		}
	case "files": // open as many as it can
		n := 0
		for ; n < 5000; n++ {
			f, err := os.Open(os.Args[0])
			if err != nil {
				break
			}
			defer f.Close()
		}
		fmt.Print(n)
	case "keep": // a secret in memory until standard input ends
		secret := []byte(strings.Repeat(args[1], 1000))
		fmt.Println("kept")
		_, _ = io.ReadAll(os.Stdin)
		fmt.Print(len(secret))
	case "scan": // memory that nothing was written to
		b := make([]byte, 32<<20)
		fmt.Print(bytes.Count(b, []byte(args[1])))
	case "env":
		fmt.Print(strings.Join(os.Environ(), "\n"))
	case "args":
		fmt.Printf("%q", os.Args)
	}
}

func report(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
}
