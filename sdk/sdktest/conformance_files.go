package sdktest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// openForReading: a handle is good for the verbs that it was opened for, beside one of the same session that
// is good for more.
func (c *check) openForReading() {
	full := c.open(sdk.OpenOptions{})
	c.must(full.Files().MakeDir(c.ctx, c.Dir+"/verbs", 0o755))
	s := c.open(sdk.OpenOptions{Verbs: []sdk.Verb{sdk.VerbRead}})
	list, err := s.Files().List(c.ctx, c.Dir)
	c.must(err)
	if len(list) == 0 {
		c.Fatalf("reading shows nothing")
	}
	c.is(s.Run(c.ctx, sdk.Command("true")), sdk.ErrDenied)
	c.is(s.Files().MakeDir(c.ctx, c.Dir+"/verbs/more", 0o755), sdk.ErrDenied)
	c.is(s.Files().RemoveAll(c.ctx, c.Dir+"/verbs"), sdk.ErrDenied)
	_, err = full.Files().Stat(c.ctx, c.Dir+"/verbs")
	c.must(err)
	_, err = c.Client.Open(c.ctx, sdk.OpenOptions{User: c.User("ann"), Verbs: []sdk.Verb{"root"}})
	c.is(err, sdk.ErrInvalid)
}

func (c *check) files() {
	s := c.open(sdk.OpenOptions{})
	f, dir := s.Files(), c.Dir+"/conformance"
	n, err := f.Write(c.ctx, dir+"/a/b.txt", strings.NewReader("hello"), sdk.WriteOptions{Mode: 0o640, Parents: true})
	c.must(err)
	c.equal(n, int64(5))
	info, err := f.Stat(c.ctx, dir+"/a/b.txt")
	c.must(err)
	c.equal(info.Size, int64(5))
	c.equal(info.Kind, "file")
	c.equal(info.Mode.Perm().String(), "-rw-r-----")
	if time.Since(info.Modified).Abs() > time.Hour {
		c.Fatalf("it was modified at %s", info.Modified)
	}
	_, err = f.Write(c.ctx, dir+"/a/b.txt", strings.NewReader(""), sdk.WriteOptions{})
	c.must(err)
	b, err := f.ReadAll(c.ctx, dir+"/a/b.txt")
	c.must(err)
	c.equal(len(b), 0)
	_, err = f.Write(c.ctx, "below-home", strings.NewReader("x"), sdk.WriteOptions{})
	c.must(err)
	c.must(f.Remove(c.ctx, "below-home"))
	c.must(f.MakeDir(c.ctx, dir+"/d/e", 0o755))
	c.must(f.MakeDir(c.ctx, dir+"/d/e", 0o755))
	c.must(f.Move(c.ctx, dir+"/a/b.txt", dir+"/d/c.txt"))
	list, err := f.List(c.ctx, dir+"/d")
	c.must(err)
	if len(list) != 2 || list[0].Path != "c.txt" || list[1].Path != "e" || !list[1].IsDir() {
		c.Fatalf("the directory holds %+v", list)
	}
	if err := f.Remove(c.ctx, dir+"/d"); err == nil {
		c.Fatal("a directory that is not empty was removed")
	}
	c.must(f.Remove(c.ctx, dir+"/d/c.txt"))
	c.must(f.RemoveAll(c.ctx, dir))
	_, err = f.Stat(c.ctx, dir)
	c.is(err, sdk.ErrNotFound)
	_, err = f.ReadAll(c.ctx, dir+"/none")
	c.is(err, sdk.ErrNotFound)
	_, err = f.List(c.ctx, dir)
	c.is(err, sdk.ErrNotFound)
	c.is(f.Move(c.ctx, dir+"/none", dir+"/other"), sdk.ErrNotFound)
	_, err = f.Write(c.ctx, dir+"/no/parents", strings.NewReader("x"), sdk.WriteOptions{})
	c.is(err, sdk.ErrNotFound)
}

func (c *check) bigFiles() {
	s := c.open(sdk.OpenOptions{})
	f := s.Files()
	b, hash := noise(12<<20 + 3)
	stop := make(chan struct{})
	go func() {
		time.Sleep(100 * time.Millisecond)
		select {
		case <-stop:
		default:
			_ = c.Client.NATS().ForceReconnect() // a file is a Seeker: it starts again
		}
	}()
	n, err := f.Write(c.ctx, c.Dir+"/big", bytes.NewReader(b), sdk.WriteOptions{})
	close(stop)
	c.must(err)
	c.equal(n, int64(len(b)))
	r, err := f.Read(c.ctx, c.Dir+"/big", 0)
	c.must(err)
	h := sha256.New()
	_, err = io.CopyN(h, r, 1<<20)
	c.must(err)
	c.reconnect()
	_, err = io.Copy(h, r)
	c.must(err)
	c.must(r.Close())
	c.equal(fmt.Sprintf("%x", h.Sum(nil)), hash)
	r, err = f.Read(c.ctx, c.Dir+"/big", int64(len(b)-5))
	c.must(err)
	tail, err := io.ReadAll(r)
	c.must(err)
	c.must(r.Close())
	c.equal(string(tail), string(b[len(b)-5:]))
	for i := range 510 { // more than a page
		if i%100 == 0 {
			c.must(f.MakeDir(c.ctx, fmt.Sprintf("%s/many/%d", c.Dir, i), 0o755))
		}
		c.must(f.MakeDir(c.ctx, fmt.Sprintf("%s/many/x%04d", c.Dir, i), 0o755))
	}
	list, err := f.List(c.ctx, c.Dir+"/many")
	c.must(err)
	c.equal(len(list), 516)
}

func (c *check) watch() {
	s := c.open(sdk.OpenOptions{})
	f, dir := s.Files(), c.Dir+"/watched"
	c.must(f.MakeDir(c.ctx, dir, 0o755))
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	seq, err := f.Watch(ctx, dir, true)
	c.must(err)
	ch := make(chan sdk.Change, 64)
	go func() {
		for change, err := range seq {
			if err != nil {
				return
			}
			ch <- change
		}
	}()
	_, err = f.Write(c.ctx, dir+"/new", strings.NewReader("x"), sdk.WriteOptions{})
	c.must(err)
	for {
		select {
		case change := <-ch:
			if strings.HasSuffix(change.Path, "/new") || change.Path == "new" {
				return
			}
		case <-time.After(20 * time.Second):
			c.Fatal("no change came")
		}
	}
}
