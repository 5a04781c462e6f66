package box

import (
	"bufio"
	"context"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
	"github.com/berth-dev/berth/services/hostagent/internal/layer"
)

const (
	// maxExports of one session at once: each holds a still copy of the disk, mounted.
	maxExports = 2
	// exportStall is how long a client may take nothing of an export, which holds that copy.
	exportStall = 2 * time.Minute
)

// export streams the session's own files, then says what the archive holds.
func (b *Box) export(ctx context.Context, c *call) error {
	defer b.exports.Add(-1)
	if b.exports.Add(1) > maxExports {
		return errs.Errorf(opOpen, errkind.Exhausted, "the session has %d exports under way, more are not allowed", maxExports)
	}
	st, err := b.begin(ctx, c, 0, nil)
	if err != nil {
		return err
	}
	go st.onlyCancel()
	out := newDownload(st, exportStall)
	buffered := bufio.NewWriterSize(out, MaxChunk)
	stats, err := b.gate.Export(st.ctx, buffered)
	if err == nil {
		err = buffered.Flush()
	}
	if cause := context.Cause(st.ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil {
		err = st.finish(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: &boxv1.Result{Bytes: out.total, Archived: archived(stats)}}})
	}
	b.end(st, err)
	return err
}

// download is the bytes of a file on their way to the client.
type download struct {
	st       *stream
	total    uint64
	patience time.Duration
	stall    *time.Timer // set only while the client is waited for
}

func newDownload(st *stream, patience time.Duration) *download {
	d := &download{st: st, patience: patience}
	d.stall = time.AfterFunc(patience, func() {
		st.fail(errs.Errorf("export files", errkind.Deadline, "the client took nothing for %s", patience))
	})
	d.stall.Stop()
	return d
}

// Write implements io.Writer; it waits for the client's credit, but not without end.
func (d *download) Write(p []byte) (int, error) {
	d.stall.Reset(d.patience)
	defer d.stall.Stop()
	if err := d.st.data(boxv1.Channel_CHANNEL_FILE, d.total, p); err != nil {
		return 0, err
	}
	d.total += uint64(len(p))
	return len(p), nil
}

// importFiles takes an archive into the session and answers when its files are synced on this host.
func (b *Box) importFiles(ctx context.Context, c *call, p *boxv1.Import) error {
	path := p.GetPath()
	if path == "" {
		path = "/"
	}
	st, err := b.begin(ctx, c, b.window(true), nil)
	if err != nil {
		return err
	}
	in := &upload{st: st}
	got, err := b.guest.Import(st.ctx, path, in)
	if cause := context.Cause(st.ctx); err != nil && cause != nil {
		err = cause
	}
	if errors.Is(err, hostend.ErrUnsupported) {
		err = errs.E("import files", errkind.Unimplemented, "", "the session was woken by an older version; close it and open it again")
	}
	if err == nil {
		result := &boxv1.Result{Bytes: in.total, Archived: imported(got)}
		err = st.finish(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: result}})
	}
	b.end(st, err)
	return err
}

func archived(s layer.Stats) *boxv1.Archived {
	out := &boxv1.Archived{Entries: s.Entries, Skipped: s.Skipped, Attributes: s.Attributes}
	for _, name := range s.SkippedNames {
		out.SkippedNames = append(out.SkippedNames, told(name))
	}
	return out
}

func imported(i hostend.Imported) *boxv1.Archived {
	out := &boxv1.Archived{Entries: i.Entries, Skipped: i.Skipped, Attributes: i.Attributes}
	for _, name := range i.Names[:min(len(i.Names), maxTold)] {
		out.SkippedNames = append(out.SkippedNames, told(string(name)))
	}
	return out
}

// Bounds of what a session can have said to its client about skipped names.
const (
	maxTold     = 20
	maxToldName = 512
)

// told is a name as the session has it, fit for a frame.
func told(name string) string { return valid(wire.Text(name[:min(len(name), maxToldName)])) }
