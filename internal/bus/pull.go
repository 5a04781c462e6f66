package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A Consumer asks the server for exactly as many messages as it has free
// workers, so that no message waits in a buffer while its acknowledgement
// time runs. One subscription lives until something goes wrong with it; then
// supervise looks at the consumer on the server and starts another.

var (
	errReconnected = errors.New("the connection was made anew")
	errSilent      = errors.New("no message and no heartbeat came")
	errStalled     = errors.New("messages are pending and none is delivered")
	errMissing     = errors.New("the consumer does not exist on the server")
)

const (
	pullExpires = 30 * time.Second
	lagChecks   = 6 // heartbeats in a row without a delivery while messages are pending
	// headless is longer than a consumer of a healthy group is without a
	// leader: an election takes 4 to 9 s.
	headless = 12 * time.Second
)

func (k *Consumer) supervise(ctx context.Context) {
	wait := 50 * time.Millisecond
	var lost time.Time // since when the consumer's leader is not found
	for ctx.Err() == nil {
		began := time.Now()
		err := k.pulls(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > 10*time.Second {
			wait = 50 * time.Millisecond
		}
		k.log.Info("consumer starts again", "because", err)
		switch herr := k.heal(ctx, err, lost); {
		case herr == nil:
			lost = time.Time{}
		case !away(herr) || !k.conn.nc.IsConnected():
			k.log.Warn("consumer cannot be healed yet", "error", herr)
			lost = time.Time{}
		default:
			if lost.IsZero() {
				lost = began
			}
			k.log.Warn("consumer has no leader", "since", lost, "error", herr)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, time.Second)
	}
}

// pulls is the life of one subscription.
func (k *Consumer) pulls(ctx context.Context) error {
	inbox := k.conn.nc.NewInbox()
	sub, err := k.conn.nc.Subscribe(inbox, k.receive)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	k.mu.Lock()
	k.outstanding, k.heard = 0, time.Now()
	k.mu.Unlock()
	select { // of an earlier subscription
	case <-k.trouble:
	default:
	}
	defer k.conn.onReconnect(func() { k.report(errReconnected) })()
	tick := time.NewTicker(k.spec.Heartbeat)
	defer tick.Stop()
	var watch lag
	for {
		if err := k.pull(inbox); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-k.trouble:
			return err
		case <-k.wake:
		case <-tick.C:
			if err := k.check(ctx, &watch); err != nil {
				return err
			}
		}
	}
}

// pull asks for as many messages as there are idle workers, in halves so that
// requests stay few.
func (k *Consumer) pull(inbox string) error {
	k.mu.Lock()
	free := k.spec.Workers - k.outstanding - len(k.held)
	if free <= 0 || k.outstanding > 0 && free < (k.spec.Workers+1)/2 {
		k.mu.Unlock()
		return nil
	}
	k.outstanding += free
	k.mu.Unlock()
	body, err := json.Marshal(struct {
		Batch     int           `json:"batch"`
		Expires   time.Duration `json:"expires"`
		Heartbeat time.Duration `json:"idle_heartbeat"`
	}{free, max(pullExpires, 3*k.spec.Heartbeat), k.spec.Heartbeat})
	if err != nil {
		return err
	}
	subject := "$JS.API.CONSUMER.MSG.NEXT." + k.spec.Stream + "." + k.spec.Durable
	return k.conn.nc.PublishRequest(subject, inbox, body)
}

// receive takes a message or a status from the server.
func (k *Consumer) receive(raw *nats.Msg) {
	if status := raw.Header.Get("Status"); status != "" && len(raw.Data) == 0 {
		k.status(status, raw.Header)
		return
	}
	meta, err := raw.Metadata()
	if err != nil {
		k.log.Warn("dropped what is no stored message", "subject", raw.Subject, "error", err)
		return
	}
	m := &Msg{
		Subject: raw.Subject, Header: raw.Header, Data: raw.Data, Stream: meta.Stream,
		Sequence: meta.Sequence.Stream, Deliveries: int(meta.NumDelivered), Stored: meta.Timestamp,
		ack: raw.Reply, since: time.Now(),
	}
	k.mu.Lock()
	k.heard = m.since
	k.received++
	k.outstanding = max(k.outstanding-1, 0)
	k.held[m] = struct{}{}
	k.mu.Unlock()
	select {
	case k.work <- m:
	case <-k.done:
	}
}

func (k *Consumer) status(code string, h nats.Header) {
	k.mu.Lock()
	k.heard = time.Now()
	k.mu.Unlock()
	switch code {
	case "100": // heartbeat
	case "404", "408": // a pull request ended
		pending, err := strconv.Atoi(h.Get("Nats-Pending-Messages"))
		k.mu.Lock()
		if err != nil {
			pending = k.outstanding
		}
		k.outstanding = max(k.outstanding-pending, 0)
		k.mu.Unlock()
		k.poke()
	case "503":
		k.report(errMissing)
	default:
		k.report(fmt.Errorf("the server ended the request: %s %s", code, h.Get("Description")))
	}
}

func (k *Consumer) report(err error) {
	select {
	case k.trouble <- err:
	default:
	}
}

// lag is what check remembers from one heartbeat to the next.
type lag struct {
	received uint64
	count    int
}

// check finds silence, and a consumer that holds back messages.
func (k *Consumer) check(ctx context.Context, l *lag) error {
	k.mu.Lock()
	silent := time.Since(k.heard) > 2*k.spec.Heartbeat+k.spec.Heartbeat/2 && k.outstanding > 0
	waiting := k.outstanding > 0
	received := k.received
	k.mu.Unlock()
	if silent {
		return errSilent
	}
	info, err := k.info(ctx) // also keeps the floor fresh
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return errMissing
	}
	k.mu.Lock()
	moved := k.received != l.received
	k.mu.Unlock()
	if err != nil || moved || !waiting || info.NumPending == 0 || info.NumAckPending >= k.spec.MaxPending {
		*l = lag{received: received}
		return nil
	}
	if l.count++; l.count >= lagChecks {
		return errStalled
	}
	return nil
}

func (k *Consumer) info(ctx context.Context) (*jetstream.ConsumerInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var info jetstream.ConsumerInfo
	err := k.conn.api(ctx, "CONSUMER.INFO."+k.spec.Stream+"."+k.spec.Durable, nil, &info)
	if err != nil {
		if errs.Is(err, errkind.NotFound) {
			return nil, jetstream.ErrConsumerNotFound
		}
		return nil, err
	}
	k.mu.Lock()
	k.floor = max(k.floor, info.AckFloor.Stream)
	k.mu.Unlock()
	return &info, nil
}

// heal has the consumer recreated if it is missing, stalled, or was found
// without a leader for long.
func (k *Consumer) heal(ctx context.Context, cause error, lost time.Time) error {
	gone := false
	if !errors.Is(cause, errStalled) {
		_, err := k.info(ctx)
		gone = away(err) && !lost.IsZero() && time.Since(lost) > headless
		if !gone && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return err
		}
	}
	k.mu.Lock()
	floor := k.floor
	k.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return k.conn.recreate(ctx, recreateRequest{Stream: k.spec.Stream, Durable: k.spec.Durable, Floor: floor, Stalled: errors.Is(cause, errStalled), Headless: gone})
}
