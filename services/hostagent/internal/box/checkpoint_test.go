package box

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/seal"
)

// save is one call of a gate's Checkpoint, which ends when the test says so, or its context.
type save struct {
	ctx context.Context
	end chan error
}

type saves struct {
	exporting
	began chan save
}

func (s saves) Checkpoint(ctx context.Context) (*corev1.Manifest, error) {
	one := save{ctx, make(chan error)}
	s.began <- one
	select {
	case err := <-one.end:
		return &corev1.Manifest{Id: "m1"}, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// checkpoints is a box whose checkpoints are the test's.
func checkpoints(t *testing.T, quick, longest time.Duration) (*bench, saves) {
	b := newBench(t, nil, nil, 0)
	g := saves{began: make(chan save, 8)}
	b.tap.sealed = make(chan []byte, 8)
	b.box.gate, b.box.srv.quick, b.box.srv.longest = g, quick, longest
	return b, g
}

// ask runs the operation as an opening does.
func (b *bench) ask(key string) <-chan error {
	c, done := *b.call, make(chan error, 1)
	op := &boxv1.Operation{Op: &boxv1.Operation_Checkpoint{Checkpoint: &boxv1.Checkpoint{Key: key}}}
	go func() { done <- b.box.run(context.Background(), &c, op) }()
	return done
}

func (b *bench) answer() *boxv1.OpenReply {
	b.t.Helper()
	key, err := seal.NewBox(b.box.srv.cfg.Key)
	if err != nil {
		b.t.Fatal(err)
	}
	sealed, r := &boxv1.SealedOpenReply{}, &boxv1.OpenReply{}
	<-b.tap.opened
	if err := proto.Unmarshal(<-b.tap.sealed, sealed); err != nil {
		b.t.Fatal(err)
	}
	plain, err := key.OpenEnvelope(sealed.GetSealed())
	if err == nil {
		err = proto.Unmarshal(plain, r)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// opened is the stream that an answer names.
func (b *bench) opened() *stream {
	b.t.Helper()
	r := b.answer()
	b.box.mu.Lock()
	defer b.box.mu.Unlock()
	for id, st := range b.box.streams {
		if id.String() == r.GetStream() && r.GetResult() == nil {
			return st
		}
	}
	b.t.Fatalf("no stream is open: %v", r)
	return nil
}

// TestALongCheckpointIsNotCutShort: one that takes longer than an opening may is told on a stream, and
// is not ended after the time of one; a quick one needs no stream.
func TestALongCheckpointIsNotCutShort(t *testing.T) {
	b, g := checkpoints(t, 0, longestCheckpoint)
	done := b.ask("x1")
	one := <-g.began
	b.opened()
	if end, ok := one.ctx.Deadline(); !ok || time.Until(end) < 10*openTime {
		t.Errorf("it must end at %s", end)
	}
	one.end <- nil
	if f := b.next(); f.GetResult().GetManifest().GetId() != "m1" {
		t.Errorf("%v", f)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}

	b, g = checkpoints(t, time.Hour, longestCheckpoint)
	done = b.ask("")
	(<-g.began).end <- nil
	if r := b.answer(); r.GetStream() != "" || r.GetResult().GetManifest().GetId() != "m1" {
		t.Errorf("%v", r)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestACheckpointThatFails says why, before and after there is a stream for it.
func TestACheckpointThatFails(t *testing.T) {
	away := errs.E("checkpoint", errkind.Unsaved, "", "the store cannot be reached")
	b, g := checkpoints(t, time.Hour, longestCheckpoint)
	done := b.ask("x1")
	(<-g.began).end <- away
	if err := <-done; errs.Kind(err) != errkind.Unsaved {
		t.Errorf("%v", err)
	}
	b, g = checkpoints(t, 0, longestCheckpoint)
	done = b.ask("x1")
	one := <-g.began
	b.opened()
	one.end <- away
	if f := b.next().GetFailure(); f.GetKind() != errkind.Unsaved.String() || f.GetReason() != away.Error() {
		t.Errorf("%v", f)
	}
	if err := <-done; errs.Kind(err) != errkind.Unsaved {
		t.Errorf("%v", err)
	}
}

// TestACheckpointIsGivenUp when its client says so, is not heard of any more, or it takes for ever.
func TestACheckpointIsGivenUp(t *testing.T) {
	b, g := checkpoints(t, 0, longestCheckpoint)
	for want, give := range map[error]func(*stream){
		errCancelled: func(st *stream) { b.give(st, &boxv1.Frame{Body: &boxv1.Frame_Cancel{Cancel: &boxv1.Cancel{}}}) },
		errGone:      func(*stream) { b.box.tend(time.Now().Add(2*GoneAfter), false) },
	} {
		done := b.ask("x1")
		one := <-g.began
		give(b.opened())
		<-one.ctx.Done()
		if err := <-done; !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
	b, _ = checkpoints(t, time.Hour, time.Millisecond)
	if err := <-b.ask("x1"); errs.Kind(err) != errkind.Deadline {
		t.Errorf("one that takes for ever: %v", err)
	}
	if len(b.box.saves) != 0 {
		t.Errorf("%d are remembered", len(b.box.saves))
	}
}

// TestACheckpointGoesOnForWhoAsksAgain: a client that lost its stream finds its checkpoint where it is,
// also after the host gave the lost stream up; another client's is another one.
func TestACheckpointGoesOnForWhoAsksAgain(t *testing.T) {
	b, g := checkpoints(t, 0, longestCheckpoint)
	first := b.ask("x1")
	one := <-g.began
	lost := b.opened()
	again := b.ask("x1")
	b.opened()
	other := b.ask("x2")
	two := <-g.began
	b.opened()
	lost.mute(errGone)
	if err := <-first; !errors.Is(err, errGone) {
		t.Errorf("%v", err)
	}
	if one.ctx.Err() != nil {
		t.Fatal("the checkpoint ended with the lost stream, although its client waits for it")
	}
	for s, done := range map[save]<-chan error{one: again, two: other} {
		s.end <- nil
		if f := b.next(); f.GetResult().GetManifest().GetId() != "m1" {
			t.Errorf("%v", f)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	done := b.ask("x1")
	(<-g.began).end <- nil // a new one: the old one says nothing of what was written since
	<-done
}

// TestCheckpointKeys: what a client sends as a key is bounded.
func TestCheckpointKeys(t *testing.T) {
	for key, good := range map[string]bool{"": true, "x1": true, "a b": false, string(make([]byte, 100)): false} {
		op := &boxv1.Operation{Op: &boxv1.Operation_Checkpoint{Checkpoint: &boxv1.Checkpoint{Key: key}}}
		if err := checkOperation(op); (err == nil) != good {
			t.Errorf("%q: %v", key, err)
		}
	}
}
