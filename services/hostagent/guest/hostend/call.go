package hostend

import (
	"context"
	"fmt"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// answer gathers the result of a call; the frames after it are the caller's.
type answer struct {
	op   string
	body []byte
	done chan struct{} // closed when body or err is set
	err  error
}

func newAnswer(op string) *answer { return &answer{op: op, done: make(chan struct{})} }

// frame takes result and error frames; over says that the answer is complete.
func (a *answer) frame(f wire.Frame) (over bool, err error) {
	select {
	case <-a.done:
		return true, nil
	default:
	}
	switch f.Type {
	case wire.TypeError:
		a.err = guestError(a.op, f.Payload)
	case wire.TypeResult:
		if len(a.body)+len(f.Payload) > wire.MaxMessage {
			return false, fmt.Errorf("%w: result above 1 MiB", ErrProtocol)
		}
		a.body = append(a.body, f.Payload...)
		if f.Flags&wire.FlagMore != 0 {
			return false, nil
		}
	default:
		return false, nil
	}
	close(a.done)
	return true, nil
}

func (a *answer) fail(err error) {
	select {
	case <-a.done:
	default:
		a.err = fmt.Errorf("%s: %w", a.op, err)
		close(a.done)
	}
}

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
