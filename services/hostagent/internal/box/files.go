package box

import (
	"context"
	"errors"
	"io"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

func at(path, user string) wire.At { return wire.At{Path: wire.Text(path), User: wire.Text(user)} }

// readFile answers with the file's description, then sends its bytes, then their number.
func (b *Box) readFile(ctx context.Context, c *call, p *boxv1.ReadFile) error {
	r, err := b.guest.Read(ctx, wire.FileRead{At: at(p.GetPath(), p.GetUser()), Offset: p.GetOffset(), Length: p.GetLength()})
	if err != nil {
		return err
	}
	defer r.Close()
	st, err := b.begin(ctx, c, 0, &boxv1.Result{File: fileInfo(p.GetPath(), r.Info())})
	if err != nil {
		return err
	}
	go st.onlyCancel()
	err = b.sendFile(st, r, p.GetOffset())
	b.end(st, err)
	return err
}

func (b *Box) sendFile(st *stream, r Reader, from uint64) error {
	offset := from
	for {
		data, err := r.Next(st.ctx)
		if errors.Is(err, io.EOF) {
			return st.finish(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: &boxv1.Result{Bytes: offset - from}}})
		}
		if cause := context.Cause(st.ctx); err != nil && cause != nil {
			return cause
		}
		if err != nil {
			return err
		}
		if err := st.data(boxv1.Channel_CHANNEL_FILE, offset, data); err != nil {
			return err
		}
		offset += uint64(len(data))
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

// writeFile takes the bytes of a file and answers when they are synced on this host.
func (b *Box) writeFile(ctx context.Context, c *call, p *boxv1.WriteFile) error {
	req := wire.FileWrite{At: at(p.GetPath(), p.GetUser()), Parents: p.GetParents()}
	if m := p.GetMode(); m != 0 {
		m &= 0o7777
		req.Mode = &m
	}
	w, err := b.guest.Write(ctx, req)
	if err != nil {
		return err
	}
	defer w.Close()
	st, err := b.begin(ctx, c, MaxCredit, nil)
	if err != nil {
		return err
	}
	err = b.takeFile(st, w, p.GetPath())
	b.end(st, err)
	return err
}

func (b *Box) takeFile(st *stream, w Writer, path string) error {
	var total uint64
	for {
		f, err := st.next()
		if err != nil {
			return err
		}
		switch body := f.GetBody().(type) {
		case *boxv1.Frame_Data:
			if d := body.Data; d.GetOffset() != total {
				return errs.Errorf("write file", errkind.Invalid, "a piece at %d, expected %d", d.GetOffset(), total)
			}
			n := len(body.Data.GetData())
			if err := w.Put(st.ctx, total, body.Data.GetData()); err != nil {
				return err
			}
			total += uint64(n)
			if err := st.grant(n); err != nil {
				return err
			}
		case *boxv1.Frame_CloseInput:
			if body.CloseInput.GetTotal() != total {
				return errs.Errorf("write file", errkind.Invalid, "it ends at %d, but %d bytes came", body.CloseInput.GetTotal(), total)
			}
			return b.endFile(st, w, path, total)
		case *boxv1.Frame_Cancel:
			return errCancelled
		default:
			return errs.E("write file", errkind.Invalid, "", "a file takes data only")
		}
	}
}

func (b *Box) endFile(st *stream, w Writer, path string, total uint64) error {
	if err := w.End(st.ctx, total); err != nil {
		return err
	}
	info, err := w.Done(st.ctx)
	if err != nil {
		return err
	}
	result := &boxv1.Result{File: fileInfo(path, info), Bytes: total}
	return st.finish(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: result}})
}

// watchFiles sends changes until the client cancels or the session sleeps.
func (b *Box) watchFiles(ctx context.Context, c *call, p *boxv1.Watch) error {
	w, err := b.guest.Watch(ctx, wire.FileWatch{At: at(p.GetPath(), p.GetUser()), Recursive: p.GetRecursive()})
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
		var info wire.FileInfo
		err := b.guest.Do(ctx, wire.MethodStat, wire.FileStat{At: at(o.Stat.GetPath(), o.Stat.GetUser()), Follow: o.Stat.GetFollow()}, &info)
		if err != nil {
			return nil, err
		}
		return &boxv1.Result{File: fileInfo(o.Stat.GetPath(), info)}, nil
	case *boxv1.Operation_ListDir:
		return b.listDir(ctx, o.ListDir)
	case *boxv1.Operation_Move:
		p := wire.FileMove{At: at(o.Move.GetFrom(), o.Move.GetUser()), To: wire.Text(o.Move.GetTo()), Replace: true}
		return &boxv1.Result{}, b.guest.Do(ctx, wire.MethodMove, p, nil)
	case *boxv1.Operation_Remove:
		p := wire.FileRemove{At: at(o.Remove.GetPath(), o.Remove.GetUser()), Recursive: o.Remove.GetRecursive()}
		return &boxv1.Result{}, b.guest.Do(ctx, wire.MethodRemove, p, nil)
	case *boxv1.Operation_MakeDir:
		p := wire.FileMkdir{At: at(o.MakeDir.GetPath(), o.MakeDir.GetUser()), Mode: o.MakeDir.GetMode() & 0o7777, Parents: o.MakeDir.GetParents()}
		return &boxv1.Result{}, b.guest.Do(ctx, wire.MethodMkdir, p, nil)
	case *boxv1.Operation_Checkpoint:
		m, err := b.gate.Checkpoint(ctx)
		return &boxv1.Result{Manifest: m}, err
	case *boxv1.Operation_ListExecs:
		all, err := listExecs(ctx, b.guest)
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
	var page wire.FilePage
	err := b.guest.Do(ctx, wire.MethodList, wire.FileList{At: at(p.GetPath(), p.GetUser()), After: wire.Text(p.GetAfter()), Limit: limit}, &page)
	if err != nil {
		return nil, err
	}
	out := &boxv1.Result{}
	for _, f := range page.Files[:min(len(page.Files), limit)] {
		out.Entries = append(out.Entries, fileInfo(valid(f.Name), f))
	}
	if n := len(page.Files); page.More && n > 0 {
		out.Next = valid(page.Files[n-1].Name)
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
