package hostend

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// FileInfo describes a file of the guest; all of it is the guest's claim.
type FileInfo = wire.FileInfo

// Path says where and as whom a file operation runs.
type Path struct {
	// Name is absolute, or below Cwd. Symlinks are followed as the kernel does.
	Name string
	// Cwd is absolute or below the user's home, which is also the default.
	Cwd string
	// User's permissions apply; the sandbox's default user if empty.
	User string
}

func (p Path) at() wire.At {
	return wire.At{Path: wire.Text(p.Name), Cwd: wire.Text(p.Cwd), User: wire.Text(p.User)}
}

// FileReader is the content of a file. Closing it early stops the guest.
type FileReader struct {
	conn *Conn
	id   uint32
	info FileInfo
	ctx  context.Context

	mu     sync.Mutex
	wake   chan struct{}
	answer *answer
	parts  [][]byte
	pos    uint64 // end of what came
	taken  uint64
	acked  uint64
	err    error
	last   []byte // what came with the end
}

// ReadFile opens a regular file and streams length bytes from offset on, to the
// end if length is 0. The guest is at most 1 MiB ahead of the reader. ctx is for
// the whole reading. Errors, here or from Read: ErrNotFound, ErrPermission,
// ErrIsDir, ErrNotRegular, ErrInvalid, ErrChannelLost. Read returns io.EOF only
// when the guest said that all bytes were sent.
func (c *Conn) ReadFile(ctx context.Context, path Path, offset, length uint64) (*FileReader, error) {
	op := "read file " + path.Name
	r := &FileReader{conn: c, ctx: ctx, wake: make(chan struct{}, 1), answer: newAnswer(op)}
	id, err := c.open(ctx, wire.MethodRead, wire.FileRead{At: path.at(), Offset: offset, Length: length}, r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	r.id = id
	if err := r.answer.wait(ctx, &r.info); err != nil {
		c.cancel(id)
		return nil, err
	}
	return r, nil
}

// Info describes the file as it was when it was opened.
func (r *FileReader) Info() FileInfo { return r.info }

// Read implements io.Reader.
func (r *FileReader) Read(p []byte) (int, error) {
	for {
		r.mu.Lock()
		if len(r.parts) > 0 {
			n := copy(p, r.parts[0])
			if r.parts[0] = r.parts[0][n:]; len(r.parts[0]) == 0 {
				r.parts = r.parts[1:]
			}
			r.taken += uint64(n)
			upTo, news := r.taken, r.taken-r.acked >= wire.Window/4 && r.err == nil
			if news {
				r.acked = upTo
			}
			r.mu.Unlock()
			if news {
				// A lost channel shows in the next Read.
				_ = r.conn.send(r.ctx, wire.Frame{Type: wire.TypeAck, Stream: r.id, Offset: upTo})
			}
			return n, nil
		}
		err := r.err
		r.mu.Unlock()
		if err != nil {
			return 0, err
		}
		select {
		case <-r.wake:
		case <-r.ctx.Done():
			return 0, fmt.Errorf("%s: %w", r.answer.op, r.ctx.Err())
		}
	}
}

// Close ends the reading.
func (r *FileReader) Close() error {
	r.mu.Lock()
	over := r.err != nil
	r.parts = nil
	r.mu.Unlock()
	if !over {
		r.conn.cancel(r.id)
		r.end(errors.New(r.answer.op + ": closed"))
	}
	return nil
}

func (r *FileReader) end(err error) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
	}
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *FileReader) lost(err error) {
	r.answer.fail(err)
	r.end(fmt.Errorf("%s: %w", r.answer.op, err))
}

// frame implements receiver.
func (r *FileReader) frame(f wire.Frame) error {
	if !r.answer.settled() {
		_, err := r.answer.frame(f)
		return err
	}
	switch f.Type {
	case wire.TypeData:
		r.mu.Lock()
		end := r.pos + uint64(len(f.Payload))
		if f.Offset != r.pos || end > r.acked+wire.Window {
			r.mu.Unlock()
			return fmt.Errorf("%s: %w: bytes at %d, expected %d", r.answer.op, ErrProtocol, f.Offset, r.pos)
		}
		if r.err == nil && len(f.Payload) > 0 {
			r.pos = end
			r.parts = appendPart(r.parts, f.Payload)
		}
		r.mu.Unlock()
		r.end(nil)
	case wire.TypeEnd:
		r.conn.forget(f.Stream)
		err := io.EOF
		r.mu.Lock()
		r.last = append([]byte(nil), f.Payload...)
		r.mu.Unlock()
		if f.Offset != r.pos {
			err = fmt.Errorf("%s: %w: end at %d, %d bytes came", r.answer.op, ErrProtocol, f.Offset, r.pos)
		}
		r.end(err)
	case wire.TypeError:
		r.conn.forget(f.Stream)
		r.end(guestError(r.answer.op, f.Payload))
	}
	return nil
}

// appendPart copies p to the parts, joining it with a small last one, so that a
// guest that sends single bytes costs no more memory than its window.
func appendPart(parts [][]byte, p []byte) [][]byte {
	if last := len(parts) - 1; last >= 0 && len(parts[last]) < 4096 {
		parts[last] = append(parts[last], p...)
		return parts
	}
	return append(parts, append([]byte(nil), p...))
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	Mode    *uint32 // permission bits; nil keeps those of the old file, or 0644
	Parents bool    // make missing directories
	New     bool    // ErrExists if there is a file
	// InPlace overwrites bytes from Offset on instead of replacing the file. It is
	// not atomic, but can be repeated.
	InPlace bool
	Offset  uint64
}

// WriteFile writes all of content to a file. Without InPlace readers see the old
// file or the new one and nothing between; an error leaves the old one. It
// returns when file and directory are synced to the sandbox's disk. ErrNoSpace,
// ErrPermission, ErrIsDir, ErrNotRegular, ErrExists, ErrReadOnly, ErrChannelLost
// (then the file is either old or new: write again). An error of content is
// returned as it is.
func (c *Conn) WriteFile(ctx context.Context, path Path, content io.Reader, opts WriteOptions) (FileInfo, error) {
	op := "write file " + path.Name
	w := &fileWrite{unary: unary{conn: c, answer: newAnswer(op)}, limit: wire.Window, wake: make(chan struct{}, 1)}
	var info FileInfo
	id, err := c.open(ctx, wire.MethodWrite, wire.FileWrite{
		At: path.at(), Mode: opts.Mode, Parents: opts.Parents, New: opts.New, InPlace: opts.InPlace, Offset: opts.Offset,
	}, w)
	if err != nil {
		return info, fmt.Errorf("%s: %w", op, err)
	}
	if err := w.send(ctx, id, content); err != nil {
		c.cancel(id)
		return info, fmt.Errorf("%s: %w", op, err)
	}
	err = w.answer.wait(ctx, &info)
	if ctx.Err() != nil {
		c.cancel(id)
	}
	return info, err
}

// fileWrite is a write under way.
type fileWrite struct {
	unary
	mu    sync.Mutex
	limit uint64
	wake  chan struct{}
}

// send sends the content as the window allows, until the guest has answered.
func (w *fileWrite) send(ctx context.Context, id uint32, content io.Reader) error {
	buf := make([]byte, wire.MaxPayload)
	sent := uint64(0)
	for {
		n, err := io.ReadFull(content, buf)
		for part := buf[:n]; len(part) > 0; {
			room, answered, err := w.room(ctx, sent)
			if err != nil || answered {
				return err
			}
			m := min(uint64(len(part)), room)
			if err := w.conn.send(ctx, wire.Frame{Type: wire.TypeData, Stream: id, Offset: sent, Payload: part[:m]}); err != nil {
				return err
			}
			sent += m
			part = part[m:]
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return w.conn.send(ctx, wire.Frame{Type: wire.TypeEnd, Stream: id, Offset: sent})
		}
		if err != nil {
			return fmt.Errorf("content: %w", err)
		}
	}
}

// room waits until the guest takes more, or has answered.
func (w *fileWrite) room(ctx context.Context, sent uint64) (room uint64, answered bool, err error) {
	for {
		w.mu.Lock()
		room := w.limit - min(w.limit, sent)
		w.mu.Unlock()
		select {
		case <-w.answer.done:
			return 0, true, nil
		default:
		}
		if room > 0 {
			return room, false, nil
		}
		select {
		case <-w.wake:
		case <-w.answer.done:
		case <-ctx.Done():
			return 0, false, ctx.Err()
		}
	}
}

// frame implements receiver.
func (w *fileWrite) frame(f wire.Frame) error {
	if f.Type != wire.TypeAck {
		return w.unary.frame(f)
	}
	if len(f.Payload) != 8 {
		return fmt.Errorf("%w: malformed acknowledgement", ErrProtocol)
	}
	w.mu.Lock()
	w.limit = max(w.limit, binary.BigEndian.Uint64(f.Payload))
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
	return nil
}
