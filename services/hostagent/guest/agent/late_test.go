package agent

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// The tests of this file are about calls of a host that was killed, which come
// to their turn only after its successor has attached.

func TestLateCallOfADeadHostTakesNoExec(t *testing.T) {
	x := newExecution(New(Options{}), "x", [32]byte{})
	living, dead := &reader{}, &reader{}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if err := x.setReader(context.Background(), living); err != nil {
		t.Fatal(err)
	}
	if err := x.setReader(gone, dead); !errors.Is(err, context.Canceled) {
		t.Errorf("attach: %v", err)
	}
	if err := x.detach(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("detach: %v", err)
	}
	if x.reader != living || !x.held {
		t.Error("the living host lost its exec")
	}
}

func TestChangesWaitForThoseOfADeadHost(t *testing.T) {
	c := &channel{agent: New(Options{}), out: &sender{w: io.Discard}, in: wire.NewReader(nil)}
	c.attach(context.Background(), wire.Sync{AttachID: 1})
	first := c.att
	first.changes.running.Add(1) // a rename that nobody can stop
	c.attach(context.Background(), wire.Sync{AttachID: 2})
	c.attach(context.Background(), wire.Sync{AttachID: 3})
	if first.ctx.Err() == nil {
		t.Error("the first attach goes on")
	}
	select {
	case <-c.att.changes.before:
		t.Fatal("changes may begin before the old one is over")
	default:
	}
	first.changes.running.Done()
	<-c.att.changes.before
	<-c.att.starts.before
}
