package sdktest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Program is a process of the fake: a Go function that returns its exit code.
// When ctx ends the process was killed and what it returns does not count.
type Program func(ctx context.Context, p *Proc) int

// Size of a terminal.
type Size struct{ Rows, Cols uint32 }

// Proc is what a Program sees.
type Proc struct {
	Args           []string
	Env            map[string]string
	Dir            string
	Stdin          io.Reader
	Stdout, Stderr io.Writer

	exec  *exec
	srv   *Server
	files *files
}

// TTY is the size of the terminal; ok is false without one.
func (p *Proc) TTY() (size Size, ok bool) {
	p.exec.mu.Lock()
	defer p.exec.mu.Unlock()
	return p.exec.size, p.exec.tty
}

// ReadFile reads a file of the session.
func (p *Proc) ReadFile(path string) ([]byte, error) { return p.files.content(path) }

// WriteFile writes a file of the session.
func (p *Proc) WriteFile(path string, data []byte) error { return p.files.put(path, data, 0o644, true) }

// Register adds a program under the name by which Cmd.Args calls it.
func (s *Server) Register(name string, p Program) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.programs[name] = p
}

type output struct {
	e  *exec
	ch int
}

func (o output) Write(p []byte) (int, error) { return o.e.write(o.ch, p) }

type stdin struct{ e *exec }

func (s stdin) Read(p []byte) (int, error) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	for len(s.e.stdin) == 0 {
		if s.e.closed || s.e.ctx.Err() != nil {
			return 0, io.EOF
		}
		s.e.cond.Wait()
	}
	n := copy(p, s.e.stdin)
	s.e.stdin = s.e.stdin[n:]
	return n, nil
}

// builtins are the few programs that Conformance needs.
func builtins() map[string]Program {
	return map[string]Program{
		"true":      func(context.Context, *Proc) int { return 0 },
		"false":     func(context.Context, *Proc) int { return 1 },
		"echo":      echo,
		"cat":       cat,
		"sleep":     sleep,
		"env":       env,
		"pwd":       pwd,
		"seq":       seq,
		"sha256sum": sha256sum,
		"stty":      stty,
		"sh":        sh,
	}
}

func echo(_ context.Context, p *Proc) int {
	fmt.Fprintln(p.Stdout, strings.Join(p.Args[1:], " "))
	return 0
}

func cat(_ context.Context, p *Proc) int {
	if len(p.Args) == 1 {
		if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
			return 1
		}
		return 0
	}
	for _, path := range p.Args[1:] {
		b, err := p.ReadFile(path)
		if err != nil {
			fmt.Fprintf(p.Stderr, "cat: %s: %v\n", path, err)
			return 1
		}
		if _, err := p.Stdout.Write(b); err != nil {
			return 1
		}
	}
	return 0
}

func sleep(ctx context.Context, p *Proc) int {
	secs, err := strconv.ParseFloat(p.Args[len(p.Args)-1], 64)
	if err != nil {
		return 1
	}
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(secs * float64(time.Second))):
	}
	return 0
}

func env(_ context.Context, p *Proc) int {
	for _, k := range slices.Sorted(maps.Keys(p.Env)) {
		fmt.Fprintf(p.Stdout, "%s=%s\n", k, p.Env[k])
	}
	return 0
}

func pwd(_ context.Context, p *Proc) int {
	dir := p.Dir
	if dir == "" {
		dir = "/"
	}
	fmt.Fprintln(p.Stdout, dir)
	return 0
}

// seq FIRST LAST
func seq(ctx context.Context, p *Proc) int {
	if len(p.Args) != 3 {
		return 1
	}
	from, err1 := strconv.Atoi(p.Args[1])
	to, err2 := strconv.Atoi(p.Args[2])
	if err1 != nil || err2 != nil {
		return 1
	}
	w := bufio.NewWriterSize(p.Stdout, 8<<10)
	for i := from; i <= to && ctx.Err() == nil; i++ {
		if _, err := fmt.Fprintln(w, i); err != nil {
			return 1
		}
	}
	if w.Flush() != nil {
		return 1
	}
	return 0
}

func sha256sum(_ context.Context, p *Proc) int {
	h := sha256.New()
	if _, err := io.Copy(h, p.Stdin); err != nil {
		return 1
	}
	fmt.Fprintf(p.Stdout, "%x  -\n", h.Sum(nil))
	return 0
}

func stty(_ context.Context, p *Proc) int {
	size, ok := p.TTY()
	if !ok {
		fmt.Fprintln(p.Stderr, "stty: not a terminal")
		return 1
	}
	fmt.Fprintf(p.Stdout, "%d %d\n", size.Rows, size.Cols)
	return 0
}

// sh knows -c with statements between semicolons: exit N, read NAME, and
// programs with plain words, >&2 at the end.
func sh(ctx context.Context, p *Proc) int {
	if len(p.Args) != 3 || p.Args[1] != "-c" {
		fmt.Fprintln(p.Stderr, "sh: this fake knows only sh -c")
		return 2
	}
	code := 0
	for _, line := range strings.Split(p.Args[2], ";") {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		q := *p
		if words[len(words)-1] == ">&2" {
			q.Stdout, words = p.Stderr, words[:len(words)-1]
		}
		q.Args = words
		switch words[0] {
		case "exit":
			n, err := strconv.Atoi(words[1])
			if err != nil {
				return 2
			}
			return n
		case "read":
			readLine(p.Stdin)
			continue
		}
		p.srv.mu.Lock()
		program := p.srv.programs[words[0]]
		p.srv.mu.Unlock()
		if program == nil {
			fmt.Fprintf(p.Stderr, "sh: %s: not found\n", words[0])
			code = 127
			continue
		}
		code = program(ctx, &q)
	}
	return code
}

func readLine(r io.Reader) {
	var b [1]byte
	for {
		if n, err := r.Read(b[:]); err != nil || n == 1 && (b[0] == '\n' || b[0] == '\r') {
			return
		}
	}
}
