package scheduler

import (
	"context"
	"errors"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
)

// askAgain is the longest pause before a host that nobody serves is asked again.
const askAgain = time.Second

// callHost calls a method of a host, again when the host joins with another
// boot meanwhile: what was asked of the process before is lost with it, and
// commands to hosts are idempotent by their epoch. While nobody serves the host
// it waits, as long as the host's lease runs.
func callHost[R proto.Message](ctx context.Context, l *leader, h ids.Host, method string, req proto.Message) (R, error) {
	for pause := l.cfg.RetryMin; ; pause = min(2*pause, askAgain) {
		boot, ok := l.leases.of(h)
		if !ok {
			var none R
			return none, errs.Errorf(method, errkind.Unavailable, "host %s holds no lease", h)
		}
		resp, err := callBoot[R](ctx, l, h, boot, method, req)
		if err == nil || ctx.Err() != nil || boot.held.Err() == nil && !errors.Is(err, nats.ErrNoResponders) {
			return resp, err
		}
		select {
		case <-boot.held.Done():
			pause = l.cfg.RetryMin
		case <-time.After(pause):
		case <-ctx.Done():
			return resp, err
		}
	}
}

// callBoot asks the boot that holds the lease, and gives up when another one has
// taken its place.
func callBoot[R proto.Message](ctx context.Context, l *leader, h ids.Host, b lease, method string, req proto.Message) (R, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.held, cancel)()
	within := l.cfg.times.answerWithin
	for {
		one, done := context.WithTimeout(ctx, within)
		asked := time.Now()
		resp, err := bus.InvokeHost[R](one, l.conn, h, method, req)
		done()
		// The host counts the same time, and may say a little earlier that it is over.
		late := errs.Is(err, errkind.Deadline) && time.Since(asked) > within*9/10
		if !late || ctx.Err() != nil {
			return resp, err
		}
	}
}
