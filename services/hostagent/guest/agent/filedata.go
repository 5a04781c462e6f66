package agent

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// fileRead streams a regular file: its info, its bytes, its end.
func (c *call) fileRead() (any, error) {
	var req wire.FileRead
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	var f *os.File
	p, err := c.perform(req.At, func(path string) (err error) {
		f, err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := regular(f, p.path)
	if err != nil {
		return nil, err
	}
	if err := c.out.sendJSON(c.att, wire.TypeResult, c.stream, info); err != nil {
		return nil, err
	}
	return nil, c.sendFile(f, req)
}

func (c *call) sendFile(f *os.File, req wire.FileRead) error {
	if req.Offset > 1<<62 || req.Length > 1<<62 {
		return wire.Failf(wire.KindInvalid, "offset or length out of range")
	}
	left := req.Length
	if left == 0 {
		left = 1 << 63
	}
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	sent := uint64(0)
	for left > 0 {
		room, err := c.credit(sent)
		if err != nil {
			return err
		}
		n, err := f.ReadAt((*buf)[:min(room, left, wire.MaxPayload)], int64(req.Offset+sent))
		if n > 0 {
			if err := c.send(wire.Frame{Type: wire.TypeData, Offset: sent, Payload: (*buf)[:n]}); err != nil {
				return err
			}
			sent += uint64(n)
			left -= uint64(n)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	return c.send(wire.Frame{Type: wire.TypeEnd, Offset: sent})
}

// regular refuses what is no regular file.
func regular(f *os.File, path string) (wire.FileInfo, error) {
	info, err := fstat(f, path)
	switch {
	case err != nil:
		return info, err
	case info.Type == "dir":
		return info, wire.Failf(wire.KindIsDir, "%s is a directory", path)
	case info.Type != "file":
		return info, wire.Failf(wire.KindNotRegular, "%s is a %s", path, info.Type)
	}
	return info, nil
}

func fstat(f *os.File, path string) (wire.FileInfo, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return wire.FileInfo{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	_, name, _ := split(path)
	return infoOf(name, &st), nil
}

// fileWrite takes a file from the host. Its result says that file and name are
// on the disk.
func (c *call) fileWrite() (any, error) {
	c.mu.Lock()
	in := c.in
	c.mu.Unlock()
	var req wire.FileWrite
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if req.Mode != nil && *req.Mode&^0o7777 != 0 {
		return nil, wire.Failf(wire.KindInvalid, "mode %o has more than permission bits", *req.Mode)
	}
	p, err := c.place(req.At)
	if err != nil {
		return nil, err
	}
	release, err := c.acquire()
	if err != nil {
		return nil, err
	}
	defer release()
	w := &fileWriter{call: c, in: in, req: &req, user: p.user}
	if err := p.user.as(func() error { return w.open(p.path) }); err != nil {
		return nil, err
	}
	defer w.discard()
	if err := w.receive(); err != nil {
		return nil, err
	}
	return w.commit()
}

// fileWriter is a write under way.
type fileWriter struct {
	call   *call
	in     *inbox
	req    *wire.FileWrite
	user   *account
	target string // with symlinks at its end resolved
	temp   string // empty if in place, or when renamed
	file   *os.File
	old    *wire.FileInfo // what is replaced
}

// open prepares the file to write to, as the user.
func (w *fileWriter) open(path string) error {
	target, err := follow(path)
	if err != nil {
		return err
	}
	dir, _, err := split(target)
	if err != nil {
		return err
	}
	w.target = target
	if w.req.Parents {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	old, err := statAt(unix.AT_FDCWD, target, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == nil && w.req.New:
		return &os.PathError{Op: "create", Path: target, Err: unix.EEXIST}
	case err == nil && old.Type == "dir":
		return &os.PathError{Op: "write", Path: target, Err: unix.EISDIR}
	case err == nil && old.Type != "file":
		return wire.Failf(wire.KindNotRegular, "%s is a %s", target, old.Type)
	case err == nil:
		w.old = &old
	case !errors.Is(err, unix.ENOENT):
		return err
	}
	if w.req.InPlace {
		w.file, err = os.OpenFile(target, os.O_WRONLY|os.O_CREATE|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0o644)
		return err
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails, see crypto/rand
	w.temp = dir + ".berth-" + hex.EncodeToString(random[:]) + ".tmp"
	w.file, err = os.OpenFile(w.temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	return err
}

// receive writes what the host sends, and acknowledges it piece by piece.
func (w *fileWriter) receive() error {
	taken := uint64(0)
	limit := uint64(wire.Window)
	for {
		p, err := w.in.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if w.req.Offset+taken > 1<<62 {
			return wire.Failf(wire.KindInvalid, "offset out of range")
		}
		if _, err := w.file.WriteAt(p, int64(w.req.Offset+taken)); err != nil {
			return err
		}
		taken += uint64(len(p))
		if now := w.in.limit(); now >= limit+wire.Window/4 {
			limit = now
			if err := w.call.sendAck(taken, limit); err != nil {
				return err
			}
		}
	}
}

// commit makes the file durable under its name.
func (w *fileWriter) commit() (any, error) {
	if err := w.attributes(); err != nil {
		return nil, err
	}
	if err := w.file.Sync(); err != nil {
		return nil, err
	}
	if err := w.call.ctx.Err(); err != nil {
		return nil, err
	}
	if w.temp != "" {
		if err := w.user.as(w.rename); err != nil {
			return nil, err
		}
		w.temp = ""
	}
	dir, _, err := split(w.target)
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		return nil, err
	}
	return fstat(w.file, w.target)
}

// attributes sets mode, and keeps the owner of a file that root replaces.
func (w *fileWriter) attributes() error {
	mode := uint32(0o644)
	if w.old != nil {
		mode = w.old.Mode
	}
	if w.req.Mode != nil {
		mode = *w.req.Mode
	}
	if w.old != nil && w.user.uid == 0 && w.temp != "" {
		if err := w.file.Chown(int(w.old.UID), int(w.old.GID)); err != nil {
			return err
		}
	}
	if w.req.InPlace && w.req.Mode == nil {
		return nil
	}
	return w.user.as(func() error {
		if err := unix.Fchmod(int(w.file.Fd()), mode); err != nil {
			return fmt.Errorf("mode of %s: %w", w.target, err)
		}
		return nil
	})
}

func (w *fileWriter) rename() error {
	if !w.req.New {
		return os.Rename(w.temp, w.target)
	}
	// link refuses an existing name, which rename cannot do everywhere.
	if err := os.Link(w.temp, w.target); err != nil {
		return err
	}
	return os.Remove(w.temp)
}

// discard closes the file and removes what was not finished.
func (w *fileWriter) discard() {
	_ = w.file.Close()
	if w.temp != "" {
		_ = w.user.as(func() error { return os.Remove(w.temp) })
	}
}
