package main

import (
	"fmt"
	"io"
	"sync"
	"time"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
)

// patience is how long an open may take without a word.
const patience = 2 * time.Second

// waitWord says once on w why an open takes long: at the end of the patience, or when a reason is
// known after that.
type waitWord struct {
	w     io.Writer
	timer *time.Timer

	mu     sync.Mutex
	reason string // the newest
	late   bool
	over   bool // said, or no longer to be said
}

func newWaitWord(w io.Writer, patience time.Duration) *waitWord {
	o := &waitWord{w: w}
	o.timer = time.AfterFunc(patience, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.late = true
		o.say()
	})
	return o
}

// hear learns from an event of the session that is opened.
func (o *waitWord) hear(e sdk.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch b := e.Body.(type) {
	case *schedulerv1.Event:
		switch {
		case b.GetUnplaceable() != nil:
			o.reason = b.GetUnplaceable().GetReason()
		case b.GetPlaced() != nil:
			o.reason = "it is waking on " + b.GetPlaced().GetHost()
		}
	case *hostv1.Event:
		if b.GetWhat() == "restoring" {
			o.reason = hostText(b)
		}
	}
	o.say()
}

func (o *waitWord) say() {
	if !o.late || o.over || o.reason == "" {
		return
	}
	o.over = true
	fmt.Fprintf(o.w, "berth: the session is not ready yet: %s\n", plain(o.reason))
}

// end is called when the open has: nothing is said after it.
func (o *waitWord) end() {
	o.timer.Stop()
	o.mu.Lock()
	o.over = true
	o.mu.Unlock()
}

// open opens a session for a command, and says on standard error why that takes long.
func (a *app) open(cl *sdk.Client, o sdk.OpenOptions) (*sdk.Session, error) {
	if a.json || o.Progress != nil {
		return cl.Open(a.ctx, o)
	}
	word := newWaitWord(a.stderr, patience)
	defer word.end()
	o.Progress = word.hear
	return cl.Open(a.ctx, o)
}

// sayRestored says that files are older than they were, which what a command prints does not tell.
func (a *app) sayRestored(s *sdk.Session) {
	if at := s.RestoredAsOf(); s.Origin() == sdk.Restored && !at.IsZero() {
		fmt.Fprintf(a.stderr, "berth: the session was restored as of %s\n", when(at))
	}
}
