package sdk

import (
	"context"
	"errors"
	"io"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// ExportResult says what an archive holds.
type ExportResult struct {
	Bytes   int64 // of the archive
	Entries int64 // files, directories, links and removals
	Left
}

// ImportResult says what was taken of an archive.
type ImportResult struct {
	Bytes   int64 // of the archive
	Entries int64 // files, directories, links and removals
	Left
}

// Left is what did not come along.
type Left struct {
	// Skipped entries: what is neither file, directory nor link, names that an archive or the session
	// cannot hold, and on import what lies below /proc, /sys, /dev and /run.
	Skipped int64
	// SkippedNames are the first of them, each with the reason.
	SkippedNames []string
	// Attributes: owners, modes, times and extended attributes that could not be kept.
	Attributes int64
}

func leftOf(a *boxv1.Archived) Left {
	return Left{Skipped: int64(a.GetSkipped()), SkippedNames: a.GetSkippedNames(), Attributes: int64(a.GetAttributes())}
}

// Export writes the session's own files to w, all that it changed on top of its image, as they were
// at one moment: a tar archive in the layer format of the OCI image specification, in which an entry
// .wh.<name> stands for a file of the image that was removed. Programs in the session go on.
//
// The archive is whole only when the error is nil. It does not go on after a dropped connection
// (ErrUnavailable): export again, into an empty writer. Other errors: ErrStaleEpoch, ErrInvalid (w
// failed), and of the kinds unimplemented (an older host) and exhausted (no room on the host for a
// still copy).
func (s *Session) Export(ctx context.Context, w io.Writer) (ExportResult, error) {
	const op = "export files"
	st, _, err := s.open(ctx, op, &boxv1.Operation{Op: &boxv1.Operation_Export{Export: &boxv1.Export{}}}, true)
	if err != nil {
		return ExportResult{}, err
	}
	if st == nil {
		return ExportResult{}, &Error{Op: op, Kind: errkind.Internal, Reason: "the host opened no stream"}
	}
	res, n, err := receive(ctx, st, w)
	if err != nil {
		st.close(&boxv1.Cancel{})
		return ExportResult{Bytes: int64(n)}, wrap(op, err)
	}
	st.close(nil)
	return ExportResult{Bytes: int64(n), Entries: int64(res.GetArchived().GetEntries()), Left: leftOf(res.GetArchived())}, nil
}

// receive writes the bytes of a stream to w until its result.
func receive(ctx context.Context, st *stream, w io.Writer) (*boxv1.Result, uint64, error) {
	var at uint64
	for {
		f, err := st.recv(ctx)
		if err != nil {
			return nil, at, err
		}
		switch b := f.GetBody().(type) {
		case *boxv1.Frame_Data:
			if b.Data.GetOffset() != at {
				return nil, at, &Error{Kind: errkind.DataLoss, Reason: "the host skipped a part of the archive"}
			}
			n, err := w.Write(b.Data.GetData())
			at += uint64(n)
			if err != nil {
				return nil, at, &Error{Kind: errkind.Invalid, Reason: "write the archive: " + err.Error(), Cause: err}
			}
			st.took(n)
		case *boxv1.Frame_Result:
			if b.Result.GetBytes() != at {
				return nil, at, &Error{Kind: errkind.DataLoss, Reason: "the host sent less than the whole archive"}
			}
			return b.Result, at, nil
		}
	}
}

// Import takes the files of a plain tar archive, such as one of Export, into the session below path
// (absolute; empty: the root), as its root user: entries replace what is there, .wh. entries remove.
// Nothing is written outside path. nil means that all of it is fsynced on the host.
//
// An archive that ends too early is ErrInvalid, a full disk ErrQuota; what came before is in place
// then, and importing the same archive again is right. After a dropped connection the import starts
// again if r is an [io.Seeker], else it fails (ErrUnavailable). ErrNotFound: path does not exist.
func (s *Session) Import(ctx context.Context, r io.Reader, path string) (ImportResult, error) {
	op := "import files"
	out, err := fromStart(ctx, r, func() (ImportResult, error) { return s.importOnce(ctx, r, path) })
	return out, wrap(op, err)
}

func (s *Session) importOnce(ctx context.Context, r io.Reader, path string) (ImportResult, error) {
	st, _, err := s.open(ctx, "import files", &boxv1.Operation{Op: &boxv1.Operation_Import{Import: &boxv1.Import{Path: path}}}, true)
	if err != nil {
		return ImportResult{}, err
	}
	if st == nil {
		return ImportResult{}, &Error{Kind: errkind.Internal, Reason: "the host opened no stream"}
	}
	res, err := upload(ctx, st, r)
	if err != nil {
		return ImportResult{}, err
	}
	return ImportResult{Bytes: int64(res.GetBytes()), Entries: int64(res.GetArchived().GetEntries()), Left: leftOf(res.GetArchived())}, nil
}

// upload sends r and returns the host's result; the stream is closed.
func upload(ctx context.Context, st *stream, r io.Reader) (*boxv1.Result, error) {
	sending, stop := context.WithCancelCause(ctx)
	sent, ended := make(chan error, 1), make(chan struct{})
	go func() { defer close(ended); sent <- sendFile(sending, st, r) }()
	res, err := awaitResult(ctx, st, sent)
	stop(errors.New("the transfer has ended"))
	if isLost(err) {
		st.lose(err)
		<-ended // r may be read again only when nobody else reads it
	}
	if err != nil {
		st.close(&boxv1.Cancel{})
		return nil, err
	}
	st.close(nil)
	return res, nil
}
