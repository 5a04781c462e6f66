package hostend

import (
	"context"
	"fmt"
	"io"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Imported says what an import took; all of it is the guest's claim.
type Imported = wire.FileImported

// maxTold bounds the names of skipped entries that are believed.
const maxTold = 64

// Import takes the files of a tar archive below path, which is absolute and a directory, as root of
// the sandbox. It returns when they are synced to the sandbox's disk. It can be repeated: entries
// replace what is there. ErrInvalid (the archive is none, or was cut off), ErrNoSpace (what came
// before stays), ErrUnsupported (an older guest), ErrNotFound, ErrNotDir, ErrChannelLost. An error of
// content is returned as it is.
func (c *Conn) Import(ctx context.Context, path string, content io.Reader) (Imported, error) {
	op := "import into " + path
	w := &fileWrite{unary: unary{conn: c, answer: newAnswer(op)}, limit: wire.Window, wake: make(chan struct{}, 1)}
	var out Imported
	id, err := c.open(ctx, wire.MethodImport, wire.FileImport{Path: wire.Text(path)}, w)
	if err != nil {
		return out, fmt.Errorf("%s: %w", op, err)
	}
	if err := w.send(ctx, id, content); err != nil {
		c.cancel(id)
		return out, fmt.Errorf("%s: %w", op, err)
	}
	err = w.answer.wait(ctx, &out)
	if ctx.Err() != nil {
		c.cancel(id)
	}
	out.Names = out.Names[:min(len(out.Names), maxTold)]
	return out, err
}
