package null

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"testing"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
)

// host is a drivertest.Host in memory.
type host struct {
	dir   string
	world *World
}

// guest is a probe that knows how to end.
func guest(_ context.Context, in io.Reader, out io.Writer) (status uint32) {
	pr, pw := io.Pipe()
	go func() { _, err := io.Copy(pw, in); _ = pw.CloseWithError(err) }()
	drivertest.Answer(pr, out, func(op string, args []string) (string, error) {
		if op != "exit" {
			return "", errors.ErrUnsupported
		}
		n, err := strconv.Atoi(args[0])
		status = uint32(n)
		_ = pr.Close()
		return "", err
	})
	return status
}

func (h *host) Open(t testing.TB) driver.Driver {
	t.Helper()
	d, err := Open(Config{Dir: h.dir, World: h.world, Guest: guest})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (h *host) Spec(t testing.TB, session int, epoch uint64) driver.Spec {
	t.Helper()
	return driver.Spec{
		Session:    ids.DeriveSessionKey([]byte("k"), t.Name(), "t", fmt.Sprint(session), "default"),
		Generation: ids.Generation{Incarnation: 1, Index: 1}, Epoch: ids.Epoch{Incarnation: 1, Index: epoch},
		Tier: driver.Null, Limits: driver.Limits{CPUMillis: 1000, MemoryBytes: 64 << 20, PIDs: 64},
	}
}

func (h *host) Left(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(h.dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func (h *host) Crash(driver.Driver, driver.Tier, int, bool) bool { return false }

func TestConformance(t *testing.T) {
	drivertest.Run(t, &host{dir: t.TempDir(), world: &World{}})
}

func TestTheDefaultGuestReturnsWhatItReads(t *testing.T) {
	d, err := Open(Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	h := &host{}
	sb, err := d.Create(context.Background(), h.Spec(t, 1, 1))
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.OpenFile(sb.Channel.Stdin, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Open(sb.Channel.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.WriteString("hello"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(out, b); err != nil || !bytes.Equal(b, []byte("hello")) {
		t.Errorf("got %q, %v", b, err)
	}
	if err := d.Stop(context.Background(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if n, err := out.Read(b); err != io.EOF {
		t.Errorf("after the stop: %d bytes, %v", n, err)
	}
	_ = in.Close()
	_ = out.Close()
}

func BenchmarkCreateStop(b *testing.B) {
	d, err := Open(Config{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	h := &host{}
	for n := range b.N {
		sb, err := d.Create(context.Background(), h.Spec(b, n, 1))
		if err != nil {
			b.Fatal(err)
		}
		if err := d.Stop(context.Background(), sb.ID); err != nil {
			b.Fatal(err)
		}
	}
}
