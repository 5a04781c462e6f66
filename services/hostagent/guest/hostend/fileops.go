package hostend

import (
	"context"
	"fmt"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Stat describes a path; with follow it resolves a symlink at its end.
func (c *Conn) Stat(ctx context.Context, path Path, follow bool) (FileInfo, error) {
	var info FileInfo
	err := c.call(ctx, "stat "+path.Name, wire.MethodStat, wire.FileStat{At: path.at(), Follow: follow}, &info)
	return info, err
}

// List returns up to limit entries (at most 1000, 0 for that) of a directory in
// the byte order of their names, beginning after a name, and whether there are
// more. A page may be shorter than limit though there are more. An entry that
// could not be looked at has only its name.
func (c *Conn) List(ctx context.Context, path Path, after string, limit int) ([]FileInfo, bool, error) {
	var page wire.FilePage
	req := wire.FileList{At: path.at(), After: wire.Text(after), Limit: limit}
	if err := c.call(ctx, "list "+path.Name, wire.MethodList, req, &page); err != nil {
		return nil, false, err
	}
	for _, f := range page.Files {
		if string(f.Name) <= after {
			return nil, false, fmt.Errorf("list %s: %w: names out of order", path.Name, ErrProtocol)
		}
		after = string(f.Name)
	}
	return page.Files, page.More && len(page.Files) > 0, nil
}

// Mkdir makes a directory with a mode (0 for 0755). With parents missing ones
// above it are made too, and one that exists is no error. Synced when it returns.
func (c *Conn) Mkdir(ctx context.Context, path Path, mode uint32, parents bool) error {
	req := wire.FileMkdir{At: path.at(), Mode: mode, Parents: parents}
	return c.call(ctx, "make directory "+path.Name, wire.MethodMkdir, req, nil)
}

// Move renames path to another name, which is resolved like path.Name. Without
// replace an existing one is ErrExists. ErrCrossDevice between file systems.
func (c *Conn) Move(ctx context.Context, path Path, to string, replace bool) error {
	req := wire.FileMove{At: path.at(), To: wire.Text(to), Replace: replace}
	return c.call(ctx, "move "+path.Name, wire.MethodMove, req, nil)
}

// Remove removes a file or an empty directory, or with recursive all below it.
// ErrNotFound if there is nothing. Symlinks are removed, not followed.
func (c *Conn) Remove(ctx context.Context, path Path, recursive bool) error {
	return c.call(ctx, "remove "+path.Name, wire.MethodRemove, wire.FileRemove{At: path.at(), Recursive: recursive}, nil)
}
