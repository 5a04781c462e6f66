package agent

import (
	"bufio"
	"encoding/json"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
	"github.com/berth-dev/berth/services/hostagent/internal/layer"
)

// fileExport streams the session's own files as an archive in the layer format. The session goes on: the
// host must not look at this disk, and nobody else can make a still copy of it.
func (c *call) fileExport() (any, error) {
	upper := c.agent.opts.Upper
	if upper == nil {
		return nil, wire.Failf(wire.KindUnsupported, "export: the files are the host's to read")
	}
	release, err := c.acquire()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := c.out.sendJSON(c.att, wire.TypeResult, c.stream, struct{}{}); err != nil {
		return nil, err
	}
	out := &outflow{call: c}
	buffered := bufio.NewWriterSize(out, wire.MaxPayload)
	st, err := layer.Write(c.ctx, buffered, upper, layer.Limits{Live: true})
	if err == nil {
		err = buffered.Flush()
	}
	if err != nil {
		return nil, exportFailure(err)
	}
	text, err := json.Marshal(wire.FileExported{Entries: st.Entries, Skipped: st.Skipped, Names: wire.Texts(st.SkippedNames), Attributes: st.Attributes})
	if err != nil {
		return nil, err
	}
	return nil, c.send(wire.Frame{Type: wire.TypeEnd, Offset: out.sent, Payload: text})
}

func exportFailure(err error) error {
	var f *wire.Failure
	if errors.As(err, &f) {
		return f
	}
	return wire.Failf(wire.KindIO, "%v", err)
}

// outflow sends bytes to the host as far as it takes them.
type outflow struct {
	call *call
	sent uint64
}

// Write implements io.Writer.
func (o *outflow) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		room, err := o.call.credit(o.sent)
		if err != nil {
			return done, err
		}
		n := int(min(room, uint64(len(p)-done), wire.MaxPayload))
		if err := o.call.send(wire.Frame{Type: wire.TypeData, Offset: o.sent, Payload: p[done : done+n]}); err != nil {
			return done, err
		}
		o.sent += uint64(n)
		done += n
	}
	return done, nil
}

// diskUsage measures the file system that the session writes to.
func (c *call) diskUsage() (any, error) {
	var st unix.Statfs_t
	err := unix.Statfs("/", &st)
	if upper := c.agent.opts.Upper; upper != nil {
		err = unix.Fstatfs(int(upper.Fd()), &st)
	}
	if err != nil {
		return nil, err
	}
	unit := uint64(st.Bsize)
	return wire.DiskUsage{Size: st.Blocks * unit, Used: (st.Blocks - st.Bfree) * unit, Free: st.Bavail * unit}, nil
}
