package sdk_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

// TestAnExportThatIsCutIsNoExport: a lost frame is an error, never a shorter archive.
func TestAnExportThatIsCutIsNoExport(t *testing.T) {
	srv := sdktest.Start(t)
	s, err := srv.Client(t, "acme").Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann"))})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Detach()
	if _, err := s.Files().Write(t.Context(), "/work/f", bytes.NewReader(make([]byte, 3<<20)), sdk.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	w := &dropping{srv: srv}
	if _, err := s.Export(t.Context(), w); err == nil {
		t.Errorf("%d bytes of an archive that lost a frame were taken for whole", w.n)
	}
	w = &dropping{}
	if out, err := s.Export(t.Context(), w); err != nil || out.Bytes != w.n || out.Bytes < 3<<20 {
		t.Errorf("%+v, %d, %v", out, w.n, err)
	}
}

// dropping loses a frame once the first bytes came.
type dropping struct {
	srv *sdktest.Server
	n   int64
}

func (d *dropping) Write(p []byte) (int, error) {
	if d.n == 0 && d.srv != nil {
		d.srv.DropFrames(1)
	}
	d.n += int64(len(p))
	return len(p), nil
}

// TestAnImportBeginsAgain: what can be read again is sent again after a lost frame; a pipe is not.
func TestAnImportBeginsAgain(t *testing.T) {
	srv := sdktest.Start(t)
	s, err := srv.Client(t, "acme").Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann"))})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Detach()
	ctx := context.Background()
	if _, err := s.Files().Write(ctx, "/work/f", bytes.NewReader(bytes.Repeat([]byte("x"), 3<<20)), sdk.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	var raw bytes.Buffer
	if _, err := s.Export(ctx, &raw); err != nil {
		t.Fatal(err)
	}
	for name, again := range map[string]bool{"seeker": true, "pipe": false} {
		srv.DropFrames(0)
		src := &dropper{Reader: bytes.NewReader(raw.Bytes()), srv: srv}
		var err error
		if again {
			_, err = s.Import(ctx, struct {
				*dropper
			}{src}, "/root")
		} else {
			_, err = s.Import(ctx, onlyRead{src}, "/root")
		}
		if (err == nil) != again {
			t.Errorf("%s: %v", name, err)
		}
	}
}

type onlyRead struct{ r *dropper }

func (o onlyRead) Read(p []byte) (int, error) { return o.r.Read(p) }

// dropper loses a frame of the host while the first half is read for the first time.
type dropper struct {
	*bytes.Reader
	srv  *sdktest.Server
	done bool
}

func (d *dropper) Read(p []byte) (int, error) {
	if !d.done && d.Len() < int(d.Size())/2 {
		d.done = true
		d.srv.DropFrames(1)
	}
	return d.Reader.Read(p)
}

func TestHostCallsAreTheOperators(t *testing.T) {
	srv := sdktest.Start(t)
	c := srv.Client(t, "acme")
	for _, err := range []error{
		c.CallHost(t.Context(), "h1", "no-such", nil, nil), c.CallHost(t.Context(), "NOT A HOST", "snapshots", nil, nil),
	} {
		if !errors.Is(err, sdk.ErrInvalid) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v", err)
		}
	}
}
