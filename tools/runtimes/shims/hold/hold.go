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
// Holder never reads or writes a byte. It deliberately holds one end of each
// pipe only. Holding the reading end of the input too would hide from the host
// that the container stopped reading. Holding the writing end of the outputs too
// would hide that the container exited, and would dead-lock containerd's client,
// which waits for end of file on the outputs before it asks for Delete.
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

// streams are the held ends of one task.
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
	input, err := openEnd(stdin, syscall.O_WRONLY)
	if err != nil {
		return fmt.Errorf("hold the input of task %s: %w", id, err)
	}
	s.input = input
	for _, path := range []string{stdout, stderr} {
		output, err := openEnd(path, syscall.O_RDONLY)
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

// openEnd opens one end of the named pipe at path without waiting for the other
// end. It returns nil when there is no named pipe to hold.
func openEnd(path string, end int) (*os.File, error) {
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
	// A pipe opened for both directions never waits; while it is open, neither
	// does opening the one end that is kept.
	both, err := os.OpenFile(path, syscall.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	defer both.Close()
	kept, err := os.OpenFile(path, end|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return kept, nil
}
