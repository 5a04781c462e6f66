package box

import (
	"context"
	"errors"
	"io"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

func at(path, user string) hostend.Path { return hostend.Path{Name: path, User: user} }

// readFile answers with the file's description, then sends its bytes, then their number.
func (b *Box) readFile(ctx context.Context, c *call, p *boxv1.ReadFile) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, err := b.guest.ReadFile(ctx, at(p.GetPath(), p.GetUser()), p.GetOffset(), p.GetLength())
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	st, err := b.begin(ctx, c, 0, &boxv1.Result{File: fileInfo(p.GetPath(), r.Info())})
	if err != nil {
		return err
	}
	defer context.AfterFunc(st.ctx, cancel)()
	go st.onlyCancel()
	err = sendFile(st, r, p.GetOffset())
	b.end(st, err)
	return err
}

func sendFile(st *stream, r io.Reader, from uint64) error {
	buf := make([]byte, MaxChunk)
	offset := from
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := st.data(boxv1.Channel_CHANNEL_FILE, offset, buf[:n]); err != nil {
				return err
			}
			offset += uint64(n)
		}
		switch {
		case errors.Is(err, io.EOF):
			return st.finish(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: &boxv1.Result{Bytes: offset - from}}})
		case err != nil && st.ctx.Err() != nil:
			return context.Cause(st.ctx)
		case err != nil:
			return err
		}
	}
}

// onlyCancel takes the client's frames of a stream that has no input.
func (s *stream) onlyCancel() {
	for {
		f, err := s.next()
		switch {
		case err != nil:
			return
		case f.GetCancel() != nil:
			s.mute(errCancelled)
			return
		default:
			s.fail(errs.E("read frame", errkind.Invalid, "", "this stream takes no input"))
			return
		}
	}
}

// writeFile takes the bytes of a file and answers when they are synced on this host. The stream is
// open before the guest has agreed; what it says against it is the stream's failure.
func (b *Box) writeFile(ctx context.Context, c *call, p *boxv1.WriteFile) error {
	opts := hostend.WriteOptions{Parents: p.GetParents()}
	if m := p.GetMode(); m != 0 {
		m &= 0o7777
		opts.Mode = &m
	}
	st, err := b.begin(ctx, c, b.window(true), nil)
	if err != nil {
		return err
	}
	in := &upload{st: st}
	info, err := b.guest.WriteFile(st.ctx, at(p.GetPath(), p.GetUser()), in, opts)
	if cause := context.Cause(st.ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil {
		result := &boxv1.Result{File: fileInfo(p.GetPath(), info), Bytes: in.total}
		err = st.finish(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: result}})
	}
	b.end(st, err)
	return err
}

// upload reads the bytes of a file from the client's frames.
type upload struct {
	st    *stream
	total uint64
	rest  []byte
	ended bool
}

// Read implements io.Reader; io.EOF only after the client said that all bytes came.
func (u *upload) Read(p []byte) (int, error) {
	for len(u.rest) == 0 {
		if u.ended {
			return 0, io.EOF
		}
		if err := u.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, u.st.grant(n)
}

func (u *upload) fill() error {
	f, err := u.st.next()
	if err != nil {
		return err
	}
	switch body := f.GetBody().(type) {
	case *boxv1.Frame_Data:
		if body.Data.GetOffset() != u.total {
			return errs.Errorf("write file", errkind.Invalid, "a piece at %d, expected %d", body.Data.GetOffset(), u.total)
		}
		u.rest = body.Data.GetData()
		u.total += uint64(len(u.rest))
		return nil
	case *boxv1.Frame_CloseInput:
		if body.CloseInput.GetTotal() != u.total {
			return errs.Errorf("write file", errkind.Invalid, "it ends at %d, but %d bytes came", body.CloseInput.GetTotal(), u.total)
		}
		u.ended = true
		return nil
	case *boxv1.Frame_Cancel:
		u.st.mute(errCancelled)
		return errCancelled
	}
	return errs.E("write file", errkind.Invalid, "", "a file takes data only")
}

// watchFiles sends changes until the client cancels or the session sleeps.
func (b *Box) watchFiles(ctx context.Context, c *call, p *boxv1.Watch) error {
	w, err := b.guest.Watch(ctx, at(p.GetPath(), p.GetUser()), p.GetRecursive())
	if err != nil {
		return err
	}
	defer w.Close()
	st, err := b.begin(ctx, c, 0, nil)
	if err != nil {
		return err
	}
	go st.onlyCancel()
	for err == nil {
		var ev wire.WatchEvent
		if ev, err = w.Next(st.ctx); err == nil {
			change := &boxv1.WatchEvent{Path: valid(ev.Path), What: ev.Op}
			err = st.send(&boxv1.Frame{Body: &boxv1.Frame_WatchEvent{WatchEvent: change}}, false)
		}
	}
	if cause := context.Cause(st.ctx); cause != nil {
		err = cause
	}
	b.end(st, err)
	return err
}

// short runs an operation whose result fits into the answer.
func (b *Box) short(ctx context.Context, op *boxv1.Operation) (*boxv1.Result, error) {
	switch o := op.GetOp().(type) {
	case *boxv1.Operation_Stat:
		info, err := b.guest.Stat(ctx, at(o.Stat.GetPath(), o.Stat.GetUser()), o.Stat.GetFollow())
		if err != nil {
			return nil, err
		}
		return &boxv1.Result{File: fileInfo(o.Stat.GetPath(), info)}, nil
	case *boxv1.Operation_ListDir:
		return b.listDir(ctx, o.ListDir)
	case *boxv1.Operation_Move:
		m := o.Move
		return &boxv1.Result{}, b.guest.Move(ctx, at(m.GetFrom(), m.GetUser()), m.GetTo(), true)
	case *boxv1.Operation_Remove:
		return &boxv1.Result{}, b.guest.Remove(ctx, at(o.Remove.GetPath(), o.Remove.GetUser()), o.Remove.GetRecursive())
	case *boxv1.Operation_MakeDir:
		m := o.MakeDir
		return &boxv1.Result{}, b.guest.Mkdir(ctx, at(m.GetPath(), m.GetUser()), m.GetMode()&0o7777, m.GetParents())
	case *boxv1.Operation_ListExecs:
		all, err := b.guest.ListExecs(ctx)
		if err != nil {
			return nil, err
		}
		out := &boxv1.Result{}
		for _, e := range all {
			out.Execs = append(out.Execs, execInfo(e))
		}
		return out, nil
	case *boxv1.Operation_Info:
		return &boxv1.Result{PlaceJson: b.gate.Place()}, nil
	}
	return nil, errs.E(opOpen, errkind.Unimplemented, "", "this host does not know that operation")
}

// maxPage is the most entries of a directory in one answer.
const maxPage = 1000

func (b *Box) listDir(ctx context.Context, p *boxv1.ListDir) (*boxv1.Result, error) {
	limit := int(p.GetLimit())
	if limit <= 0 || limit > maxPage {
		limit = maxPage
	}
	files, more, err := b.guest.List(ctx, at(p.GetPath(), p.GetUser()), p.GetAfter(), limit)
	if err != nil {
		return nil, err
	}
	out := &boxv1.Result{}
	for _, f := range files[:min(len(files), limit)] {
		out.Entries = append(out.Entries, fileInfo(valid(f.Name), f))
	}
	if n := len(out.Entries); n > 0 && (more || n < len(files)) {
		out.Next = out.Entries[n-1].GetPath()
	}
	return out, nil
}

func fileInfo(path string, f wire.FileInfo) *boxv1.FileInfo {
	kind := f.Type
	if kind != "file" && kind != "dir" && kind != "symlink" {
		kind = "other"
	}
	return &boxv1.FileInfo{
		Path: path, Size: uint64(max(f.Size, 0)), Mode: f.Mode, Modified: timestamppb.New(f.ModTime),
		Kind: kind, Target: valid(f.Target), Uid: f.UID, Gid: f.GID,
	}
}
