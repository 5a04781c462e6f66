package sdktest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/sdk"
)

func (c *check) exitCodes() {
	s := c.open(sdk.OpenOptions{})
	c.must(s.Run(c.ctx, sdk.Command("true")))
	exit := (*sdk.ExitError)(nil)
	err := s.Run(c.ctx, sdk.Command("false"))
	if !errors.As(err, &exit) || exit.Code != 1 || exit.Signal != "" {
		c.Fatalf("false ended with %v", err)
	}
	var out, errOut bytes.Buffer
	cmd := sdk.Command("sh", "-c", "echo out; echo err >&2; exit 7")
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = s.Run(c.ctx, cmd)
	if !errors.As(err, &exit) || exit.Code != 7 {
		c.Fatalf("exit 7 ended with %v", err)
	}
	c.equal(out.String(), "out\n")
	c.equal(errOut.String(), "err\n")
	p, err := s.Exec(c.ctx, sdk.Command("sleep", "100"))
	c.must(err)
	c.must(p.Signal("SIGTERM"))
	if err := p.Wait(); !errors.As(err, &exit) || exit.Signal != "SIGTERM" {
		c.Fatalf("a process that got SIGTERM ended with %v", err)
	}
	if err := p.Signal("SIGTERM"); !errors.Is(err, sdk.ErrNotFound) {
		c.Fatalf("a signal to a process that ended: %v", err)
	}
}

func (c *check) execBadInput() {
	s := c.open(sdk.OpenOptions{})
	for name, cmd := range map[string]sdk.Cmd{
		"no program":           {},
		"no such program":      sdk.Command("/no/such/program"),
		"no such directory":    {Args: []string{"true"}, Dir: "/no/such/dir"},
		"a key that is absurd": {Args: []string{"true"}, Key: "A KEY"},
		"a negative time-out":  {Args: []string{"true"}, Timeout: -1},
	} {
		if _, err := s.Exec(c.ctx, cmd); err == nil {
			c.Errorf("%s was accepted", name)
		}
	}
	_, err := s.Attach(c.ctx, "never-started", sdk.AttachOptions{})
	c.is(err, sdk.ErrNotFound)
}

func (c *check) environment() {
	s := c.open(sdk.OpenOptions{})
	var out bytes.Buffer
	c.must(s.Run(c.ctx, sdk.Cmd{Args: []string{"env"}, Env: map[string]string{"BERTH_X": "a b=c"}, Stdout: &out}))
	if !strings.Contains("\n"+out.String(), "\nBERTH_X=a b=c\n") {
		c.Fatalf("the environment is %q", out.String())
	}
	out.Reset()
	c.must(s.Run(c.ctx, sdk.Cmd{Args: []string{"pwd"}, Dir: "/tmp", Stdout: &out}))
	c.equal(out.String(), "/tmp\n")
	b, err := s.Output(c.ctx, "echo", "a  b", "c")
	c.must(err)
	c.equal(string(b), "a  b c\n")
}

// numbers is what seq 1 n prints.
func numbers(n int) []byte {
	var b bytes.Buffer
	for i := 1; i <= n; i++ {
		b.WriteString(strconv.Itoa(i))
		b.WriteByte('\n')
	}
	return b.Bytes()
}

func (c *check) bulkOutput() {
	s := c.open(sdk.OpenOptions{})
	const n = 1_000_000 // 6.9 MB: several windows, more than the ring
	got, err := s.Output(c.ctx, "seq", "1", strconv.Itoa(n))
	c.must(err)
	if !bytes.Equal(got, numbers(n)) {
		c.Fatalf("%d bytes of output differ from the %d expected", len(got), len(numbers(n)))
	}
}

func (c *check) bulkInput() {
	s := c.open(sdk.OpenOptions{})
	b, hash := noise(6<<20 + 17)
	var out bytes.Buffer
	c.must(s.Run(c.ctx, sdk.Cmd{Args: []string{"sha256sum"}, Stdin: bytes.NewReader(b), Stdout: &out}))
	if !strings.HasPrefix(out.String(), hash) {
		c.Fatalf("the process saw other bytes than were sent: %s", out.String())
	}
	out.Reset()
	c.must(s.Run(c.ctx, sdk.Cmd{Args: []string{"cat"}, Stdin: bytes.NewReader(b), Stdout: &out}))
	c.equal(fmt.Sprintf("%x", sha256.Sum256(out.Bytes())), hash)
	out.Reset()
	c.must(s.Run(c.ctx, sdk.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader(""), Stdout: &out}))
	c.equal(out.Len(), 0)
	c.must(s.Run(c.ctx, sdk.Cmd{Args: []string{"cat"}})) // no stdin: at its end at once
}

func (c *check) reconnect() {
	c.Helper()
	c.must(c.Client.NATS().ForceReconnect())
}

func (c *check) reattachAfterReconnect() {
	s := c.open(sdk.OpenOptions{})
	in, feed := io.Pipe()
	var out lockedBuffer
	p, err := s.Exec(c.ctx, sdk.Cmd{Args: []string{"cat"}, Stdin: in, Stdout: &out})
	c.must(err)
	want := ""
	for i := range 5 {
		line := fmt.Sprintf("line %d\n", i)
		_, err := io.WriteString(feed, line)
		c.must(err)
		want += line
		c.await(&out, line)
		c.reconnect()
	}
	_, err = io.WriteString(feed, "last\n")
	c.must(err)
	c.must(feed.Close())
	c.must(p.Wait())
	c.equal(out.String(), want+"last\n")
}

func (c *check) bulkOverReconnects() {
	s := c.open(sdk.OpenOptions{})
	b, hash := noise(8 << 20)
	stop := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(150 * time.Millisecond):
				_ = c.Client.NATS().ForceReconnect()
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	var out bytes.Buffer
	c.must(s.Run(c.ctx, sdk.Cmd{Args: []string{"cat"}, Stdin: bytes.NewReader(b), Stdout: slow{&out}}))
	c.equal(fmt.Sprintf("%x", sha256.Sum256(out.Bytes())), hash)
}

// slow is a Writer that takes a moment for each piece.
type slow struct{ w io.Writer }

func (s slow) Write(p []byte) (int, error) {
	time.Sleep(5 * time.Millisecond)
	return s.w.Write(p)
}

func (c *check) attachByKey() {
	s := c.open(sdk.OpenOptions{})
	in, feed := io.Pipe()
	var first lockedBuffer
	p, err := s.Exec(c.ctx, sdk.Cmd{Args: []string{"sh", "-c", "echo one; read x; echo two; exit 3"}, Key: "by-key", Stdin: in, Stdout: &first})
	c.must(err)
	c.await(&first, "one\n")
	go func() { _, _ = io.WriteString(feed, "go on\n"); _ = feed.Close() }()
	c.await(&first, "two\n")
	exit := (*sdk.ExitError)(nil)
	if err := p.Wait(); !errors.As(err, &exit) || exit.Code != 3 {
		c.Fatalf("it ended with %v", err)
	}
	var rest bytes.Buffer
	again, err := s.Attach(c.ctx, "by-key", sdk.AttachOptions{Stdout: &rest, StdoutOffset: 4})
	c.must(err)
	if err := again.Wait(); !errors.As(err, &exit) || exit.Code != 3 {
		c.Fatalf("attached again it ended with %v", err)
	}
	c.equal(rest.String(), "two\n")
	list, err := s.Execs(c.ctx)
	c.must(err)
	if len(list) != 1 || list[0].Key != "by-key" || list[0].Running || !errors.As(list[0].Exit, &exit) || exit.Code != 3 {
		c.Fatalf("the processes are %+v", list)
	}
	// The same key starts nothing: it is the same process with the same output.
	var same bytes.Buffer
	again, err = s.Exec(c.ctx, sdk.Cmd{Args: []string{"sh", "-c", "echo one; read x; echo two; exit 3"}, Key: "by-key", Stdin: strings.NewReader(""), Stdout: &same})
	c.must(err)
	if err := again.Wait(); !errors.As(err, &exit) || exit.Code != 3 {
		c.Fatalf("started again it ended with %v", err)
	}
	c.equal(same.String(), "one\ntwo\n")
}

func (c *check) cancelKills() {
	s := c.open(sdk.OpenOptions{})
	ctx, cancel := context.WithCancel(c.ctx)
	p, err := s.Exec(ctx, sdk.Cmd{Args: []string{"sleep", "100"}, Key: "to-kill"})
	c.must(err)
	cancel()
	c.is(p.Wait(), context.Canceled)
	q, err := s.Attach(c.ctx, "to-kill", sdk.AttachOptions{})
	c.must(err)
	exit := (*sdk.ExitError)(nil)
	if err := q.Wait(); !errors.As(err, &exit) || exit.Signal != "SIGKILL" {
		c.Fatalf("the process ended with %v", err)
	}
	p, err = s.Exec(c.ctx, sdk.Cmd{Args: []string{"sh", "-c", "sleep 0.3; exit 5"}, Key: "goes-on"})
	c.must(err)
	p.Detach()
	c.is(p.Wait(), sdk.ErrDetached)
	q, err = s.Attach(c.ctx, "goes-on", sdk.AttachOptions{})
	c.must(err)
	if err := q.Wait(); !errors.As(err, &exit) || exit.Code != 5 {
		c.Fatalf("the detached process ended with %v", err)
	}
}

func (c *check) timeOut() {
	s := c.open(sdk.OpenOptions{})
	exit := (*sdk.ExitError)(nil)
	err := s.Run(c.ctx, sdk.Cmd{Args: []string{"sleep", "100"}, Timeout: 200 * time.Millisecond})
	if !errors.As(err, &exit) || exit.Signal != "SIGKILL" || !exit.TimedOut {
		c.Fatalf("it ended with %v", err)
	}
}

func (c *check) terminal() {
	s := c.open(sdk.OpenOptions{})
	in, feed := io.Pipe()
	var out lockedBuffer
	p, err := s.Exec(c.ctx, sdk.Cmd{Args: []string{"sh", "-c", "stty size; read x; stty size"}, Stdin: in, Stdout: &out, PTY: &sdk.Size{Rows: 24, Cols: 80}})
	c.must(err)
	c.await(&out, "24 80")
	c.must(p.Resize(sdk.Size{Rows: 50, Cols: 132}))
	_, err = io.WriteString(feed, "\n")
	c.must(err)
	c.must(p.Wait())
	c.await(&out, "50 132")
	_ = feed.Close()
}
