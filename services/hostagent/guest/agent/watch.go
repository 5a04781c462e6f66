package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync/atomic"

	"github.com/fsnotify/fsnotify"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

const (
	maxWatchedDirs = 1024
	maxEvents      = 1024 // waiting for the host
	eventWindow    = 256  // sent and not acknowledged
)

// watch is one fs.watch call.
type watch struct {
	call      *call
	user      *account
	watcher   *fsnotify.Watcher
	recursive bool
	dirs      int
	queue     chan wire.WatchEvent
	lost      atomic.Bool
}

// fileWatch reports changes until the host cancels. A host that is slow, or a
// kernel queue that was full, gives one overflow event in place of what was lost.
func (c *call) fileWatch() (any, error) {
	var req wire.FileWatch
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if c.agent.watches.Add(1) > maxWatches {
		c.agent.watches.Add(-1)
		return nil, wire.Failf(wire.KindTooMany, "more than %d watches", maxWatches)
	}
	defer c.agent.watches.Add(-1)
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	defer watcher.Close()
	w := &watch{call: c, watcher: watcher, recursive: req.Recursive, queue: make(chan wire.WatchEvent, maxEvents)}
	p, err := c.place(req.At)
	if err != nil {
		return nil, err
	}
	w.user = p.user
	if err := p.user.as(func() error { return w.add(p.path) }); err != nil {
		return nil, err
	}
	if err := c.out.sendJSON(c.att, wire.TypeResult, c.stream, struct{}{}); err != nil {
		return nil, err
	}
	go w.collect()
	return nil, w.forward()
}

// add watches a path and, if asked for, the directories below it.
func (w *watch) add(path string) error {
	if !w.recursive {
		return w.watcher.Add(path)
	}
	return filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && p == path:
			return err
		case err != nil || !d.IsDir() && p != path:
			return nil // gone or unreadable: not ours to see
		case w.dirs >= maxWatchedDirs:
			return wire.Failf(wire.KindTooMany, "more than %d directories to watch below %s", maxWatchedDirs, path)
		}
		w.dirs++
		return w.watcher.Add(p)
	})
}

// collect queues events and never waits for the host.
func (w *watch) collect() {
	for {
		select {
		case ev, ok := <-w.watcher.Events:
			if !ok {
				return
			}
			w.put(wire.WatchEvent{Path: wire.Text(ev.Name), Op: opName(ev.Op)})
			if w.recursive && ev.Has(fsnotify.Create) {
				if err := w.user.as(func() error { return w.addNew(ev.Name) }); err != nil {
					w.lose()
				}
			}
		case err, ok := <-w.watcher.Errors:
			if !ok {
				return
			}
			if err != nil {
				w.lose()
			}
		}
	}
}

func (w *watch) addNew(path string) error {
	if !isDir(path) {
		return nil
	}
	return w.add(path)
}

func (w *watch) put(ev wire.WatchEvent) {
	select {
	case w.queue <- ev:
	default:
		w.lost.Store(true)
	}
}

// lose notes a loss and wakes the sender.
func (w *watch) lose() {
	w.lost.Store(true)
	w.put(wire.WatchEvent{Op: "overflow"})
}

func opName(op fsnotify.Op) string {
	switch {
	case op.Has(fsnotify.Create):
		return "create"
	case op.Has(fsnotify.Remove):
		return "remove"
	case op.Has(fsnotify.Rename):
		return "rename"
	case op.Has(fsnotify.Write):
		return "write"
	}
	return "chmod"
}

// forward sends events as far as the host has acknowledged the ones before.
func (w *watch) forward() error {
	sent := uint64(0)
	for {
		var ev wire.WatchEvent
		select {
		case ev = <-w.queue:
		case <-w.call.ctx.Done():
			return w.call.ctx.Err()
		}
		if w.lost.Swap(false) && ev.Op != "overflow" {
			if err := w.sendEvent(&sent, wire.WatchEvent{Op: "overflow"}); err != nil {
				return err
			}
		}
		if err := w.sendEvent(&sent, ev); err != nil {
			return err
		}
	}
}

func (w *watch) sendEvent(sent *uint64, ev wire.WatchEvent) error {
	// The window of a call is in bytes; here it is in events.
	if _, err := w.call.credit(*sent + wire.Window - eventWindow); err != nil {
		return err
	}
	payload, err := json.Marshal(ev)
	if err != nil {
		return errors.Join(errors.New("encode event"), err)
	}
	if err := w.call.send(wire.Frame{Type: wire.TypeEvent, Offset: *sent, Payload: payload}); err != nil {
		return err
	}
	*sent++
	return nil
}
