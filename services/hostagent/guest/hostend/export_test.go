package hostend_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

func upperOf(t *testing.T, files map[string]string) *os.File {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestAMachineExportsItsOwnFiles(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 300_000) // more than the window
	_, c := attachInProcess(t, agent.Options{Upper: upperOf(t, map[string]string{"home/a": "hello", "home/big": big, "run/x": "not this"})})
	var b bytes.Buffer
	n, said, err := c.Export(testContext(t), &b, 1<<30)
	if err != nil || n != uint64(b.Len()) || said.Entries != 3 || said.Skipped != 0 {
		t.Fatalf("%d bytes of %d, %+v, %v", n, b.Len(), said, err)
	}
	got := map[string]string{}
	for r := tar.NewReader(&b); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		got[h.Name] = string(text)
	}
	if len(got) != 3 || got["home/a"] != "hello" || got["home/big"] != big {
		t.Errorf("got %d entries", len(got))
	}
	if u, err := c.Usage(testContext(t)); err != nil || u.Size == 0 || u.Used+u.Free > u.Size {
		t.Errorf("usage %+v, %v", u, err)
	}
}

// What a guest sends is bounded, and where it is not asked for it sends nothing.
func TestAnExportThatIsTooLongEnds(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{Upper: upperOf(t, map[string]string{"f": strings.Repeat("x", 4<<20)})})
	var b bytes.Buffer
	if _, _, err := c.Export(testContext(t), &b, 1<<20); !errors.Is(err, hostend.ErrInvalid) || b.Len() > 1<<20+1 {
		t.Errorf("%d bytes, %v", b.Len(), err)
	}
	if _, _, err := c.Export(testContext(t), io.Discard, 1<<30); err != nil {
		t.Errorf("the next one: %v", err)
	}
	broken := errors.New("the client is gone")
	if _, _, err := c.Export(testContext(t), goneClient{broken}, 1<<30); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	_, none := attachInProcess(t, agent.Options{})
	if _, _, err := none.Export(testContext(t), io.Discard, 1<<30); !errors.Is(err, hostend.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}

type goneClient struct{ err error }

func (f goneClient) Write([]byte) (int, error) { return 0, f.err }
