package box

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

const (
	// quickCheckpoint is how long a checkpoint may take to be answered without a stream: less than
	// the patience of a client with the answer of an opening.
	quickCheckpoint = 2 * time.Second
	// longestCheckpoint bounds one whose client waits for ever.
	longestCheckpoint = 30 * time.Minute
)

// saving is a checkpoint under way. It goes on as long as anybody waits for it: a client whose stream
// was lost asks again with the same key, and finds it where it is.
type saving struct {
	key     string
	cancel  context.CancelCauseFunc
	waiting int           // guarded by Box.mu
	long    chan struct{} // closed when it takes so long that who waits has a stream
	done    chan struct{}

	manifest *corev1.Manifest // with err, once done
	err      error
}

// checkpoint answers with the manifest when it is committed: in the answer of the opening when that
// is soon, else as the last frame of a stream.
func (b *Box) checkpoint(ctx context.Context, c *call, key string) error {
	s := b.save(ctx, key)
	defer b.leave(s)
	select {
	case <-s.done:
		if s.err != nil {
			return s.err
		}
		c.answered = true
		return b.answer(c.reply, c.replyKey, &boxv1.OpenReply{Result: &boxv1.Result{Manifest: s.manifest}})
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.long:
	}
	st, err := b.begin(ctx, c, 0, nil)
	if err != nil {
		return err
	}
	go st.onlyCancel()
	select {
	case <-s.done:
		err = s.err
	case <-st.ctx.Done():
		err = context.Cause(st.ctx)
	}
	if err == nil {
		err = st.finish(&boxv1.Frame{Body: &boxv1.Frame_Result{Result: &boxv1.Result{Manifest: s.manifest}}})
	}
	b.end(st, err)
	return err
}

// save begins a checkpoint, or joins the one of that key. Only the same key joins: another client
// may have written since the disk was copied.
func (b *Box) save(ctx context.Context, key string) *saving {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.saves[key]; s != nil {
		s.waiting++
		return s
	}
	s := &saving{key: key, waiting: 1, long: make(chan struct{}), done: make(chan struct{})}
	ctx, s.cancel = context.WithCancelCause(ctx)
	if key != "" {
		b.saves[key] = s
	}
	go b.commit(ctx, s)
	return s
}

func (b *Box) commit(ctx context.Context, s *saving) {
	longest := b.srv.longest
	ctx, stop := context.WithTimeoutCause(ctx, longest,
		errs.Errorf("checkpoint", errkind.Deadline, "the session could not be saved within %s", longest))
	defer stop()
	tell := time.AfterFunc(b.srv.quick, func() { close(s.long) })
	defer tell.Stop()
	m, err := b.gate.Checkpoint(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	s.manifest, s.err = m, err
	b.mu.Lock()
	b.forget(s)
	b.mu.Unlock()
	close(s.done)
}

// forget has the next opening with the key begin anew; Box.mu is held.
func (b *Box) forget(s *saving) {
	if b.saves[s.key] == s {
		delete(b.saves, s.key)
	}
}

// leave ends the checkpoint that nobody waits for any more, and waits for its end.
func (b *Box) leave(s *saving) {
	b.mu.Lock()
	s.waiting--
	last := s.waiting == 0
	if last {
		b.forget(s)
	}
	b.mu.Unlock()
	if last {
		s.cancel(errCancelled)
		<-s.done
	}
}
