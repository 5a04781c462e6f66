//go:build linux

package wasm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// maxFiles that come with one message; the kernel's own bound is 253.
const maxFiles = 128

// receive reads one message with its files from a socket. flags may hold MSG_DONTWAIT.
func receive(fd int, buf []byte, flags int) ([]byte, []*os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	var n, m int
	for {
		var err error
		n, m, _, _, err = unix.Recvmsg(fd, buf, oob, flags|unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("receive: %w", err)
		}
		break
	}
	if n == 0 {
		return nil, nil, errors.New("receive: the other side is gone")
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:m])
	if err != nil {
		return nil, nil, fmt.Errorf("receive: %w", err)
	}
	var files []*os.File
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return nil, nil, fmt.Errorf("receive: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return buf[:n], files, nil
}

// call is what one call is told; it lies in a file in memory, since arguments can be long.
type call struct {
	Args, Env []string
	Dir       string
}

// static is what the process of a call is started with, as its argument.
type static struct {
	Module      string // for messages
	JS          bool
	MemoryBytes uint64
	OutputBytes uint64 // 0: no limit
	OpenFiles   uint64
	Millis      int64 // 0: no limit
}

// sendCall hands a waiting process its call and its standard files.
func sendCall(sock int, c call, files [3]uintptr) error {
	b, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("encode call: %w", err)
	}
	fd, err := unix.MemfdCreate("call", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("hand over call: %w", err)
	}
	f := os.NewFile(uintptr(fd), "call")
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt(b, 0); err != nil {
		return fmt.Errorf("hand over call: %w", err)
	}
	rights := unix.UnixRights(fd, int(files[0]), int(files[1]), int(files[2]))
	if err := unix.Sendmsg(sock, []byte("c"), rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("hand over call: %w", err)
	}
	return nil
}
