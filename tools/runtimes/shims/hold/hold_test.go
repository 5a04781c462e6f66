package hold

import (
	"bufio"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func fifo(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func open(t *testing.T, path string, flag int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flag|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestInputSurvivesItsWriter(t *testing.T) {
	var h Holder
	in := fifo(t, "in")
	if err := h.Open("a", in, "", ""); err != nil {
		t.Fatal(err)
	}
	r := open(t, in, syscall.O_RDONLY)
	lines := bufio.NewReader(r)
	for _, word := range []string{"one\n", "two\n"} {
		w := open(t, in, syscall.O_WRONLY)
		if _, err := w.WriteString(word); err != nil {
			t.Fatal(err)
		}
		w.Close()
		r.SetReadDeadline(time.Now().Add(5 * time.Second))
		got, err := lines.ReadString('\n')
		if err != nil || got != word {
			t.Fatalf("read %q, %v; want %q", got, err, word)
		}
	}
	h.CloseInput("a")
	if _, err := lines.ReadByte(); err != io.EOF {
		t.Fatalf("after CloseInput: %v; want EOF", err)
	}
}

// A host process that waits for its peer in open(2) must not take Open for it.
func TestOpenIsNoPeer(t *testing.T) {
	var h Holder
	out := fifo(t, "out")
	opened := make(chan *os.File)
	go func() {
		f, err := os.OpenFile(out, syscall.O_RDONLY, 0) // waits for a writer
		if err != nil {
			t.Error(err)
		}
		opened <- f
	}()
	for range 100 {
		if err := h.Open("a", "", out, ""); err != nil {
			t.Fatal(err)
		}
		h.Release("a")
	}
	if err := h.Open("a", "", out, ""); err != nil {
		t.Fatal(err)
	}
	defer h.Release("a")
	w := open(t, out, syscall.O_WRONLY)
	if _, err := w.WriteString("kept"); err != nil {
		t.Fatal(err)
	}
	r := <-opened
	defer r.Close()
	w.Close()
	if got, err := io.ReadAll(r); err != nil || string(got) != "kept" {
		t.Fatalf("the waiting reader got %q, %v", got, err)
	}
}

// What is written to the input before the container reads is not lost.
func TestInputWaitsForTheContainer(t *testing.T) {
	var h Holder
	in := fifo(t, "in")
	if err := h.Open("a", in, "", ""); err != nil {
		t.Fatal(err)
	}
	defer h.Release("a")
	w := open(t, in, syscall.O_WRONLY) // would be ENXIO with no reader
	if _, err := w.WriteString("early\n"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	line, err := bufio.NewReader(open(t, in, syscall.O_RDONLY)).ReadString('\n')
	if err != nil || line != "early\n" {
		t.Fatalf("read %q, %v", line, err)
	}
}

func TestOutputSurvivesItsReader(t *testing.T) {
	var h Holder
	out := fifo(t, "out")
	if err := h.Open("a", "", out, out); err != nil {
		t.Fatal(err)
	}
	w := open(t, out, syscall.O_WRONLY) // would be ENXIO with no reader
	if _, err := w.WriteString("kept\n"); err != nil {
		t.Fatal(err)
	}
	r := open(t, out, syscall.O_RDONLY)
	w.Close()
	got, err := io.ReadAll(r)
	if err != nil || string(got) != "kept\n" {
		t.Fatalf("read %q, %v; want what was written, then EOF while still held", got, err)
	}
	h.Release("a")
}

func TestLeavesOtherStreamsAlone(t *testing.T) {
	var h Holder
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := h.Open("a", "", "file://"+plain, plain); err != nil {
		t.Fatal(err)
	}
	h.CloseInput("a")
	h.Release("a")
	h.Release("a")
	h.CloseInput("unknown")
}

func TestReleaseClosesEverything(t *testing.T) {
	var h Holder
	in, out := fifo(t, "in"), fifo(t, "out")
	if err := h.Open("a", in, out, ""); err != nil {
		t.Fatal(err)
	}
	if err := h.Open("a", in, out, ""); err != nil {
		t.Fatalf("second Open: %v", err)
	}
	h.Release("a")
	if _, err := os.OpenFile(out, syscall.O_WRONLY|syscall.O_NONBLOCK, 0); !errors.Is(err, syscall.ENXIO) {
		t.Fatalf("open output after Release: %v; want ENXIO (no reader)", err)
	}
	r := open(t, in, syscall.O_RDONLY)
	if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Fatalf("read input after Release: %d, %v; want EOF", n, err)
	}
}
