//go:build linux

package wasm

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"sync"
	"time"
)

// aheadTime is how long a process waits for a call that may not come; its memory is the sandbox's.
const aheadTime = 2 * time.Minute

// minAhead is the memory of the smallest sandbox in which a process is started ahead.
const minAhead = 384 << 20

// ahead is at most one process that waits for the next call of the JavaScript tool. It is used once.
type ahead struct {
	mu    sync.Mutex
	next  *waiting
	timer *time.Timer
	cache *os.File
}

// startJS hands the call to the process that waits, or to a new one, and starts the next one ahead.
func (s *supervisor) startJS(c call, files [3]uintptr) (int, error) {
	if w := s.ahead.take(); w != nil {
		pid, err := w.hand(c, files)
		if err == nil {
			s.startAhead()
			return pid, nil
		}
	}
	w, err := s.spawn("js", s.js, s.jsCache(), true)
	if err != nil {
		return 0, err
	}
	pid, err := w.hand(c, files)
	if err == nil {
		s.startAhead()
	}
	return pid, err
}

func (a *ahead) take() *waiting {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.next
	a.next = nil
	if a.timer != nil {
		a.timer.Stop()
	}
	return w
}

// startAhead starts a process that waits, unless there is one. It ends when no call comes.
func (s *supervisor) startAhead() {
	if !s.order.Limits.Ahead || s.order.Limits.MemoryBytes < minAhead {
		return
	}
	go func() {
		cache := s.jsCache()
		s.ahead.mu.Lock()
		defer s.ahead.mu.Unlock()
		// Where the host has not compiled the tool yet, each process does: two at once take more memory
		// than the sandbox has.
		if s.ahead.next != nil || cache == s.own {
			return
		}
		w, err := s.spawn("js", s.js, cache, true)
		if err != nil {
			return // the next call starts one by itself, and says why it cannot
		}
		s.ahead.next = &w
		s.ahead.timer = time.AfterFunc(aheadTime, func() {
			if w := s.ahead.take(); w != nil {
				_ = w.sock.Close() // the process sees that nobody will ask, and ends
			}
		})
	}()
}

// jsCache is found once: the tool does not change while the sandbox lives.
func (s *supervisor) jsCache() *os.File {
	s.ahead.mu.Lock()
	defer s.ahead.mu.Unlock()
	if s.ahead.cache != nil {
		return s.ahead.cache
	}
	s.ahead.cache = s.own
	h := sha256.New()
	if st, err := s.js.Stat(); err == nil {
		if _, err := io.Copy(h, io.NewSectionReader(s.js, 0, st.Size())); err == nil {
			if dir := s.cached[hex.EncodeToString(h.Sum(nil))]; dir != nil {
				s.ahead.cache = dir
			}
		}
	}
	return s.ahead.cache
}
