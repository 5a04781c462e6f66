package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// self is where this program lies in a sandbox.
const self = "/usr/local/bin/bench-disk"

// open opens a session, new or asleep, and brings this program into a new one.
func (in *installation) open(ctx context.Context, name, template string) (*sdk.Session, error) {
	s, err := in.client.Open(ctx, sdk.OpenOptions{Name: name, Template: template, Risk: sdk.OwnCode()})
	if err != nil || s.Origin() != sdk.Created {
		return s, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	f, err := os.Open(exe)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	_, err = s.Files().Write(ctx, self, f, sdk.WriteOptions{Mode: 0o755})
	return s, err
}

// inSession runs a verb of this program in the sandbox.
func inSession(ctx context.Context, s *sdk.Session, verb string, args ...any) error {
	words := []string{self, "inside", verb}
	for _, a := range args {
		if text, ok := a.(string); ok {
			words = append(words, text)
			continue
		}
		raw, err := json.Marshal(a)
		if err != nil {
			return err
		}
		words = append(words, string(raw))
	}
	var said bytes.Buffer
	if err := s.Run(ctx, sdk.Cmd{Args: words, User: "root", Stdout: &said, Stderr: &said}); err != nil {
		return fmt.Errorf("%s in the session: %w: %s", verb, err, said.String())
	}
	return nil
}

// redirtier is the program that overwrites a file while it is told to.
type redirtier struct {
	p    *sdk.Process
	in   *io.PipeWriter
	out  *bufio.Reader
	stop context.CancelFunc
}

func startRedirtier(ctx context.Context, s *sdk.Session, file string, bytes int, probe, scattered string) (*redirtier, error) {
	ctx, stop := context.WithCancel(ctx)
	stdin, in := io.Pipe()
	out, stdout := io.Pipe()
	p, err := s.Exec(ctx, sdk.Cmd{Args: []string{self, "inside", "redirty", file, fmt.Sprint(bytes), probe, scattered}, User: "root", Stdin: stdin, Stdout: stdout})
	if err != nil {
		stop()
		return nil, err
	}
	go func() { <-p.Done(); _ = stdout.CloseWithError(io.EOF) }()
	return &redirtier{p, in, bufio.NewReader(out), stop}, nil
}

// say tells it a word and waits for the answer.
func (r *redirtier) say(word string) (string, error) {
	if _, err := io.WriteString(r.in, word+"\n"); err != nil {
		return "", err
	}
	line, err := r.out.ReadString('\n')
	return line, err
}

// stall is the longest time that a write of the program took since the last question.
func (r *redirtier) stall() (time.Duration, error) {
	line, err := r.say("stall")
	if err != nil {
		return 0, err
	}
	var n int64
	_, err = fmt.Sscan(line, &n)
	return time.Duration(n), err
}

func (r *redirtier) end() {
	_ = r.in.Close()
	_ = r.p.Signal("SIGKILL")
	<-r.p.Done()
	r.stop()
}

// checkpointed is what one checkpoint cost.
type checkpointed struct {
	meters
	took time.Duration // from the request to its answer
}

func (in *installation) checkpoint(ctx context.Context, s *sdk.Session) (c checkpointed, err error) {
	before, err := in.read()
	if err != nil {
		return c, err
	}
	began := time.Now()
	if _, err = s.Checkpoint(ctx); err != nil {
		return c, err
	}
	c.took = time.Since(began)
	after, err := in.read()
	c.meters = after.since(before)
	return c, err
}

// attach is the time of the step in which the disk was brought and mounted.
func attach(s *sdk.Session) time.Duration {
	for _, step := range s.Timing().Steps {
		if step.Name == "host.disk.attach" {
			return step.Took
		}
	}
	return 0
}
