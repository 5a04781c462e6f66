package hostend_test

import (
	"errors"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// fifos makes two FIFOs that nobody holds.
func fifos(t *testing.T) (in, out string) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"in", "out"} {
		if err := unix.Mkfifo(dir+"/"+name, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir + "/in", dir + "/out"
}

func TestFIFOsOpenBeforeTheGuest(t *testing.T) {
	in, out := fifos(t)
	ch, err := hostend.OpenFIFOs(in, out)
	if err != nil {
		t.Fatal(err)
	}
	defer ch.Close()
	if _, err := ch.Write([]byte("early")); err != nil {
		t.Fatal(err)
	}
	type result struct {
		text string
		err  error
	}
	got := make(chan result)
	go func() {
		for {
			buf := make([]byte, 100)
			n, err := ch.Read(buf)
			got <- result{string(buf[:n]), err}
			if err != nil {
				return
			}
		}
	}()
	w, err := os.OpenFile(out, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if r := <-got; r.text != "hello" || r.err != nil {
		t.Errorf("%+v", r)
	}
	w.Close()
	if r := <-got; !errors.Is(r.err, io.EOF) {
		t.Errorf("after the last writer: %+v", r)
	}
}

func TestCloseEndsAReadThatWaits(t *testing.T) {
	in, out := fifos(t)
	ch, err := hostend.OpenFIFOs(in, out)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() {
		_, err := ch.Read(make([]byte, 1))
		ended <- err
	}()
	ch.Close()
	if err := <-ended; !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

func TestOpenFIFOsRefusesOtherFiles(t *testing.T) {
	in, _ := fifos(t)
	file := t.TempDir() + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := t.TempDir() + "/link"
	if err := os.Symlink(in, link); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{file, link, file + "none"} {
		if ch, err := hostend.OpenFIFOs(in, bad); err == nil {
			ch.Close()
			t.Errorf("%s was opened", bad)
		}
	}
}
