package bus

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go/jetstream"
)

type recreateRequest struct {
	Stream   string `json:"stream"`
	Durable  string `json:"durable"`
	Floor    uint64 `json:"floor"`
	Stalled  bool   `json:"stalled"`
	Headless bool   `json:"headless"` // no leader was found for it for longer than an election takes
}

// Keeper keeps the bus as it is declared: it reconciles at start, looks again
// at every interval, and recreates consumers for the services that own them,
// which may not create consumers themselves.
type Keeper struct {
	conn *Conn
	svc  *Service
	decl Declaration
	quit context.CancelFunc
	done chan struct{}
}

// StartKeeper reconciles and goes on watching. c must be logged in as
// subjects.Keeper(). In a cluster it waits, within ctx, until JetStream has a
// leader and enough nodes for the replicas declared. Several keepers of one
// declaration may run at once, one beside each server: what they do is
// idempotent.
func StartKeeper(ctx context.Context, c *Conn, d Declaration, every time.Duration) (*Keeper, error) {
	if err := c.reconcileWithin(ctx, d); err != nil {
		return nil, err
	}
	var err error
	k := &Keeper{conn: c, decl: d, done: make(chan struct{})}
	if k.svc, err = c.Serve(ctx, ServiceConfig{Name: "bus", Description: "Keeps streams and consumers as declared."}); err != nil {
		return nil, err
	}
	if err := k.svc.HandleRaw("recreate", k.recreate); err != nil {
		return nil, err
	}
	ctx, k.quit = context.WithCancel(context.WithoutCancel(ctx))
	go k.watch(ctx, every)
	return k, nil
}

// answered waits, within ctx, until JetStream answers at all: what is asked before a cluster has a
// leader is never answered.
func (c *Conn) answered(ctx context.Context) {
	for ctx.Err() == nil {
		try, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		_, err := c.js.AccountInfo(try)
		cancel()
		if err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// reconcileWithin tries again while it is too early.
func (c *Conn) reconcileWithin(ctx context.Context, d Declaration) error {
	c.answered(ctx)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		changes, err := Reconcile(ctx, c, d)
		for _, line := range changes {
			c.log.Info(line)
		}
		if err == nil || ctx.Err() != nil || !tooEarly(err) {
			return err
		}
		c.log.Debug("the bus cannot be brought to its declaration yet", "error", err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// tooEarly tells whether nodes of the cluster or its leader are missing.
func tooEarly(err error) bool {
	return errs.Is(err, errkind.Unavailable) || errs.Is(err, errkind.Deadline) || errs.Is(err, errkind.Exhausted)
}

func (k *Keeper) watch(ctx context.Context, every time.Duration) {
	defer close(k.done)
	if every <= 0 {
		every = 30 * time.Second
	}
	back := make(chan struct{}, 1) // a node that returned may lack something
	defer k.conn.onReconnect(func() { poke(back) })()
	wait := every
	for {
		select {
		case <-ctx.Done():
			return
		case <-back:
		case <-time.After(wait):
		}
		changes, err := Reconcile(ctx, k.conn, k.decl)
		for _, line := range changes {
			k.conn.log.Warn("the bus differed from its declaration", "change", line)
		}
		switch {
		case err == nil || ctx.Err() != nil:
			wait = every
		case tooEarly(err):
			k.conn.log.Warn("the bus cannot be compared with its declaration now", "error", err)
			wait = min(2*time.Second, every)
		default:
			k.conn.log.Error("the bus differs from its declaration", "error", err)
			wait = every
		}
	}
}

// Stop ends the watch.
func (k *Keeper) Stop(ctx context.Context) {
	k.quit()
	<-k.done
	_ = k.svc.Stop(ctx)
}

// recreate replaces the caller's own consumer. Of a stalled one the position
// is kept; of a vanished one, or one without a leader, that which its owner
// saw last, so that only what was handled since is handled again.
func (k *Keeper) recreate(ctx context.Context, r Request, body []byte) ([]byte, error) {
	const op = "recreate consumer"
	var req recreateRequest
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	i := slices.IndexFunc(k.decl.Consumers, func(d subjects.Consumer) bool {
		return d.Durable == req.Durable && d.Stream == req.Stream
	})
	if i < 0 {
		return nil, errs.E(op, errkind.NotFound, req.Durable, "it is not declared")
	}
	d := k.decl.Consumers[i]
	if d.Owner != r.Caller.Service {
		return nil, errs.E(op, errkind.Denied, req.Durable, "it belongs to "+d.Owner)
	}
	read, cancel := context.WithTimeout(ctx, declareWait)
	defer cancel()
	cons, err := k.conn.js.Consumer(read, d.Stream, d.Durable)
	switch {
	case err == nil && !req.Stalled:
		return nil, nil // somebody was faster
	case err == nil:
		req.Floor = max(req.Floor, cons.CachedInfo().AckFloor.Stream)
		if err := k.conn.js.DeleteConsumer(ctx, d.Stream, d.Durable); err != nil {
			return nil, k.conn.declareFailed(op, d.Durable, "delete the stalled one", err)
		}
	case req.Headless && away(err):
		if err := k.behead(ctx, d); err != nil {
			return nil, err
		}
	case !errors.Is(err, jetstream.ErrConsumerNotFound):
		return nil, k.conn.declareFailed(op, d.Durable, "read it", err)
	}
	cfg := consumerConfig(d)
	if s, ok := k.stream(d.Stream); ok && s.Retention != subjects.WorkQueue && req.Floor > 0 {
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, req.Floor+1
	}
	if _, err := k.conn.js.CreateConsumer(ctx, d.Stream, cfg); err != nil && !errors.Is(err, jetstream.ErrConsumerExists) {
		return nil, k.conn.declareFailed(op, d.Durable, "create it", err)
	}
	k.conn.log.Warn("recreated consumer", "consumer", d.Durable, "after", req.Floor, "stalled", req.Stalled, "headless", req.Headless)
	return nil, nil
}

// behead deletes a consumer that has no leader although its stream has one.
// A consumer in memory gets into that state when a node that was restarted,
// and so lost its part, is followed by another before it was told again.
func (k *Keeper) behead(ctx context.Context, d subjects.Consumer) error {
	const op = "recreate consumer"
	s, err := k.conn.js.Stream(ctx, d.Stream)
	if err != nil {
		return k.conn.declareFailed(op, d.Durable, "read its stream", err)
	}
	if c := s.CachedInfo().Cluster; c != nil && c.Leader == "" {
		return errs.E(op, errkind.Unavailable, d.Durable, "its stream has no leader either")
	}
	if err := k.conn.js.DeleteConsumer(ctx, d.Stream, d.Durable); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return k.conn.declareFailed(op, d.Durable, "delete the one without a leader", err)
	}
	return nil
}

func (k *Keeper) stream(name string) (subjects.Stream, bool) {
	i := slices.IndexFunc(k.decl.Streams, func(s subjects.Stream) bool { return s.Name == name })
	if i < 0 {
		return subjects.Stream{}, false
	}
	return k.decl.Streams[i], true
}

// recreate asks the keeper.
func (c *Conn) recreate(ctx context.Context, req recreateRequest) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	_, err = c.CallRaw(ctx, subjects.RPC("bus", "recreate", c.self), body, JSON)
	return err
}
