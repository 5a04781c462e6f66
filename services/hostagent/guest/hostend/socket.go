package hostend

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// OpenChannel opens the channel to a guest: the FIFOs that it has as stdin and stdout, or the stream
// socket of a virtio-serial port, if socket is not empty.
func OpenChannel(ctx context.Context, stdin, stdout, socket string) (io.ReadWriteCloser, error) {
	if socket == "" {
		return OpenFIFOs(stdin, stdout)
	}
	var st unix.Stat_t
	if err := unix.Lstat(socket, &st); err != nil {
		return nil, fmt.Errorf("open guest channel: %w", &os.PathError{Op: "lstat", Path: socket, Err: err})
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, fmt.Errorf("open guest channel: %s is not a socket", socket)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("open guest channel: %w", err)
	}
	return conn, nil
}
