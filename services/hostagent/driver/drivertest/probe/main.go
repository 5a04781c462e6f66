//go:build linux || wasip1

// Command probe is the guest of the driver suite: the first process of a sandbox, which answers
// requests on its standard input, one JSON object per line, and tells what it can see and do. It
// guarantees that an operation does that one thing and nothing else. As a WASI module it has the
// operations on files and memory only.
package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/berth-dev/berth/services/hostagent/driver/drivertest/answer"
)

type operation func(args []string) (string, error)

// operations by name; each takes the request's arguments.
var operations = map[string]operation{
	"read":     func(a []string) (string, error) { b, err := os.ReadFile(a[0]); return string(b), err },
	"write":    func(a []string) (string, error) { return "", os.WriteFile(a[0], []byte(a[1]), 0o644) },
	"remove":   remove,
	"mkdir":    func(a []string) (string, error) { return "", os.MkdirAll(a[0], 0o755) },
	"symlink":  func(a []string) (string, error) { return "", os.Symlink(a[0], a[1]) },
	"link":     func(a []string) (string, error) { return os.Readlink(a[0]) },
	"list":     list,
	"stat":     stat,
	"open":     open,
	"sum":      sum,
	"sync":     write,
	"fill":     write,
	"hostname": func([]string) (string, error) { return os.Hostname() },
	"env":      func([]string) (string, error) { return strings.Join(os.Environ(), "\n"), nil },
	"keep":     keep,
	"hog":      keep,
	"exit":     func(a []string) (string, error) { n, _ := strconv.Atoi(a[0]); os.Exit(n); return "", nil },
}

func main() {
	if len(os.Args) > 1 && child(os.Args[1:]) {
		return
	}
	prepare()
	answer.Serve(os.Stdin, os.Stdout, func(op string, args []string) (string, error) {
		f, ok := operations[op]
		if !ok {
			return "", fmt.Errorf("no operation %q", op)
		}
		return f(args)
	})
}

// remove takes away something that is there.
func remove(a []string) (string, error) {
	if _, err := os.Lstat(a[0]); err != nil {
		return "", err
	}
	return "", os.RemoveAll(a[0])
}

func list(a []string) (string, error) {
	entries, err := os.ReadDir(a[0])
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, "\n"), err
}

func open(a []string) (string, error) {
	f, err := os.OpenFile(a[0], os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	return "", f.Close()
}

func sum(a []string) (string, error) {
	f, err := os.Open(a[0])
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

// write makes a file of so many MiB and syncs it; it says how many it wrote.
func write(a []string) (string, error) {
	mib, _ := strconv.Atoi(a[1])
	if err := os.MkdirAll(filepath.Dir(a[0]), 0o755); err != nil {
		return "", err
	}
	f, err := os.Create(a[0])
	if err != nil {
		return "", err
	}
	b := make([]byte, 1<<20)
	n := 0
	for ; n < mib && err == nil; n++ {
		for i := range b {
			b[i] = byte(i*7 + n)
		}
		_, err = f.Write(b)
	}
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		err = errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return strconv.Itoa(n), err
}

var kept []byte

// keep holds so many MiB of memory until the next one.
func keep(a []string) (string, error) {
	mib, _ := strconv.Atoi(a[0])
	kept = make([]byte, mib<<20)
	for i := 0; i < len(kept); i += 4096 {
		kept[i] = 1
	}
	return strconv.Itoa(len(kept)), nil
}
