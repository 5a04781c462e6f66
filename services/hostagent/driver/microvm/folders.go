//go:build linux

package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// maxFolder bounds the files of a run folder: all of them go in one message.
const maxFolder = 512 << 10

// filesTime is what a guest gets to take them.
const filesTime = 30 * time.Second

// folders watches the run folders of sandboxes and sends what is renamed into them to the machines:
// there is no file system that host and machine share.
type folders struct {
	d  *Driver
	in *os.File // inotify
	wg sync.WaitGroup

	mu   sync.Mutex
	dirs map[int]ids.SandboxID // by watch
	of   map[ids.SandboxID]int
	path map[ids.SandboxID]string
	sent map[ids.SandboxID]map[string]vmwire.File // what the machine has
	busy map[ids.SandboxID]bool                   // being sent; true if it has changed meanwhile
}

func openFolders(d *Driver) (*folders, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch run folders: %w", err)
	}
	f := &folders{d: d, in: os.NewFile(uintptr(fd), "inotify"),
		dirs: map[int]ids.SandboxID{}, of: map[ids.SandboxID]int{}, path: map[ids.SandboxID]string{}, sent: map[ids.SandboxID]map[string]vmwire.File{}, busy: map[ids.SandboxID]bool{}}
	f.wg.Go(f.read)
	return f, nil
}

func (f *folders) close() {
	_ = f.in.Close()
	f.wg.Wait()
}

// follow sends the folder's files to the sandbox whenever one is renamed into it, and once now unless
// they are those that it has.
func (f *folders) follow(id ids.SandboxID, dir string, has map[string]vmwire.File) {
	raw, err := f.in.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		f.mu.Lock()
		defer f.mu.Unlock()
		wd, err := unix.InotifyAddWatch(int(fd), dir, unix.IN_MOVED_TO|unix.IN_ONLYDIR)
		if err != nil {
			f.d.log.Warn("changes of a sandbox's run folder do not reach it", "sandbox", id, "err", err)
			return
		}
		f.dirs[wd], f.of[id], f.path[id], f.sent[id] = id, wd, dir, has
	})
	f.changed(id)
}

func (f *folders) forget(id ids.SandboxID) {
	raw, err := f.in.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if wd, ok := f.of[id]; ok {
			_, _ = unix.InotifyRmWatch(int(fd), uint32(wd))
			delete(f.dirs, wd)
			delete(f.of, id)
			delete(f.path, id)
			delete(f.sent, id)
		}
	})
}

func (f *folders) read() {
	buf := make([]byte, 64<<10)
	for {
		n, err := f.in.Read(buf)
		if err != nil {
			return // closed
		}
		for at := 0; at+unix.SizeofInotifyEvent <= n; {
			e := (*unix.InotifyEvent)(unsafe.Pointer(&buf[at]))
			at += unix.SizeofInotifyEvent + int(e.Len)
			f.mu.Lock()
			id := f.dirs[int(e.Wd)]
			all := f.path
			if e.Mask&unix.IN_Q_OVERFLOW == 0 {
				all = nil
			}
			var lost []ids.SandboxID
			for other := range all {
				lost = append(lost, other)
			}
			f.mu.Unlock()
			if id != "" {
				lost = append(lost, id)
			}
			for _, id := range lost {
				f.changed(id)
			}
		}
	}
}

// changed sends a folder, once more if it changes while it is sent.
func (f *folders) changed(id ids.SandboxID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, sending := f.busy[id]; sending {
		f.busy[id] = true
		return
	}
	f.busy[id] = false
	go func() {
		for again := true; again; {
			f.mu.Lock()
			dir, ok := f.path[id]
			f.mu.Unlock()
			if ok {
				if err := f.send(id, dir); err != nil {
					f.d.log.Warn("a changed run folder did not reach its sandbox", "sandbox", id, "err", err)
				}
			}
			f.mu.Lock()
			if again = f.busy[id] && ok; again {
				f.busy[id] = false
			} else {
				delete(f.busy, id)
			}
			f.mu.Unlock()
		}
	}()
}

func (f *folders) send(id ids.SandboxID, dir string) error {
	v := f.d.vmOf(id)
	files, err := readFolder(dir)
	if err != nil || v == nil || len(files) == 0 || f.has(id, files) {
		return err
	}
	ctx, cancel := context.WithTimeout(v.ctx, filesTime)
	defer cancel()
	done, err := v.ask(ctx, vmwire.Call{Op: vmwire.OpFiles, Files: files})
	if errors.Is(err, errEnded) || v.ctx.Err() != nil {
		return nil
	}
	if err == nil && !done.OK {
		err = errors.New(said(done.Reason, done.Error))
	}
	if err != nil {
		files = nil // whatever it has now
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, follows := f.of[id]; follows {
		f.sent[id] = files
	}
	return err
}

// has reports whether the sandbox has these very files.
func (f *folders) has(id ids.SandboxID, files map[string]vmwire.File) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.EqualFunc(f.sent[id], files, func(a, b vmwire.File) bool { return a.Mode == b.Mode && bytes.Equal(a.Data, b.Data) })
}

// readFolder reads the files of a run folder; hidden ones are not there yet, and the agent's program
// is in the machine already.
func readFolder(dir string) (map[string]vmwire.File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read run folder: %w", err)
	}
	out := map[string]vmwire.File{}
	total := 0
	for _, e := range entries {
		if !e.Type().IsRegular() || strings.HasPrefix(e.Name(), ".") || e.Name() == guestName {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read run folder: %w", err)
		}
		mode := uint32(0o444)
		if st, err := e.Info(); err == nil {
			mode = uint32(st.Mode().Perm())
		}
		if total += len(b); total > maxFolder || len(out) == vmwire.MaxFiles {
			return nil, fmt.Errorf("the run folder is larger than %d bytes or %d files", maxFolder, vmwire.MaxFiles)
		}
		out[e.Name()] = vmwire.File{Data: b, Mode: mode}
	}
	return out, nil
}

const guestName = "guest"
