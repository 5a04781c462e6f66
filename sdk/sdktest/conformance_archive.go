package sdktest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"

	"github.com/berth-dev/berth/sdk"
)

// archiveOf makes a tar archive of files, in pairs of name and content.
func (c *check) archiveOf(pairs ...string) []byte {
	c.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for i := 0; i < len(pairs); i += 2 {
		c.must(w.WriteHeader(&tar.Header{Name: pairs[i], Mode: 0o644, Size: int64(len(pairs[i+1]))}))
		_, err := w.Write([]byte(pairs[i+1]))
		c.must(err)
	}
	c.must(w.Close())
	return out.Bytes()
}

// contentOf returns a file of an archive.
func (c *check) contentOf(raw []byte, name string) string {
	c.Helper()
	for r := tar.NewReader(bytes.NewReader(raw)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			c.Fatalf("the archive does not hold %s", name)
		}
		c.must(err)
		if h.Name == name {
			b, err := io.ReadAll(r)
			c.must(err)
			return string(b)
		}
	}
}

func (c *check) exportImport() {
	s := c.open(sdk.OpenOptions{})
	f, dir := s.Files(), c.Dir+"/archives"
	big, _ := noise(3<<20 + 1) // more than the credit of a stream
	_, err := f.Write(c.ctx, dir+"/from/big", bytes.NewReader(big), sdk.WriteOptions{Parents: true})
	c.must(err)
	_, err = f.Write(c.ctx, dir+"/from/small", strings.NewReader("hello"), sdk.WriteOptions{})
	c.must(err)
	var raw bytes.Buffer
	out, err := s.Export(c.ctx, &raw)
	c.must(err)
	c.equal(out.Bytes, int64(raw.Len()))
	if out.Entries < 2 {
		c.Fatalf("%+v", out)
	}
	c.equal(c.contentOf(raw.Bytes(), strings.TrimPrefix(dir, "/")+"/from/small"), "hello")
	c.must(f.MakeDir(c.ctx, dir+"/to", 0o755))
	in, err := s.Import(c.ctx, bytes.NewReader(raw.Bytes()), dir+"/to")
	c.must(err)
	c.equal(in.Bytes, out.Bytes)
	back, err := f.ReadAll(c.ctx, dir+"/to"+dir+"/from/big")
	c.must(err)
	c.equal(bytes.Equal(back, big), true)
	in, err = s.Import(c.ctx, io.MultiReader(bytes.NewReader(c.archiveOf("new", "new", "from/.wh.small", "", "../up", "x"))), dir)
	c.must(err)
	c.equal(in.Skipped, int64(1))
	c.equal(in.Entries, int64(2))
	if len(in.SkippedNames) != 1 || !strings.HasPrefix(in.SkippedNames[0], "../up: ") {
		c.Fatalf("%+v", in)
	}
	_, err = f.Stat(c.ctx, dir+"/from/small")
	c.is(err, sdk.ErrNotFound)
	_, err = f.Stat(c.ctx, c.Dir+"/up")
	c.is(err, sdk.ErrNotFound)
	b, err := f.ReadAll(c.ctx, dir+"/new")
	c.must(err)
	c.equal(string(b), "new")
}

func (c *check) importBadInput() {
	s := c.open(sdk.OpenOptions{})
	good := c.archiveOf("a", strings.Repeat("x", 100_000))
	for name, bad := range map[string]struct {
		raw  []byte
		path string
		is   error
	}{
		"text":     {[]byte(strings.Repeat("no archive ", 1000)), "", sdk.ErrInvalid},
		"nothing":  {nil, "", sdk.ErrInvalid},
		"cut off":  {good[:50_000], c.Dir, sdk.ErrInvalid},
		"relative": {good, "somewhere", sdk.ErrInvalid},
		"nowhere":  {good, c.Dir + "/no/such", sdk.ErrNotFound},
	} {
		if _, err := s.Import(c.ctx, bytes.NewReader(bad.raw), bad.path); !errors.Is(err, bad.is) {
			c.Errorf("%s: %v", name, err)
		}
	}
	broken := errors.New("the disk of the frontend broke")
	if _, err := s.Export(c.ctx, writerFunc(func([]byte) (int, error) { return 0, broken })); !errors.Is(err, broken) {
		c.Errorf("a writer that fails: %v", err)
	}
	if _, err := s.Import(c.ctx, io.MultiReader(bytes.NewReader(good[:9000]), readerFunc(func([]byte) (int, error) { return 0, broken })), c.Dir); !errors.Is(err, broken) {
		c.Errorf("a reader that fails: %v", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
