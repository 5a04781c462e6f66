package hostend_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// The benchmarks run the agent as PID 1 behind FIFOs, as a container would, but
// without a runtime.

func benchGuest(b *testing.B) *hostend.Conn {
	b.Helper()
	return startGuest(b).attach()
}

func BenchmarkPing(b *testing.B) {
	c := benchGuest(b)
	for b.Loop() {
		if _, err := c.Ping(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkExecTrue(b *testing.B) {
	c := benchGuest(b)
	run := time.Now().UnixNano()
	i := 0
	for b.Loop() {
		i++
		s, err := c.StartExec(context.Background(), hostend.ExecSpec{Key: fmt.Sprint(run, "-", i), Argv: []string{"/bin/true"}})
		if err != nil {
			b.Fatal(err)
		}
		for err == nil {
			_, err = s.Next(context.Background())
		}
		if err != io.EOF {
			b.Fatal(err)
		}
	}
}

func BenchmarkOutput(b *testing.B) {
	c := benchGuest(b)
	s, err := c.StartExec(context.Background(), hostend.ExecSpec{Key: "out", Argv: []string{"cat", "/dev/zero"}})
	if err != nil {
		b.Fatal(err)
	}
	const unit = 1 << 20
	b.SetBytes(unit)
	for b.Loop() {
		for got := 0; got < unit; {
			ev, err := s.Next(context.Background())
			if err != nil {
				b.Fatal(err)
			}
			got += len(ev.Data)
		}
	}
}

func BenchmarkStdin(b *testing.B) {
	c := benchGuest(b)
	if _, err := c.StartExec(context.Background(), hostend.ExecSpec{Key: "in", Argv: []string{"sh", "-c", "cat >/dev/null"}, Stdin: true}); err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 1<<20)
	b.SetBytes(int64(len(buf)))
	at := uint64(0)
	for b.Loop() {
		if err := c.WriteStdin(context.Background(), "in", at, buf); err != nil {
			b.Fatal(err)
		}
		at += uint64(len(buf))
	}
}

func BenchmarkReadFile(b *testing.B) {
	c := benchGuest(b)
	const size = 64 << 20
	path := hostend.Path{Name: b.TempDir() + "/f"}
	if _, err := c.WriteFile(context.Background(), path, &patternReader{size: size}, hostend.WriteOptions{}); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(size)
	for b.Loop() {
		r, err := c.ReadFile(context.Background(), path, 0, 0)
		if err != nil {
			b.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, r); err != nil || n != size {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkWriteFile(b *testing.B) {
	c := benchGuest(b)
	const size = 64 << 20
	content := make([]byte, size)
	path := hostend.Path{Name: "/dev/shm/berth-bench-" + fmt.Sprint(time.Now().UnixNano())}
	defer func() { _ = c.Remove(context.Background(), path, false) }()
	b.SetBytes(size)
	for b.Loop() {
		if _, err := c.WriteFile(context.Background(), path, &zeros{content}, hostend.WriteOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}

// zeros gives a slice once.
type zeros struct{ left []byte }

func (z *zeros) Read(p []byte) (int, error) {
	if len(z.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p, z.left)
	z.left = z.left[n:]
	return n, nil
}
