package diskpool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// mkfs makes a file system. It dies with this process, so that it never writes behind a later one's
// back. force is for what an earlier mkfs of ours left half-made, nothing else.
func mkfs(ctx context.Context, target string, force bool) error {
	// No discard: a fresh file is a hole already. A small log: it is written in full.
	args := []string{"-q", "-K", "-m", "reflink=1,rmapbt=0", "-s", fmt.Sprintf("size=%d", sector), "-l", "size=64m"}
	if force {
		args = append(args, "-f")
	}
	cmd := exec.CommandContext(ctx, "mkfs.xfs", append(args, target)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // the signal comes when the thread ends
	defer runtime.UnlockOSThread()
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return errs.Errorf("", errkind.Unavailable, "mkfs.xfs %s: %w: %s", target, err, strings.Join(strings.Fields(string(out)), " "))
	}
	return nil
}

const sector = 4096 // that of our loop devices

// mountXFS mounts a device.
func mountXFS(device, dir string) error {
	if err := unix.Mount(device, dir, "xfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, "discard"); err != nil {
		return errs.Errorf("", errkind.Unavailable, "%s cannot be mounted and is left as it is: %w", device, err)
	}
	return nil
}

// superblock is what its first sector tells of a file or device.
type superblock struct {
	xfs      bool
	halfMade bool // mkfs was killed
}

func readSuperblock(path string) (superblock, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return superblock{}, err
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 512)
	if _, err := io.ReadFull(f, b); err != nil {
		return superblock{}, fmt.Errorf("read its first sector: %w", err)
	}
	return parseSuperblock(b), nil
}

// parseSuperblock reads struct xfs_dsb: the magic number, and sb_inprogress at byte 126, which
// mkfs.xfs takes away last.
func parseSuperblock(b []byte) superblock {
	const inProgress = 126
	return superblock{
		xfs:      bytes.HasPrefix(b, []byte("XFSB")),
		halfMade: bytes.HasPrefix(b, []byte("XFSB")) && len(b) > inProgress && b[inProgress] != 0,
	}
}

// From xfs_fs.h.
const (
	geometryIoctl = 0x8100587e // XFS_IOC_FSGEOMETRY
	growIoctl     = 0x4010586e // XFS_IOC_FSGROWFSDATA
)

type geometry struct {
	blockSize, rtExtSize, agBlocks, agCount uint32
	logBlocks, sectSize, inodeSize, imaxPct uint32
	dataBlocks                              uint64
	_                                       [216]byte
}

type growth struct {
	blocks  uint64
	imaxPct uint32
	_       uint32
}

// xfsIoctl calls an ioctl of the file system that dir is in.
func xfsIoctl(dir string, num uintptr, arg unsafe.Pointer) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.Fd(), num, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// xfsSize is the size of a mounted file system in bytes.
func xfsSize(dir string) (uint64, error) {
	var g geometry
	if err := xfsIoctl(dir, geometryIoctl, unsafe.Pointer(&g)); err != nil {
		return 0, fmt.Errorf("measure XFS on %s: %w", dir, err)
	}
	return g.dataBlocks * uint64(g.blockSize), nil
}

// growXFS makes a mounted file system as large as size; its device must be.
func growXFS(dir string, size uint64) error {
	var g geometry
	if err := xfsIoctl(dir, geometryIoctl, unsafe.Pointer(&g)); err != nil {
		return fmt.Errorf("measure XFS on %s: %w", dir, err)
	}
	if g.blockSize == 0 {
		return errors.New("XFS has blocks of no size")
	}
	in := growth{blocks: size / uint64(g.blockSize), imaxPct: g.imaxPct}
	if err := xfsIoctl(dir, growIoctl, unsafe.Pointer(&in)); err != nil {
		return fmt.Errorf("grow XFS on %s to %d bytes: %w", dir, size, err)
	}
	return nil
}
