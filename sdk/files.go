package sdk

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// Files works on the files of a session. A path that is not absolute is below
// the user's home. Errors: ErrNotFound, ErrExists, ErrDenied, ErrInvalid, ErrQuota
// (the disk is full), ErrStaleEpoch (the session slept: Reopen).
type Files struct {
	s    *Session
	user string
}

// Files works as the image's default user.
func (s *Session) Files() *Files { return &Files{s: s} }

// As works as another user: a name, uid or uid:gid.
func (f *Files) As(user string) *Files { return &Files{s: f.s, user: user} }

// FileInfo is one file.
type FileInfo struct {
	Path     string // as asked for by Stat; a bare name in List
	Size     int64
	Mode     fs.FileMode // permission, setuid, setgid and sticky bits
	Modified time.Time
	Kind     string // file, dir, symlink or other
	Target   string // of a symlink
	UID, GID uint32
}

// IsDir reports whether it is a directory.
func (i FileInfo) IsDir() bool { return i.Kind == "dir" }

func infoOf(f *boxv1.FileInfo) FileInfo {
	return FileInfo{Path: f.GetPath(), Size: int64(f.GetSize()), Mode: modeOf(f.GetMode()), Modified: f.GetModified().AsTime(),
		Kind: f.GetKind(), Target: f.GetTarget(), UID: f.GetUid(), GID: f.GetGid()}
}

// modeOf reads permission bits as Unix numbers them.
func modeOf(m uint32) fs.FileMode {
	out := fs.FileMode(m & 0o777)
	for bit, flag := range unixBits {
		if m&bit != 0 {
			out |= flag
		}
	}
	return out
}

func unixMode(m fs.FileMode) uint32 {
	out := uint32(m.Perm())
	for bit, flag := range unixBits {
		if m&flag != 0 {
			out |= bit
		}
	}
	return out
}

var unixBits = map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky}

// Stat describes a path; a symlink itself, not its target.
func (f *Files) Stat(ctx context.Context, path string) (FileInfo, error) {
	return f.stat(ctx, path, false)
}

// StatTarget describes what a path leads to.
func (f *Files) StatTarget(ctx context.Context, path string) (FileInfo, error) {
	return f.stat(ctx, path, true)
}

func (f *Files) stat(ctx context.Context, path string, follow bool) (FileInfo, error) {
	op := &boxv1.Operation{Op: &boxv1.Operation_Stat{Stat: &boxv1.Stat{Path: path, Follow: follow, User: f.user}}}
	r, err := f.s.short(ctx, "stat "+path, op, true)
	if err != nil {
		return FileInfo{}, err
	}
	return infoOf(r.GetFile()), nil
}

// listPage is how many entries are asked for at a time.
const listPage = 500

// List returns the entries of a directory in order of their names. A name
// that appears or goes meanwhile may or may not be there.
func (f *Files) List(ctx context.Context, path string) ([]FileInfo, error) {
	var out []FileInfo
	for after := ""; ; {
		op := &boxv1.Operation{Op: &boxv1.Operation_ListDir{ListDir: &boxv1.ListDir{Path: path, After: after, Limit: listPage, User: f.user}}}
		r, err := f.s.short(ctx, "list "+path, op, true)
		if err != nil {
			return nil, err
		}
		for _, e := range r.GetEntries() {
			out = append(out, infoOf(e))
		}
		if after = r.GetNext(); after == "" {
			return out, nil
		}
	}
}

// Move renames; a file at to is replaced. After ErrDeadline whether it took
// effect is unknown.
func (f *Files) Move(ctx context.Context, from, to string) error {
	op := &boxv1.Operation{Op: &boxv1.Operation_Move{Move: &boxv1.Move{From: from, To: to, User: f.user}}}
	_, err := f.s.short(ctx, "move "+from, op, false)
	return err
}

// Remove deletes a file or an empty directory.
func (f *Files) Remove(ctx context.Context, path string) error { return f.remove(ctx, path, false) }

// RemoveAll deletes a path and all below it.
func (f *Files) RemoveAll(ctx context.Context, path string) error { return f.remove(ctx, path, true) }

func (f *Files) remove(ctx context.Context, path string, all bool) error {
	op := &boxv1.Operation{Op: &boxv1.Operation_Remove{Remove: &boxv1.Remove{Path: path, Recursive: all, User: f.user}}}
	_, err := f.s.short(ctx, "remove "+path, op, false)
	return err
}

// MakeDir makes a directory with its missing parents. One that is there
// already is no error.
func (f *Files) MakeDir(ctx context.Context, path string, mode fs.FileMode) error {
	op := &boxv1.Operation{Op: &boxv1.Operation_MakeDir{MakeDir: &boxv1.MakeDir{Path: path, Parents: true, Mode: unixMode(mode), User: f.user}}}
	_, err := f.s.short(ctx, "make directory "+path, op, true)
	return err
}

// Read opens a file for reading from offset to its end. The reader goes on
// after a dropped connection, unless the file changed meanwhile (ErrConflict
// kind). It must be closed and used from one goroutine.
func (f *Files) Read(ctx context.Context, path string, offset int64) (io.ReadCloser, error) {
	if offset < 0 {
		return nil, invalid("read "+path, "the offset is negative")
	}
	r := &fileReader{f: f, ctx: ctx, path: path, at: uint64(offset)}
	if err := r.open(); err != nil {
		return nil, err
	}
	return r, nil
}

// ReadAll returns the whole content of a file.
func (f *Files) ReadAll(ctx context.Context, path string) ([]byte, error) {
	r, err := f.Read(ctx, path, 0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

type fileReader struct {
	f     *Files
	ctx   context.Context
	path  string
	at    uint64
	st    *stream
	rest  []byte // of the piece that came last
	file  FileInfo
	known bool
	tries int
	err   error
}

// open starts a stream at the offset that was reached.
func (r *fileReader) open() error {
	op := &boxv1.Operation{Op: &boxv1.Operation_ReadFile{ReadFile: &boxv1.ReadFile{Path: r.path, Offset: r.at, User: r.f.user}}}
	st, res, err := r.f.s.open(r.ctx, "read "+r.path, op, true)
	if err != nil {
		return err
	}
	if st == nil {
		return &Error{Op: "read " + r.path, Kind: errkind.Internal, Reason: "the host opened no stream"}
	}
	r.st = st
	if res.GetFile() == nil {
		return nil
	}
	now := infoOf(res.GetFile())
	if r.known && (now.Size != r.file.Size || !now.Modified.Equal(r.file.Modified)) {
		return &Error{Op: "read " + r.path, Kind: errkind.Conflict, Reason: "the file changed while the connection was down"}
	}
	r.file, r.known = now, true
	return nil
}

func (r *fileReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		r.err = r.fill()
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// fill takes the next frame; io.EOF after the last one.
func (r *fileReader) fill() error {
	f, err := r.st.recv(r.ctx)
	if isLost(err) && r.tries < 8 {
		r.st.close(&boxv1.Cancel{})
		r.tries++
		if err := pause(r.ctx, r.tries); err != nil {
			return wrap("read "+r.path, err)
		}
		return r.open()
	}
	if err != nil {
		return wrap("read "+r.path, err)
	}
	switch b := f.GetBody().(type) {
	case *boxv1.Frame_Data:
		if b.Data.GetOffset() != r.at {
			return &Error{Op: "read " + r.path, Kind: errkind.DataLoss, Reason: "the host skipped a part of the file"}
		}
		r.rest = b.Data.GetData()
		r.at += uint64(len(r.rest))
		r.tries = 0
		r.st.took(len(r.rest))
	case *boxv1.Frame_Result:
		r.st.close(nil)
		return io.EOF
	}
	return nil
}

// Close ends the transfer.
func (r *fileReader) Close() error {
	if r.err == nil {
		r.err = fs.ErrClosed
		r.st.close(&boxv1.Cancel{})
		return nil
	}
	r.st.close(nil)
	return nil
}

// WriteOptions of a file. The zero value makes a file of mode 0644 in a
// directory that exists.
type WriteOptions struct {
	Mode    fs.FileMode // 0: 0644
	Parents bool        // make missing parents
}

// Write streams r into a new file, which replaces path as a whole when it is
// complete: readers see the old file or the new one. nil means that it is
// fsynced on the host; see the package comment. After a dropped connection
// the write starts again if r is an [io.Seeker], else it fails and the old
// file stays.
func (f *Files) Write(ctx context.Context, path string, r io.Reader, o WriteOptions) (int64, error) {
	written, err := fromStart(ctx, r, func() (int64, error) { return f.writeOnce(ctx, path, r, o) })
	return written, wrap("write "+path, err)
}

// fromStart runs once, which reads r, and again from where r stood when its stream was lost, if r can
// be set back.
func fromStart[T any](ctx context.Context, r io.Reader, once func() (T, error)) (T, error) {
	var none T
	seeker, _ := r.(io.Seeker)
	var start int64
	if seeker != nil {
		at, err := seeker.Seek(0, io.SeekCurrent)
		if err != nil {
			seeker = nil // a pipe has the method but cannot do it
		}
		start = at
	}
	for n := 0; ; n++ {
		out, err := once()
		if err == nil || !isLost(err) || seeker == nil || n >= 5 {
			return out, err
		}
		if err := pause(ctx, n); err != nil {
			return none, err
		}
		if _, err := seeker.Seek(start, io.SeekStart); err != nil {
			return none, err
		}
	}
}

func (f *Files) writeOnce(ctx context.Context, path string, r io.Reader, o WriteOptions) (int64, error) {
	if o.Mode == 0 {
		o.Mode = 0o644
	}
	op := &boxv1.Operation{Op: &boxv1.Operation_WriteFile{WriteFile: &boxv1.WriteFile{Path: path, Mode: unixMode(o.Mode), User: f.user, Parents: o.Parents}}}
	st, _, err := f.s.open(ctx, "write "+path, op, true)
	if err != nil {
		return 0, err
	}
	if st == nil {
		return 0, &Error{Kind: errkind.Internal, Reason: "the host opened no stream"}
	}
	res, err := upload(ctx, st, r)
	if err != nil {
		return 0, err
	}
	return int64(res.GetBytes()), nil
}

// awaitResult waits for the host's word while the data is sent.
func awaitResult(ctx context.Context, st *stream, sent <-chan error) (*boxv1.Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		if err := <-sent; err != nil && !isLost(err) {
			cancel(err)
		}
	}()
	for {
		f, err := st.recv(ctx)
		if err != nil {
			return nil, err
		}
		if r := f.GetResult(); r != nil {
			return r, nil
		}
	}
}

func sendFile(ctx context.Context, st *stream, r io.Reader) error {
	var at uint64
	p := make([]byte, chunk)
	for {
		n, err := io.ReadFull(r, p)
		for b := p[:n]; len(b) > 0; {
			k, rerr := st.reserve(ctx, len(b))
			if rerr != nil {
				return rerr
			}
			d := &boxv1.Data{Channel: boxv1.Channel_CHANNEL_FILE, Offset: at, Data: b[:k]}
			if serr := st.send(&boxv1.Frame{Body: &boxv1.Frame_Data{Data: d}}); serr != nil {
				return serr
			}
			b, at = b[k:], at+uint64(k)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return st.send(&boxv1.Frame{Body: &boxv1.Frame_CloseInput{CloseInput: &boxv1.CloseInput{Total: at}}})
		}
		if err != nil {
			return &Error{Kind: errkind.Invalid, Reason: "read the data to write: " + err.Error(), Cause: err}
		}
	}
}
