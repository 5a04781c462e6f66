package drivertest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest/answer"
)

// Answer serves a probe: see answer.Serve.
func Answer(in io.Reader, out io.Writer, do func(op string, args []string) (string, error)) {
	answer.Serve(in, out, do)
}

// Talk is an open channel to a probe.
type Talk struct {
	in interface {
		io.WriteCloser
		SetWriteDeadline(time.Time) error
	}
	out interface {
		io.ReadCloser
		SetReadDeadline(time.Time) error
	}
	sc *bufio.Reader
	n  int
}

const answerTime = 60 * time.Second

// Open opens the channel of a sandbox whose first process is a probe.
func Open(ch driver.Channel) (*Talk, error) {
	n := int(time.Now().UnixNano() % 1e9)
	if ch.Socket != "" {
		c, err := net.DialTimeout("unix", ch.Socket, answerTime)
		if err != nil {
			return nil, err
		}
		return &Talk{in: c, out: c, sc: bufio.NewReader(c), n: n}, nil
	}
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
	return &Talk{in: in, out: out, sc: bufio.NewReader(out), n: n}, nil
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
func (t *Talk) Raw(s string) error { _, err := io.WriteString(t.in, s); return err }

// Send asks the probe and waits for nothing; the number is for Await.
func (t *Talk) Send(op string, args ...string) (int, error) {
	t.n++
	b, err := json.Marshal(answer.Request{N: t.n, Op: op, Args: args})
	if err != nil {
		return 0, err
	}
	_ = t.in.SetWriteDeadline(time.Now().Add(answerTime))
	if _, err := t.in.Write(append(b, '\n')); err != nil {
		return 0, fmt.Errorf("channel: %w", err)
	}
	return t.n, nil
}

// Await reads the answer to the request of this number. What an earlier reader left unread is skipped.
// After a time-out it can be called again.
func (t *Talk) Await(n int, within time.Duration) (string, error) {
	_ = t.out.SetReadDeadline(time.Now().Add(within))
	for {
		line, err := t.sc.ReadBytes('\n')
		if err != nil {
			return "", fmt.Errorf("channel: %w", err)
		}
		var a answer.Reply
		if json.Unmarshal(line, &a) != nil || a.N != n {
			continue
		}
		if a.Err != "" {
			return a.Out, errors.New(a.Err)
		}
		return a.Out, nil
	}
}

// Do asks the probe and waits for the answer.
func (t *Talk) Do(op string, args ...string) (string, error) {
	n, err := t.Send(op, args...)
	if err != nil {
		return "", err
	}
	return t.Await(n, answerTime)
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

// expectRaw reads n raw bytes that follow an answer.
func (t *Talk) expectRaw(n int64) error {
	_ = t.out.SetReadDeadline(time.Now().Add(answerTime))
	return answer.Expect(t.sc, n)
}

// writeRaw writes n raw bytes.
func (t *Talk) writeRaw(n int64) error {
	_ = t.in.SetWriteDeadline(time.Now().Add(answerTime))
	return answer.Write(t.in, n)
}

// ended waits for the end of the guest's output.
func (t *Talk) ended(within time.Duration) error {
	_ = t.out.SetReadDeadline(time.Now().Add(within))
	_, err := io.Copy(io.Discard, t.sc)
	return err
}
