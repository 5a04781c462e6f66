package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"
)

// inside is this program as it runs in a sandbox: `inside VERB ARGUMENT...`.
func inside(args []string) error {
	if len(args) < 2 {
		return errors.New("inside: a verb and its arguments are needed")
	}
	switch args[0] {
	case "make": // TREE SEED
		t, err := treeOf(args[1])
		if err != nil {
			return err
		}
		seed, err := strconv.ParseUint(args[2], 10, 64)
		if err != nil {
			return err
		}
		return t.make(seed)
	case "apply": // TREE CHANGE
		t, err := treeOf(args[1])
		if err != nil {
			return err
		}
		var c change
		if err := json.Unmarshal([]byte(args[2]), &c); err != nil {
			return err
		}
		return t.apply(c)
	case "append": // FILE BYTES SEED
		return appendTo(args[1], args[2], args[3])
	case "redirty": // FILE BYTES PROBE SCATTERED
		n, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return redirty(args[1], n, args[3], args[4])
	}
	return fmt.Errorf("inside: no verb %q", args[0])
}

func treeOf(s string) (t tree, err error) { return t, json.Unmarshal([]byte(s), &t) }

func appendTo(path, bytes, seed string) error {
	n, err := strconv.Atoi(bytes)
	if err != nil {
		return err
	}
	s, err := strconv.ParseUint(seed, 10, 64)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	b := make([]byte, n)
	fill(b, s)
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

// redirty overwrites a file whenever it is told to, and meanwhile writes one block every millisecond
// to another file: the longest of those writes is how long a program stood still. It reads words, one
// a line, and answers each with a line:
//
//	once    overwrite the file once from now on
//	always  overwrite it again and again until the next word
//	calm    stop that
//	scatter write as many bytes once in pieces of 4 KiB, apart from each other, into the scattered file
//	stall   say the longest write since the last question, in nanoseconds
func redirty(path string, n int, probe, scattered string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	var longest, always atomic.Int64
	go probing(probe, &longest)
	rounds := make(chan struct{}, 1)
	go overwriting(f, n, rounds, &always)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		answer := "ok"
		switch in.Text() {
		case "once":
			always.Store(0)
			start(rounds)
		case "always":
			always.Store(1)
			start(rounds)
		case "scatter":
			go func() { _ = scatter(scattered, n, uint64(time.Now().UnixNano())) }()
		case "calm":
			always.Store(0)
		case "stall":
			answer = fmt.Sprint(longest.Swap(0))
		}
		if _, err := io.WriteString(os.Stdout, answer+"\n"); err != nil {
			return err
		}
	}
	return in.Err()
}

// start wakes the writer unless it is told already.
func start(rounds chan<- struct{}) {
	select {
	case rounds <- struct{}{}:
	default:
	}
}

func probing(path string, longest *atomic.Int64) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return
	}
	block := make([]byte, 4096)
	for i := int64(0); ; i++ {
		block[0] = byte(i)
		began := time.Now()
		if _, err := f.WriteAt(block, i%64*4096); err != nil {
			return
		}
		if took := int64(time.Since(began)); took > longest.Load() {
			longest.Store(took)
		}
		time.Sleep(time.Millisecond)
	}
}

func overwriting(f *os.File, n int, rounds <-chan struct{}, always *atomic.Int64) {
	block := make([]byte, 64<<10)
	fill(block, uint64(time.Now().UnixNano()))
	for i := byte(0); ; i++ {
		if always.Load() == 0 {
			<-rounds
		}
		mixed := slices.Clone(block)
		for off := 0; off < n; off += len(block) {
			mixed[0], mixed[1], mixed[2] = i, byte(off>>16), byte(off>>24)
			if _, err := f.WriteAt(mixed, int64(off)); err != nil {
				return
			}
		}
	}
}

// scatter writes n bytes in pieces of 4 KiB, each 12 KiB from the next.
func scatter(path string, n int, seed uint64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	b := make([]byte, 4096)
	fill(b, seed)
	for i := 0; i < n/len(b) && err == nil; i++ {
		b[0], b[1] = byte(i), byte(i>>8)
		_, err = f.WriteAt(b, int64(i)*4*int64(len(b)))
	}
	return errors.Join(err, f.Close())
}
