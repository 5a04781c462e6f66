// Package hold keeps the standard streams of a task usable while nobody is
// attached to them.
//
// A task talks to its host over named pipes. A pipe whose last writer goes away
// reports end of file, and a process that reads end of file on its input is
// deaf from then on. Holder guarantees, from Open until Release:
//
//   - the input pipe has a writer, so the death of a host process never reads as
//     end of file in the container, and a new writer may attach at any time;
//   - the output pipes have a reader, so opening them for writing never blocks
//     and writing to them never raises a broken pipe; what nobody reads stays in
//     the pipe, and the container blocks when the pipe is full.
//
// Holder never reads or writes a byte, and it never lets an end of a pipe appear
// and vanish again: a host process that waits in open(2) for its other side would
// take that for a peer that came and went, and see end of file or a broken pipe.
//
// The input is held at both ends, because a writing end alone cannot be opened
// before there is a reader. So a container that stops reading shows as a full
// pipe, not as a broken one; that it exited is known from containerd's events.
// Outputs are held at the reading end only: a held writing end would hide the
// container's end of file, for which containerd's client waits before it asks for
// Delete.
//
// A Holder is safe for concurrent use.
package hold

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"syscall"
)

// Holder holds the streams of any number of tasks. The zero value is ready.
type Holder struct {
	mu    sync.Mutex
	tasks map[string]*streams
}

// streams are the held pipes of one task.
type streams struct {
	input   *os.File
	outputs []*os.File
}

// Open begins to hold the streams of task id. Paths that are empty, missing or
// no named pipe (containerd also knows file:// and binary:// streams) are left
// alone. If the task is already held, Open changes nothing.
func (h *Holder) Open(id, stdin, stdout, stderr string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, held := h.tasks[id]; held {
		return nil
	}
	s := &streams{}
	input, err := openPipe(stdin, syscall.O_RDWR)
	if err != nil {
		return fmt.Errorf("hold the input of task %s: %w", id, err)
	}
	s.input = input
	for _, path := range []string{stdout, stderr} {
		output, err := openPipe(path, syscall.O_RDONLY)
		if err != nil {
			s.close()
			return fmt.Errorf("hold an output of task %s: %w", id, err)
		}
		if output != nil {
			s.outputs = append(s.outputs, output)
		}
	}
	if h.tasks == nil {
		h.tasks = make(map[string]*streams)
	}
	h.tasks[id] = s
	return nil
}

// CloseInput stops holding the input of task id, so that the container reads end
// of file once the last other writer is gone. It is what an explicit CloseIO
// asks for. Unknown tasks are ignored.
func (h *Holder) CloseInput(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.tasks[id]; s != nil && s.input != nil {
		s.input.Close()
		s.input = nil
	}
}

// Release stops holding all streams of task id. Unknown tasks are ignored.
func (h *Holder) Release(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.tasks[id]; s != nil {
		s.close()
		delete(h.tasks, id)
	}
}

func (s *streams) close() {
	if s.input != nil {
		s.input.Close()
	}
	for _, f := range s.outputs {
		f.Close()
	}
}

// openPipe opens the named pipe at path, with a mode that does not wait for a
// peer. It returns nil when there is no named pipe to hold.
func openPipe(path string, mode int) (*os.File, error) {
	if path == "" {
		return nil, nil
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", path, err)
	}
	if info.Mode()&fs.ModeNamedPipe == 0 {
		return nil, nil
	}
	f, err := os.OpenFile(path, mode|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return f, nil
}
