package sdk

import (
	"context"
	"iter"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// Change is one change below a watched path.
type Change struct {
	Path string
	// What is create, write, remove, rename, chmod or overflow. After overflow
	// (events were dropped, or the connection was) look at the files again.
	What string
}

// Watch yields the changes below a path until ctx ends, the loop is left or an
// error was yielded. The watch stands when the first call of the loop body
// could run; changes made after Watch returned are seen.
func (f *Files) Watch(ctx context.Context, path string, recursive bool) (iter.Seq2[Change, error], error) {
	st, err := f.openWatch(ctx, path, recursive)
	if err != nil {
		return nil, err
	}
	return func(yield func(Change, error) bool) {
		st := st
		defer func() { st.close(&boxv1.Cancel{}) }()
		for {
			fr, err := st.recv(ctx)
			if isLost(err) {
				st.close(nil)
				again, oerr := f.openWatch(ctx, path, recursive)
				if oerr == nil {
					st = again
					if !yield(Change{Path: path, What: "overflow"}, nil) {
						return
					}
					continue
				}
				err = oerr
			}
			if err != nil {
				yield(Change{}, wrap("watch "+path, err))
				return
			}
			if e := fr.GetWatchEvent(); e != nil && !yield(Change{Path: e.GetPath(), What: e.GetWhat()}, nil) {
				return
			}
		}
	}, nil
}

func (f *Files) openWatch(ctx context.Context, path string, recursive bool) (*stream, error) {
	op := &boxv1.Operation{Op: &boxv1.Operation_Watch{Watch: &boxv1.Watch{Path: path, Recursive: recursive, User: f.user}}}
	st, _, err := f.s.open(ctx, "watch "+path, op, true)
	if err == nil && st == nil {
		err = &Error{Op: "watch " + path, Reason: "the host opened no stream"}
	}
	return st, err
}
