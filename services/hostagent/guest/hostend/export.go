package hostend

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Exported says what an export holds; all of it is the guest's claim.
type Exported = wire.FileExported

// maxNameTold bounds each name of a skipped entry that is believed.
const maxNameTold = 300

// Export has the guest write the session's own files to w, as a tar archive in the layer format, and
// returns how many bytes came. The bytes are the guest's: nothing says that they are an archive, and
// nobody but the session's user may be given them. More than limit of them end it with ErrInvalid.
// ErrUnsupported (the host itself reads these files), ErrIO, ErrChannelLost. An error of w is returned
// as it is.
func (c *Conn) Export(ctx context.Context, w io.Writer, limit uint64) (uint64, Exported, error) {
	const op = "export files"
	var out Exported
	r := &FileReader{conn: c, ctx: ctx, wake: make(chan struct{}, 1), answer: newAnswer(op)}
	id, err := c.open(ctx, wire.MethodExport, struct{}{}, r)
	if err != nil {
		return 0, out, fmt.Errorf("%s: %w", op, err)
	}
	r.id = id
	var begun struct{}
	if err := r.answer.wait(ctx, &begun); err != nil {
		c.cancel(id)
		return 0, out, err
	}
	defer r.Close()
	n, err := io.Copy(w, io.LimitReader(r, int64(min(limit, 1<<62))+1))
	switch {
	case err != nil:
		return uint64(n), out, err
	case uint64(n) > limit:
		return uint64(n), out, fmt.Errorf("%s: %w: more than %d bytes came", op, ErrInvalid, limit)
	}
	r.mu.Lock()
	last := r.last
	r.mu.Unlock()
	if err := json.Unmarshal(last, &out); err != nil {
		return uint64(n), Exported{}, fmt.Errorf("%s: %w: %w", op, ErrProtocol, err)
	}
	out.Names = out.Names[:min(len(out.Names), maxTold)]
	for i, name := range out.Names {
		out.Names[i] = name[:min(len(name), maxNameTold)]
	}
	return uint64(n), out, nil
}
