package pool

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"google.golang.org/protobuf/proto"
)

const (
	requestLimit = 4096
	stopTime     = 500 * time.Millisecond
	flushTime    = 5 * time.Second
)

// leader is one term of leadership. When its context ends it does nothing more.
type leader struct {
	*server
	t   *tenure
	ctx context.Context
}

// lead leads for one tenure.
func (s *server) lead(ctx context.Context, t *tenure) error {
	lctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := &leader{server: s, t: t, ctx: lctx}
	svc, err := l.serve(ctx)
	if err != nil {
		return err
	}
	if !s.election.keep(lctx, t) {
		s.election.leave(t)
	}
	cancel()
	sctx, done := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer done()
	return svc.Stop(sctx)
}

// serve registers the methods of the service. Who may call what is the catalogue's word, checked by
// the bus before a handler runs.
func (l *leader) serve(ctx context.Context) (*bus.Service, error) {
	svc, err := l.conn.Serve(ctx, bus.ServiceConfig{Name: "pool", Limit: requestLimit,
		Description: "How many warm sandboxes each template has, and where."})
	if err != nil {
		return nil, err
	}
	for _, err := range []error{
		led(l, svc, "show", l.show),
	} {
		if err != nil {
			_ = svc.Stop(ctx)
			return nil, err
		}
	}
	if err := svc.Announce(); err != nil {
		l.log.Warn("cannot say that this instance serves; callers ask again by themselves", "error", err)
	}
	return svc, nil
}

// led serves a method for as long as this instance leads; then the next leader is asked.
func led[Req, Resp proto.Message](l *leader, svc *bus.Service, method string, h func(context.Context, bus.Request, Req) (Resp, error)) error {
	return bus.Handle(svc, method, func(ctx context.Context, r bus.Request, req Req) (Resp, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(l.ctx, cancel)()
		resp, err := h(ctx, r, req)
		if l.ctx.Err() != nil {
			var none Resp
			return none, errs.E("pool."+method, errkind.NotLeader, "", "this instance does not lead any more")
		}
		return resp, err
	})
}

func (l *leader) show(context.Context, bus.Request, *poolv1.ShowRequest) (*poolv1.ShowReply, error) {
	return &poolv1.ShowReply{}, nil
}
