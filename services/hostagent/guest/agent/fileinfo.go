package agent

import (
	"container/heap"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

const (
	maxPage      = 1000
	maxPageBytes = wire.MaxMessage / 2
)

var fileTypes = map[uint32]string{
	unix.S_IFREG: "file", unix.S_IFDIR: "dir", unix.S_IFLNK: "symlink", unix.S_IFIFO: "fifo",
	unix.S_IFSOCK: "socket", unix.S_IFCHR: "char", unix.S_IFBLK: "block",
}

func infoOf(name string, st *unix.Stat_t) wire.FileInfo {
	return wire.FileInfo{
		Name: wire.Text(name), Type: fileTypes[st.Mode&unix.S_IFMT], Size: st.Size,
		Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid, Inode: st.Ino, Links: uint64(st.Nlink),
		ModTime: time.Unix(st.Mtim.Unix()).UTC(),
	}
}

// statAt describes name below the directory fd, or a path for AT_FDCWD.
func statAt(fd int, name string, flags int) (wire.FileInfo, error) {
	var st unix.Stat_t
	err := retryEINTR(func() error { return unix.Fstatat(fd, name, &st, flags) })
	if err != nil {
		return wire.FileInfo{}, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	info := infoOf(filepath.Base(name), &st)
	if info.Type == "symlink" {
		buf := make([]byte, unix.PathMax)
		if n, err := unix.Readlinkat(fd, name, buf); err == nil {
			info.Target = wire.Text(buf[:n])
		}
	}
	return info, nil
}

func (c *call) fileStat() (any, error) {
	var req wire.FileStat
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	flags := unix.AT_SYMLINK_NOFOLLOW
	if req.Follow {
		flags = 0
	}
	var info wire.FileInfo
	_, err := c.perform(req.At, func(path string) (err error) {
		info, err = statAt(unix.AT_FDCWD, path, flags)
		return err
	})
	return info, err
}

// fileList returns a page of a directory. It reads all names each time and
// keeps only those of the page, so that memory is bounded and a page does not
// depend on the one before.
func (c *call) fileList() (any, error) {
	var req wire.FileList
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if req.Limit <= 0 || req.Limit > maxPage {
		req.Limit = maxPage
	}
	page := wire.FilePage{Files: []wire.FileInfo{}}
	_, err := c.perform(req.At, func(path string) error {
		d, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer d.Close()
		names, more, err := c.smallest(d, string(req.After), req.Limit)
		if err != nil {
			return err
		}
		page.More = more
		size := 0
		for _, name := range names {
			info, err := statAt(int(d.Fd()), name, unix.AT_SYMLINK_NOFOLLOW)
			if errors.Is(err, unix.ENOENT) {
				continue // removed meanwhile
			}
			if err != nil {
				info = wire.FileInfo{Name: wire.Text(name)} // listed, but not to be looked at
			}
			if size += 300 + 6*len(name) + 6*len(info.Target); size > maxPageBytes {
				page.More = true
				return nil
			}
			page.Files = append(page.Files, info)
		}
		return nil
	})
	return page, err
}

// smallest returns the first limit names after a name in byte order, and
// whether there are more.
func (c *call) smallest(d *os.File, after string, limit int) ([]string, bool, error) {
	var names maxHeap
	more := false
	for {
		batch, err := d.Readdirnames(4096)
		for _, name := range batch {
			if name <= after {
				continue
			}
			if len(names) < limit {
				heap.Push(&names, name)
				continue
			}
			more = true
			if name < names[0] {
				names[0] = name
				heap.Fix(&names, 0)
			}
		}
		if err == io.EOF {
			break
		}
		if err == nil {
			err = c.ctx.Err()
		}
		if err != nil {
			return nil, false, err
		}
	}
	sort.Strings(names)
	return names, more, nil
}

// maxHeap has the greatest name on top.
type maxHeap []string

func (h maxHeap) Len() int           { return len(h) }
func (h maxHeap) Less(i, j int) bool { return h[i] > h[j] }
func (h maxHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *maxHeap) Push(x any)        { *h = append(*h, strings.Clone(x.(string))) }
func (h *maxHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}
