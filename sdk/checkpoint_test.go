package sdk_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

type checkpointed struct {
	sdk.Manifest
	err error
}

func checkpoint(ctx context.Context, s *sdk.Session) <-chan checkpointed {
	out := make(chan checkpointed, 1)
	go func() {
		m, err := s.Checkpoint(ctx)
		out <- checkpointed{m, err}
	}()
	return out
}

// Disk: a first checkpoint that takes longer than one attempt of a request is begun again and again.
func TestALongCheckpointIsWaitedFor(t *testing.T) {
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	asked, release := srv.HoldCheckpoints()
	done := checkpoint(t.Context(), s)
	if !<-asked {
		t.Fatal("the first of all joined another one")
	}
	srv.BreakStreams(false)
	if <-asked {
		t.Error("after its stream was lost it began from nothing, although the host was still at it")
	}
	srv.BreakStreams(true)
	if !<-asked {
		t.Error("it joined what the host ended")
	}
	release()
	if got := <-done; got.err != nil || got.ID == "" {
		t.Errorf("%+v", got)
	}
}

// Disk: a checkpoint that cannot be saved says so, and is no lost stream that is tried for a minute.
func TestACheckpointWithoutAStore(t *testing.T) {
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	srv.FailCheckpoints("the store cannot be reached")
	asked, release := srv.HoldCheckpoints()
	done := checkpoint(t.Context(), s)
	<-asked
	release()
	for _, err := range []error{(<-done).err, (<-checkpoint(t.Context(), s)).err} {
		if !errors.Is(err, sdk.ErrUnsaved) || !strings.Contains(err.Error(), "the store cannot be reached") {
			t.Errorf("%v", err)
		}
	}
	srv.FailCheckpoints("")
	if _, err := s.Checkpoint(t.Context()); err != nil {
		t.Error(err)
	}
}

// Disk: who waits no longer is answered at once, while a checkpoint goes on and while it is lost.
func TestACheckpointIsGivenUp(t *testing.T) {
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	asked, release := srv.HoldCheckpoints()
	defer release()
	ctx, cancel := context.WithCancel(t.Context())
	done := checkpoint(ctx, s)
	<-asked
	cancel()
	if got := <-done; !errors.Is(got.err, sdk.ErrCanceled) {
		t.Errorf("%v", got.err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if got := <-checkpoint(ctx, s); !errors.Is(got.err, sdk.ErrDeadline) {
		t.Errorf("%v", got.err)
	}
}
