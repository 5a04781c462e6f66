package auditlog

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// journalFull is the most bytes of records that wait in a journal.
	journalFull = 64 << 20
	// journalLarge is the size from which a journal is rewritten without what is done.
	journalLarge = 4 << 20
	// journalLine is the longest line that is read back.
	journalLine = 1 << 20
	syncEvery   = 100 * time.Millisecond
	filePrefix  = "journal-"
)

// journal is a file of the records that a stream has not acknowledged. A record
// is written before it is published, and a line marks it done afterwards. The
// file is locked by its process, so that the next process takes over the
// journals of those that died. Lines are synced ten times a second.
type journal struct {
	log *slog.Logger

	path  string
	mu    sync.Mutex
	file  *os.File
	size  int64
	wait  map[string]*waiting
	next  uint64 // position of the next record
	bytes int64  // of the records that wait
	dirty bool   // written since the last sync
	torn  bool   // the file ends with a part of a line
	quit  chan struct{}
	ended chan struct{}
}

// waiting is a record that is not acknowledged.
type waiting struct {
	line []byte
	at   uint64 // position
}

// line is one line of the file: a record, or the id of one that is done.
type line struct {
	ID      string    `json:"id,omitempty"`
	Subject string    `json:"subject,omitempty"`
	At      time.Time `json:"at,omitzero"`
	Body    []byte    `json:"body,omitempty"`
	Done    string    `json:"done,omitempty"`
}

// openJournal locks a journal in a directory and returns the records that
// earlier processes left in it and in other journals there.
func openJournal(dir string, log *slog.Logger) (j *journal, left []line, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, err
	}
	j = &journal{log: log, wait: map[string]*waiting{}, quit: make(chan struct{}), ended: make(chan struct{})}
	for n := 0; j.file == nil; n++ {
		j.path = filepath.Join(dir, fmt.Sprint(filePrefix, n))
		if j.file, err = lockFile(j.path); err != nil {
			return nil, nil, err
		}
	}
	left, err = j.takeOver(dir)
	if err != nil {
		return nil, nil, errors.Join(err, j.file.Close())
	}
	go j.syncing()
	return j, left, nil
}

// lockFile opens a file for this process alone; nil: another process has it.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		var now, open os.FileInfo
		if open, err = f.Stat(); err == nil {
			if now, err = os.Stat(path); err == nil && os.SameFile(now, open) {
				return f, nil
			}
		}
		if err == nil || errors.Is(err, os.ErrNotExist) { // replaced or removed meanwhile
			return nil, f.Close()
		}
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// takeOver reads what is left in the own file and in those of dead processes,
// and keeps all of it in the own one.
func (j *journal) takeOver(dir string) ([]line, error) {
	left, err := j.read(j.file)
	if err != nil {
		return nil, err
	}
	paths, err := filepath.Glob(filepath.Join(dir, filePrefix+"*"))
	if err != nil {
		return nil, err
	}
	var dead []*os.File
	for _, p := range paths {
		if p == j.path || strings.HasSuffix(p, ".new") {
			continue
		}
		f, err := lockFile(p)
		if err != nil {
			return nil, err
		}
		if f == nil {
			continue
		}
		dead = append(dead, f)
		more, err := j.read(f)
		if err != nil {
			return nil, err
		}
		left = append(left, more...)
	}
	slices.SortStableFunc(left, func(a, b line) int { return a.At.Compare(b.At) })
	for _, l := range left {
		raw, err := json.Marshal(l)
		if err != nil {
			return nil, err
		}
		j.keep(l.ID, append(raw, '\n'))
	}
	if err := j.rewrite(); err != nil {
		return nil, err
	}
	for _, f := range dead { // only now is all of it in the own file
		_ = os.Remove(f.Name())
		_ = f.Close()
	}
	return left, nil
}

// read returns the records of a file that are not done. A line that a crash cut
// off was of a record that nobody acted on yet.
func (j *journal) read(f *os.File) (left []line, err error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	in := bufio.NewReaderSize(f, journalLine)
	var all []line
	done := map[string]bool{}
	for {
		raw, err := readLine(in)
		if errors.Is(err, io.EOF) {
			break
		}
		var l line
		if err == nil {
			err = json.Unmarshal(raw, &l)
		} else if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		if err != nil {
			j.log.Warn("a line of the audit journal cannot be read", "file", f.Name(), "error", err)
			continue
		}
		if l.Done != "" {
			done[l.Done] = true
		} else {
			all = append(all, l)
		}
	}
	for _, l := range all {
		if !done[l.ID] {
			done[l.ID] = true
			left = append(left, l)
		}
	}
	return left, nil
}

// readLine returns the next line, or bufio.ErrBufferFull after a line that is too long.
func readLine(in *bufio.Reader) ([]byte, error) {
	raw, err := in.ReadSlice('\n')
	if errors.Is(err, io.EOF) && len(raw) > 0 {
		return raw, nil
	}
	if !errors.Is(err, bufio.ErrBufferFull) {
		return raw, err
	}
	for errors.Is(err, bufio.ErrBufferFull) {
		_, err = in.ReadSlice('\n')
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return nil, bufio.ErrBufferFull
}

// keep notes a record that waits; the lock is held.
func (j *journal) keep(id string, raw []byte) {
	if old := j.wait[id]; old != nil {
		j.bytes -= int64(len(old.line))
	}
	j.wait[id] = &waiting{raw, j.next}
	j.next++
	j.bytes += int64(len(raw))
}

// add writes a record; on an error it will not outlive the process. One that
// waits already is not written again, or repeated requests would let the file
// grow without bound.
func (j *journal) add(l line) error {
	raw, err := json.Marshal(l)
	if err != nil {
		return err
	}
	raw = append(raw, '\n')
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.wait[l.ID] != nil {
		return nil
	}
	if j.bytes+int64(len(raw)) > journalFull {
		return errors.New("the audit journal is full")
	}
	if len(raw) > journalLine {
		return fmt.Errorf("an audit record of %d bytes is too long for the journal", len(raw))
	}
	if err := j.write(raw); err != nil {
		return err
	}
	j.keep(l.ID, raw)
	return nil
}

// done marks a record that its stream has, or will never take.
func (j *journal) done(id string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.wait[id]
	if w == nil {
		return nil
	}
	delete(j.wait, id)
	j.bytes -= int64(len(w.line))
	if j.size > journalLarge && j.size > 2*j.bytes {
		err := j.rewrite()
		if err == nil {
			return nil
		}
		j.log.Warn("the audit journal cannot be made smaller", "error", err)
	}
	raw, err := json.Marshal(line{Done: id})
	if err != nil {
		return err
	}
	return j.write(append(raw, '\n'))
}

// write appends a line. What a full disk left of the line before is ended
// first, or this line would be lost with it. The lock is held.
func (j *journal) write(raw []byte) error {
	if j.torn {
		raw = append([]byte{'\n'}, raw...)
	}
	n, err := j.file.Write(raw)
	j.size += int64(n)
	j.dirty = true
	if n > 0 {
		j.torn = n < len(raw)
	}
	return err
}

// rewrite replaces the file by one of the records that wait; the lock is held.
func (j *journal) rewrite() error {
	f, err := os.OpenFile(j.path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		var all []*waiting
		for _, w := range j.wait {
			all = append(all, w)
		}
		slices.SortFunc(all, func(a, b *waiting) int { return int(a.at) - int(b.at) })
		out := bufio.NewWriter(f)
		for _, w := range all {
			_, _ = out.Write(w.line) // Flush returns the error
		}
		if err = errors.Join(out.Flush(), f.Sync()); err == nil {
			err = os.Rename(j.path+".new", j.path)
		}
		if err == nil { // or a power cut would bring the old file back, without what is written from now on
			if serr := syncDir(filepath.Dir(j.path)); serr != nil {
				j.log.Error("the folder of the audit journal cannot be synced", "error", serr)
			}
		}
	}
	if err != nil {
		_ = os.Remove(j.path + ".new") // it takes room on a disk that may be full
		return errors.Join(err, f.Close())
	}
	_ = j.file.Close()
	j.file, j.size, j.torn = f, j.bytes, false
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// syncing syncs what was written until close.
func (j *journal) syncing() {
	defer close(j.ended)
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	for {
		select {
		case <-j.quit:
			return
		case <-tick.C:
		}
		j.mu.Lock()
		dirty, f := j.dirty, j.file
		j.dirty = false
		j.mu.Unlock()
		if !dirty {
			continue
		}
		if err := f.Sync(); err != nil && !errors.Is(err, os.ErrClosed) {
			j.mu.Lock()
			j.dirty = true // again at the next tick
			j.mu.Unlock()
			j.log.Error("the audit journal cannot be synced", "error", err)
		}
	}
}

// close keeps what waits in the file, for the next process.
func (j *journal) close() error {
	close(j.quit)
	<-j.ended
	j.mu.Lock()
	defer j.mu.Unlock()
	return errors.Join(j.file.Sync(), j.file.Close())
}
