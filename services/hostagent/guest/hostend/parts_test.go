package hostend_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// parts are the programs that this binary can be.
var parts = map[string]func([]string) int{
	"generate": generate, "swallow": swallow, "echo": echo, "host": hostThatDies,
}

func number(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

// generate BYTES CODE writes the pattern of seed 1 to stdout and a third as much
// of seed 2 to stderr, then ends with a code.
func generate(args []string) int {
	total := number(args[0])
	var wg sync.WaitGroup
	for i, f := range []*os.File{os.Stdout, os.Stderr} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			left := total
			if i == 1 {
				left = total / 3
			}
			buf := make([]byte, 50_001)
			for at := uint64(0); at < left; {
				n := min(uint64(len(buf)), left-at)
				fill(buf[:n], uint64(i+1), at)
				if _, err := f.Write(buf[:n]); err != nil {
					os.Exit(90)
				}
				at += n
			}
		}()
	}
	wg.Wait()
	return int(number(args[1]))
}

// swallow BYTES ends with 0 if stdin is that much of the pattern of seed 3.
func swallow(args []string) int {
	at, buf := uint64(0), make([]byte, 33_000)
	for {
		n, err := os.Stdin.Read(buf)
		if bad := checkPattern(buf[:n], 3, at); bad >= 0 {
			fmt.Println("wrong byte at", bad)
			return 91
		}
		at += uint64(n)
		if errors.Is(err, io.EOF) {
			fmt.Println(at)
			if at != number(args[0]) {
				return 92
			}
			return 0
		}
	}
}

// echo copies stdin to stdout.
func echo([]string) int {
	if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
		return 93
	}
	return 5
}

// mortal passes bytes until its budget is used up, and then kills this process:
// in the middle of a write, or after half of what could have been read.
type mortal struct {
	ch          *hostend.Channel
	read, write atomic.Int64
}

func die() {
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {}
}

func (m *mortal) Read(p []byte) (int, error) {
	left := m.read.Load()
	if left <= 0 {
		die()
	}
	n, err := m.ch.Read(p[:min(int64(len(p)), left)])
	m.read.Add(-int64(n))
	return n, err
}

func (m *mortal) Write(p []byte) (int, error) {
	left := m.write.Load()
	if int64(len(p)) > left {
		_, _ = m.ch.Write(p[:left])
		die()
	}
	m.write.Add(-int64(len(p)))
	return m.ch.Write(p)
}

func (m *mortal) Close() error { return m.ch.Close() }

// job is what a host has to see through; its files survive the host.
type job struct {
	Spec  hostend.ExecSpec
	Input uint64 // bytes of the pattern of seed 3 for stdin
}

// hostThatDies IN OUT DIR READ WRITE resumes all jobs of DIR/jobs.json where the
// files say a predecessor was, and ends with 0 when all have ended.
func hostThatDies(args []string) int {
	if err := hostLife(args); err != nil {
		fmt.Fprintln(os.Stderr, "host:", err)
		return 1
	}
	return 0
}

func hostLife(args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ch, err := hostend.OpenFIFOs(args[0], args[1])
	if err != nil {
		return err
	}
	m := &mortal{ch: ch}
	m.read.Store(int64(number(args[3])))
	m.write.Store(int64(number(args[4])))
	c, err := hostend.Attach(ctx, m, m, hostend.Options{})
	if err != nil {
		return err
	}
	b, err := os.ReadFile(args[2] + "/jobs.json")
	if err != nil {
		return err
	}
	var jobs []job
	if err := json.Unmarshal(b, &jobs); err != nil {
		return err
	}
	results := make(chan error, 2*len(jobs))
	for _, j := range jobs {
		go func() { results <- follow(ctx, c, args[2], j) }()
		go func() { results <- feed(ctx, c, j) }()
	}
	for range 2 * len(jobs) {
		if err := <-results; err != nil {
			return err
		}
	}
	return nil
}

// follow appends output to files and acknowledges what is in them.
func follow(ctx context.Context, c *hostend.Conn, dir string, j job) error {
	var files [2]*os.File
	var at [2]uint64
	for i, name := range []string{"out", "err"} {
		f, err := os.OpenFile(fmt.Sprintf("%s/%s.%s", dir, j.Spec.Key, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		st, err := f.Stat()
		if err != nil {
			return err
		}
		files[i], at[i] = f, uint64(st.Size())
	}
	j.Spec.From = hostend.Offsets{Stdout: at[0], Stderr: at[1]}
	s, err := c.StartExec(ctx, j.Spec)
	if err != nil {
		return err
	}
	s.ManualAck = true
	for {
		ev, err := s.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case ev.Gap != 0:
			return fmt.Errorf("%s: gap from %d to %d", j.Spec.Key, ev.Offset, ev.Gap)
		case ev.Exit != nil:
			if err := keepExit(dir, j.Spec.Key, ev.Exit); err != nil {
				return err
			}
			continue
		}
		i := ev.Stream - hostend.Stdout
		if ev.Offset != at[i] {
			return fmt.Errorf("%s: bytes at %d, expected %d", j.Spec.Key, ev.Offset, at[i])
		}
		if _, err := files[i].Write(ev.Data); err != nil {
			return err
		}
		at[i] += uint64(len(ev.Data))
		if err := s.Ack(ctx, hostend.Offsets{Stdout: at[0], Stderr: at[1]}); err != nil {
			return err
		}
	}
}

func keepExit(dir, key string, exit *hostend.Exit) error {
	b, err := json.Marshal(exit)
	if err != nil {
		return err
	}
	return os.WriteFile(dir+"/"+key+".exit", b, 0o600)
}

// feed gives a job the rest of its stdin: from where the guest says it is.
func feed(ctx context.Context, c *hostend.Conn, j job) error {
	if !j.Spec.Stdin {
		return nil
	}
	if err := waitStarted(ctx, c, j.Spec.Key); err != nil {
		return err
	}
	list, err := c.ListExecs(ctx)
	if err != nil {
		return err
	}
	at := uint64(0)
	for _, x := range list {
		if string(x.Key) == j.Spec.Key {
			at = x.Stdin
		}
	}
	buf := make([]byte, 100_000)
	// A host that does not know better resends: those bytes must be skipped.
	at -= min(at, 70_000)
	for at < j.Input {
		n := min(uint64(len(buf)), j.Input-at)
		fill(buf[:n], 3, at)
		if err := c.WriteStdin(ctx, j.Spec.Key, at, buf[:n]); err != nil {
			return err
		}
		at += n
	}
	return c.CloseStdin(ctx, j.Spec.Key, j.Input)
}

// waitStarted waits until the guest knows the exec.
func waitStarted(ctx context.Context, c *hostend.Conn, key string) error {
	for {
		list, err := c.ListExecs(ctx)
		if err != nil {
			return err
		}
		for _, x := range list {
			if string(x.Key) == key {
				return nil
			}
		}
	}
}
