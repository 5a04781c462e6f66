package sdk

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/schemas/errkind"
)

// A login that is refused so often, for so long, is shut out, and not merely early: the bus refuses
// logins also in the moment in which it begins to know who is let in.
const (
	shutRefusals = 3
	shutAfter    = 2 * time.Second
)

// refusedLogin is what identity tells to nobody but its log: a stranger must not learn which logins
// there are.
const refusedLogin = "the bus refuses this login now: it is suspended, removed or not known; identity's log and the operator know why"

func errShut(err error) error {
	return &Error{Kind: errkind.Denied, Reason: refusedLogin, Cause: err}
}

// shut is what the bus answered to the logins since the connection was lost.
type shut struct {
	refusals int
	since    time.Time
	why      error // nil: not shut out
}

// refused counts a login that the bus refused. It ends what waits when the client is shut out.
func (c *Client) refused(err error, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shut.refusals++; c.shut.refusals == 1 {
		c.shut.since = now
	}
	if c.shut.why != nil || c.shut.refusals < shutRefusals || now.Sub(c.shut.since) < shutAfter {
		return
	}
	c.shut.why = errShut(err)
	for st := range c.streams {
		st.finish(c.shut.why)
	}
	for d := range c.denials {
		d.cancel(c.shut.why)
	}
}

// asyncError hears what the bus refuses: a login, or a permission, which is handed to the request that
// met it and would otherwise look like a time-out.
func (c *Client) asyncError(err error) {
	switch {
	case errors.Is(err, nats.ErrAuthorization):
		c.refused(err, time.Now())
	case errors.Is(err, nats.ErrPermissionViolation):
		c.forbidden(err)
	}
}

// whileLetIn returns a context that ends when the client is shut out, also if it reconnected in
// between, and what stops watching.
func (c *Client) whileLetIn(ctx context.Context) (context.Context, func()) {
	return c.watch(ctx, denial{lasting: true})
}
