package gate

import (
	"context"
	"log/slog"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

const (
	eventQueue = 4096
	eventTime  = 5 * time.Second
	noticeTime = 3 * time.Second
)

// outlet implements session.Outlet. Events are told beside the traffic: what the bus does not take is
// counted and left, because the audit log has it.
type outlet struct {
	conn  *bus.Conn
	host  ids.Host
	log   *slog.Logger
	queue chan event
	lost  func()
}

type event struct {
	subject string
	body    *egressv1.Event
	id      string
}

func newOutlet(conn *bus.Conn, host ids.Host, log *slog.Logger, lost func()) *outlet {
	return &outlet{conn: conn, host: host, log: log, queue: make(chan event, eventQueue), lost: lost}
}

// Event implements session.Outlet.
func (o *outlet) Event(name string, e *egressv1.Event) {
	subject := subjects.Session(ids.Tenant(e.GetSession().GetTenant()), ids.SessionKey(e.GetSession().GetSession()), name)
	select {
	case o.queue <- event{subject, e, name + "-" + e.GetRecord()}:
	default:
		o.lost()
	}
}

// Notice implements session.Outlet.
func (o *outlet) Notice(ctx context.Context, b *egressv1.Binding, notice []byte) error {
	ctx, cancel := context.WithTimeout(ctx, noticeTime)
	defer cancel()
	_, err := bus.InvokeHost[*egressv1.NoticeReply](ctx, o.conn, o.host, "notice",
		&egressv1.NoticeRequest{Session: b.GetSession(), Sandbox: b.GetSandbox(), Notice: notice})
	return err
}

// run publishes events until ctx ends, and then those that are left.
func (o *outlet) run(ctx context.Context) {
	for {
		select {
		case e := <-o.queue:
			o.publish(ctx, e)
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			for last.Err() == nil {
				select {
				case e := <-o.queue:
					o.publish(last, e)
				default:
					return
				}
			}
			return
		}
	}
}

func (o *outlet) publish(ctx context.Context, e event) {
	if !o.conn.Connected() {
		o.lost()
		return
	}
	f, err := o.conn.PublishAsync(ctx, e.subject, e.body, bus.WithID(e.id), bus.WithTime(e.body.GetAt().AsTime()))
	if err != nil {
		o.lost()
		return
	}
	go func() {
		wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), eventTime)
		defer cancel()
		if _, err := f.Wait(wait); err != nil {
			o.lost()
		}
	}()
}
