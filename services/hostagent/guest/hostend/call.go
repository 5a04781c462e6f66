package hostend

import (
	"context"
	"fmt"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// answer gathers the result of a call; the frames after it are the caller's.
type answer struct {
	op   string
	body []byte
	done chan struct{} // closed when the result is complete or err is set
	once sync.Once
	err  error
}

func newAnswer(op string) *answer { return &answer{op: op, done: make(chan struct{})} }

// settled says whether there is an answer.
func (a *answer) settled() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

func (a *answer) settle(err error) {
	a.once.Do(func() {
		a.err = err
		close(a.done)
	})
}

// frame takes result and error frames; over says that the answer is complete.
func (a *answer) frame(f wire.Frame) (over bool, err error) {
	switch f.Type {
	case wire.TypeError:
		a.settle(guestError(a.op, f.Payload))
	case wire.TypeResult:
		if len(a.body)+len(f.Payload) > wire.MaxMessage {
			return false, fmt.Errorf("%w: result above 1 MiB", ErrProtocol)
		}
		if a.settled() {
			return true, nil
		}
		a.body = append(a.body, f.Payload...)
		if f.Flags&wire.FlagMore != 0 {
			return false, nil
		}
		a.settle(nil)
	default:
		return false, nil
	}
	return true, nil
}

func (a *answer) fail(err error) { a.settle(fmt.Errorf("%s: %w", a.op, err)) }

// wait returns the decoded result.
func (a *answer) wait(ctx context.Context, result any) error {
	select {
	case <-a.done:
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", a.op, ctx.Err())
	}
	if a.err != nil || result == nil {
		return a.err
	}
	if err := decode(a.body, result); err != nil {
		return fmt.Errorf("%s: %w", a.op, err)
	}
	return nil
}

// unary is a call with one answer and nothing else.
type unary struct {
	conn   *Conn
	answer *answer
}

func (u *unary) frame(f wire.Frame) error {
	over, err := u.answer.frame(f)
	if over {
		u.conn.forget(f.Stream)
	}
	return err
}

func (u *unary) lost(err error) { u.answer.fail(err) }

// call sends a request and waits for its answer.
func (c *Conn) call(ctx context.Context, op, method string, params, result any) error {
	u := &unary{conn: c, answer: newAnswer(op)}
	id, err := c.open(ctx, method, params, u)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	err = u.answer.wait(ctx, result)
	if ctx.Err() != nil {
		c.cancel(id)
	}
	return err
}
