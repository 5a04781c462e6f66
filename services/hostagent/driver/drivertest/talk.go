package drivertest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// request and answer are one line of JSON each.
type request struct {
	N    int      `json:"n"`
	Op   string   `json:"op"`
	Args []string `json:"args"`
}

type answer struct {
	N   int    `json:"n"`
	Out string `json:"out"`
	Err string `json:"err"`
}

// Answer serves a probe: it answers each line of in on out until in ends. The operation echo is
// always there.
func Answer(in io.Reader, out io.Writer, do func(op string, args []string) (string, error)) {
	sc := bufio.NewScanner(in)
	sc.Buffer(nil, 1<<20)
	enc := json.NewEncoder(out)
	for sc.Scan() {
		var q request
		if json.Unmarshal(sc.Bytes(), &q) != nil {
			continue // a line that lost its writer
		}
		a := answer{N: q.N}
		var err error
		if q.Op == "echo" {
			a.Out = strings.Join(q.Args, " ")
		} else {
			a.Out, err = do(q.Op, q.Args)
		}
		if err != nil {
			a.Err = err.Error()
		}
		if enc.Encode(a) != nil {
			return
		}
	}
}

// Talk is an open channel to a probe.
type Talk struct {
	in  *os.File
	out *os.File
	sc  *bufio.Reader
	n   int
}

const answerTime = 60 * time.Second

// Open opens the channel of a sandbox whose first process is a probe.
func Open(ch driver.Channel) (*Talk, error) {
	// Both pipes are opened without waiting: the driver holds the other ends.
	in, err := openPipe(ch.Stdin, unix.O_WRONLY)
	if err != nil {
		return nil, err
	}
	out, err := openPipe(ch.Stdout, unix.O_RDONLY)
	if err != nil {
		_ = in.Close()
		return nil, err
	}
	return &Talk{in: in, out: out, sc: bufio.NewReader(out), n: int(time.Now().UnixNano() % 1e9)}, nil
}

func openPipe(path string, how int) (*os.File, error) {
	deadline := time.Now().Add(answerTime)
	for {
		fd, err := unix.Open(path, how|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
		if !errors.Is(err, unix.ENXIO) || time.Now().After(deadline) {
			return nil, fmt.Errorf("open %s: %w", path, err)
		}
		time.Sleep(time.Millisecond)
	}
}

// Close closes this end of the channel.
func (t *Talk) Close() { _ = t.in.Close(); _ = t.out.Close() }

// Raw writes bytes that are no whole request, as a writer that dies does.
func (t *Talk) Raw(s string) error { _, err := t.in.WriteString(s); return err }

// Do asks the probe. What an earlier reader left unread is skipped.
func (t *Talk) Do(op string, args ...string) (string, error) {
	t.n++
	b, err := json.Marshal(request{N: t.n, Op: op, Args: args})
	if err != nil {
		return "", err
	}
	if _, err := t.in.Write(append(b, '\n')); err != nil {
		return "", fmt.Errorf("channel: %w", err)
	}
	_ = t.out.SetReadDeadline(time.Now().Add(answerTime))
	for {
		line, err := t.sc.ReadBytes('\n')
		if err != nil {
			return "", fmt.Errorf("channel: %w", err)
		}
		var a answer
		if json.Unmarshal(line, &a) != nil || a.N != t.n {
			continue
		}
		if a.Err != "" {
			return a.Out, errors.New(a.Err)
		}
		return a.Out, nil
	}
}

// must asks the probe for something that has to work.
func (t *Talk) must(tb testing.TB, op string, args ...string) string {
	tb.Helper()
	out, err := t.Do(op, args...)
	if err != nil {
		tb.Fatalf("%s %v: %v", op, args, err)
	}
	return out
}
