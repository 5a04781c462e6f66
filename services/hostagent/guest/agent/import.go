package agent

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/unpack"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// fileImport takes the files of a tar archive from the host. Its result says that they are on the
// disk.
func (c *call) fileImport() (any, error) {
	c.mu.Lock()
	in := c.in
	c.mu.Unlock()
	var req wire.FileImport
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	path := string(req.Path)
	if !filepath.IsAbs(path) || strings.IndexByte(path, 0) >= 0 {
		return nil, wire.Failf(wire.KindInvalid, "the path %.200q of an import is not absolute", path)
	}
	release, err := c.acquire()
	if err != nil {
		return nil, err
	}
	defer release()
	st, err := unpack.Into(c.ctx, path, &inflow{call: c, in: in, limit: wire.Window})
	if err != nil {
		return nil, importFailure(st, err)
	}
	out := wire.FileImported{Bytes: st.Bytes, Entries: st.Entries, Skipped: st.Skipped, Names: wire.Texts(st.Names), Attributes: st.Attributes}
	return out, nil
}

// importFailure says how far an import came, in one sentence.
func importFailure(st unpack.Stats, err error) error {
	var f *wire.Failure
	switch {
	case errors.As(err, &f):
		return err
	case errors.Is(err, unpack.ErrArchive):
		return wire.Failf(wire.KindInvalid, "%v; %d entries were taken before", err, st.Entries)
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
		return &wire.Failure{Kind: wire.KindNoSpace, Errno: int(unix.ENOSPC),
			Message: fmt.Sprintf("the disk is full: %d entries were taken; make room or grow the disk, and import again", st.Entries)}
	}
	return err
}

// inflow reads what the host sends, and acknowledges it piece by piece.
type inflow struct {
	call  *call
	in    *inbox
	rest  []byte
	taken uint64
	limit uint64
}

// Read implements io.Reader; io.EOF only after the host said that all bytes came.
func (i *inflow) Read(p []byte) (int, error) {
	if len(i.rest) == 0 {
		next, err := i.in.next()
		if err != nil {
			return 0, err
		}
		i.rest = next
		i.taken += uint64(len(next))
		if now := i.in.limit(); now >= i.limit+wire.Window/4 {
			i.limit = now
			if err := i.call.sendAck(i.taken, i.limit); err != nil {
				return 0, err
			}
		}
	}
	n := copy(p, i.rest)
	i.rest = i.rest[n:]
	return n, nil
}
