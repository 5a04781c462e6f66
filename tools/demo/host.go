package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// filesNaming lists the files below dir whose name holds word.
func filesNaming(dir, word string) (found []string, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && strings.Contains(e.Name(), word) {
			found = append(found, path)
		}
		return nil
	})
	return found, err
}

// eventLog follows every event as the operator.
type eventLog struct {
	client *sdk.Client
	cancel context.CancelFunc
	mu     sync.Mutex
	all    []sdk.Event
	done   chan struct{}
}

func followEvents(ctx context.Context, clientFile string) (*eventLog, error) {
	client, err := sdk.Connect(ctx, sdk.Config{ClientFile: clientFile})
	if err != nil {
		return nil, fmt.Errorf("connect as operator: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	l := &eventLog{client: client, cancel: cancel, done: make(chan struct{})}
	seq, err := client.Events(ctx, sdk.EventFilter{})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("follow events: %w", err)
	}
	go func() {
		defer close(l.done)
		for ev, err := range seq {
			if err != nil {
				return
			}
			l.mu.Lock()
			l.all = append(l.all, ev)
			l.mu.Unlock()
		}
	}()
	return l, nil
}

// waitAsleep waits for the session's asleep event and returns its time and how
// long the way from the idle event took.
func (l *eventLog) waitAsleep(ctx context.Context, key string) (at time.Time, took time.Duration, err error) {
	deadline := time.After(2 * time.Minute)
	for {
		var idle time.Time
		l.mu.Lock()
		for _, ev := range l.all {
			switch {
			case ev.Session != key:
			case ev.Name == "idle":
				idle = ev.Time
			case ev.Name == "asleep":
				at = ev.Time
			}
		}
		l.mu.Unlock()
		if !at.IsZero() && !idle.IsZero() {
			return at, at.Sub(idle), nil
		}
		select {
		case <-ctx.Done():
			return at, 0, ctx.Err()
		case <-deadline:
			return at, 0, errors.New("it did not fall asleep within 2 minutes")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// stop ends the log and renders it for people.
func (l *eventLog) stop() []string {
	l.cancel()
	<-l.done
	l.client.Close()
	var out []string
	for _, ev := range l.all {
		state := ""
		if ev.State != "" {
			state = "→ " + string(ev.State)
		}
		out = append(out, fmt.Sprintf("%s  %-7s %.12s…  %-9s %s", ev.Time.Local().Format("15:04:05.000"), ev.Tenant, ev.Session, ev.Name, state))
	}
	return out
}
