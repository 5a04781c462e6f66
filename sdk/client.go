package sdk

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Client is one login to the bus. It reconnects by itself for as long as it
// is not closed, and is safe for concurrent use. When the bus refuses the login
// for about 2 s, streams end and calls fail with ErrDenied, further ones at
// once, until it is let in again.
type Client struct {
	cfg Config
	me  subjects.Caller
	nc  *nats.Conn
	// sender seals requests to identity.
	sender *seal.Box
	frames deliveries

	mu      sync.Mutex
	key     string               // identity's curve key
	streams map[*stream]struct{} // open streams, told about reconnects
	lives   int                  // reconnects so far
	stop    context.CancelFunc
	ctx     context.Context // ends with Close
	denials map[*denial]struct{}
	shut    shut
}

// Connect logs in. Errors: Invalid (configuration), Unavailable (nobody
// listens), Denied (the login was refused).
func Connect(ctx context.Context, cfg Config) (*Client, error) {
	cfg, me, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	sender, err := seal.RandomBox()
	if err != nil {
		return nil, wrap("connect to the bus", err)
	}
	c := &Client{cfg: cfg, me: me, sender: sender, streams: map[*stream]struct{}{}, denials: map[*denial]struct{}{}}
	c.ctx, c.stop = context.WithCancel(context.Background())
	opts, err := cfg.login(me)
	if err != nil {
		return nil, err
	}
	opts = append(opts,
		nats.ReconnectHandler(func(*nats.Conn) { c.reconnected() }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { c.asyncError(err) }))
	type result struct {
		nc  *nats.Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		nc, err := nats.Connect(cfg.URL, opts...)
		done <- result{nc, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			c.stop()
			if errors.Is(r.err, nats.ErrAuthorization) {
				r.err = errShut(r.err)
			}
			return nil, wrap("connect to the bus as "+cfg.Name, r.err)
		}
		c.nc = r.nc
		return c, nil
	case <-ctx.Done():
		c.stop()
		go func() {
			if r := <-done; r.nc != nil {
				r.nc.Close()
			}
		}()
		return nil, wrap("connect to the bus as "+cfg.Name, ctx.Err())
	}
}

// Close ends the connection and every stream on it. Sessions and running
// processes go on.
func (c *Client) Close() {
	c.stop()
	c.nc.Close()
}

// NATS returns the connection, for callers that speak on the bus themselves.
func (c *Client) NATS() *nats.Conn { return c.nc }

// Identity returns the bus identity that the client logged in as.
func (c *Client) Identity() subjects.Caller { return c.me }

// reconnected tells every open stream that frames may have been lost, and
// every request under way that its answer may have been.
func (c *Client) reconnected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lives++
	c.shut = shut{}
	for st := range c.streams {
		st.lose(errReconnected)
	}
	for d := range c.denials {
		if !d.lasting {
			d.cancel(interrupted())
		}
	}
}

// track has a stream told of the next reconnect, and at once of one that came between its request and
// now: frames may have been missed.
func (c *Client) track(st *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams[st] = struct{}{}
	if st.born != c.lives {
		st.lose(errReconnected)
	}
	if c.shut.why != nil {
		st.finish(c.shut.why)
	}
}

// life counts the connections so far.
func (c *Client) life() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lives
}

func (c *Client) untrack(st *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.streams, st)
}

// denial is one request under way that wants to know why no answer will come.
type denial struct {
	subject string
	lasting bool // goes on over reconnects
	cancel  context.CancelCauseFunc
}

// forbidden ends the request that met a permission violation.
func (c *Client) forbidden(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for d := range c.denials {
		if d.subject != "" && strings.Contains(err.Error(), `"`+d.subject+`"`) {
			d.cancel(err)
		}
	}
}

// underWay returns a context that ends when the bus refuses a publish on
// subject, the connection was interrupted or the client is shut out, and what
// stops watching.
func (c *Client) underWay(ctx context.Context, subject string) (context.Context, func()) {
	return c.watch(ctx, denial{subject: subject})
}

func (c *Client) watch(ctx context.Context, d denial) (context.Context, func()) {
	ctx, d.cancel = context.WithCancelCause(ctx)
	c.mu.Lock()
	c.denials[&d] = struct{}{}
	if c.shut.why != nil {
		d.cancel(c.shut.why)
	}
	c.mu.Unlock()
	return ctx, func() {
		c.mu.Lock()
		delete(c.denials, &d)
		c.mu.Unlock()
		d.cancel(nil)
	}
}
