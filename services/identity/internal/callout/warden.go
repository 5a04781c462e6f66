package callout

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
)

const (
	// Servers answer at once; one that is silent so long is not waited for, a later round asks it again.
	quiet   = 250 * time.Millisecond
	silence = time.Second
	// round is how often is looked without a change: for what an earlier round missed.
	round = 30 * time.Second
)

// page is how many connections a server lists at a time; tests make it small.
var page = 1024

// again are the times after a change at which is looked once more: a login that was under way during
// the change, or another replica that has not heard of it, may have let somebody in meanwhile.
var again = []time.Duration{0, 300 * time.Millisecond, time.Second, 3 * time.Second, 6 * time.Second}

// Connected is one connection that the callout let in.
type Connected struct {
	Caller subjects.Caller
	Mark   Mark
}

// Over reports whether a connection may not be any more.
type Over func(Connected) (why string, is bool)

// Warden ends connections.
type Warden struct {
	nc  *nats.Conn
	log *slog.Logger
}

// NewWarden makes one; nc must be logged in as subjects.Warden.
func NewWarden(nc *nats.Conn, log *slog.Logger) *Warden { return &Warden{nc, log} }

// Watch ends, until ctx ends, every connection that is over: within a second after changed was closed,
// and in rounds. changed returns a channel that the next change closes; over judges by what holds
// when it is called.
func (w *Warden) Watch(ctx context.Context, changed func() <-chan struct{}, over func() Over) {
	next := changed()
	for i := 0; ; i++ {
		wait := round
		if i < len(again) {
			wait = again[i]
		}
		select {
		case <-ctx.Done():
			return
		case <-next:
			next, i = changed(), 0
		case <-time.After(wait):
		}
		if _, err := w.Sweep(ctx, over()); err != nil && ctx.Err() == nil {
			w.log.Warn("connections of the bus cannot be looked at now", "error", err)
		}
	}
}

// listing is how a server answers CONNZ.
type listing struct {
	Server struct {
		ID string `json:"id"`
	} `json:"server"`
	Data struct {
		Total       int `json:"total"`
		Connections []struct {
			CID  uint64   `json:"cid"`
			Name string   `json:"authorized_user"` // of whom the callout let in; an nkey of others
			Tags []string `json:"tags"`
		} `json:"connections"`
	} `json:"data"`
}

type ask struct {
	Auth    bool   `json:"auth"`
	Account string `json:"acc"`
	Offset  int    `json:"offset"`
	Limit   int    `json:"limit"`
}

// Sweep looks at every connection that the callout let in, on all servers, and ends those that are over.
func (w *Warden) Sweep(ctx context.Context, over Over) (ended int, err error) {
	err = w.all(ctx, func(first listing) error {
		lists, err := w.whole(ctx, first)
		for _, l := range lists {
			n, eerr := w.end(l, over)
			ended, err = ended+n, errors.Join(err, eerr)
		}
		return err
	})
	if err == nil {
		err = w.nc.FlushTimeout(silence)
	}
	if err != nil {
		return ended, errs.E("end connections", errkind.Unavailable, "", err)
	}
	return ended, nil
}

// all asks every server for its first connections.
func (w *Warden) all(ctx context.Context, each func(listing) error) error {
	body, err := json.Marshal(ask{Auth: true, Account: "APP", Limit: page})
	if err != nil {
		return err
	}
	sub, err := w.nc.SubscribeSync(w.nc.NewRespInbox())
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := w.nc.PublishRequest("$SYS.REQ.SERVER.PING.CONNZ", sub.Subject, body); err != nil {
		return err
	}
	var failed error
	for wait, n := silence, 0; ; n++ {
		m, err := sub.NextMsg(wait)
		if err != nil && n > 0 || ctx.Err() != nil {
			return failed
		}
		if err != nil {
			return err
		}
		wait = quiet
		var l listing
		if err := json.Unmarshal(m.Data, &l); err != nil {
			failed = errors.New("a server's list of connections cannot be read")
			continue
		}
		failed = errors.Join(failed, each(l))
	}
}

// whole is the list of one server, of which the first part is there.
func (w *Warden) whole(ctx context.Context, first listing) ([]listing, error) {
	out := []listing{first}
	for l, n := first, 0; ; {
		n += len(l.Data.Connections)
		if len(l.Data.Connections) == 0 || n >= l.Data.Total {
			return out, nil
		}
		var err error
		if l, err = w.more(ctx, l.Server.ID, n); err != nil {
			return out, err
		}
		out = append(out, l)
	}
}

// more asks one server for further connections.
func (w *Warden) more(ctx context.Context, server string, offset int) (l listing, err error) {
	if !subjects.Match("*", server) {
		return l, errors.New("a server has no name")
	}
	body, err := json.Marshal(ask{Auth: true, Account: "APP", Offset: offset, Limit: page})
	if err != nil {
		return l, err
	}
	ctx, cancel := context.WithTimeout(ctx, silence)
	defer cancel()
	m, err := w.nc.RequestWithContext(ctx, "$SYS.REQ.SERVER."+server+".CONNZ", body)
	if err == nil {
		err = json.Unmarshal(m.Data, &l)
	}
	return l, err
}

// end ends those of a list that are over.
func (w *Warden) end(l listing, over Over) (n int, err error) {
	for _, c := range l.Data.Connections {
		caller, err := subjects.ParseName(c.Name)
		if err != nil {
			continue // the server knows it itself
		}
		conn := Connected{Caller: caller}
		if len(c.Tags) > 0 {
			conn.Mark = Mark(c.Tags[0])
		}
		why, is := over(conn)
		if !is {
			continue
		}
		kick, err := json.Marshal(map[string]uint64{"cid": c.CID})
		if err != nil {
			return n, err
		}
		// A server does nothing that it is to tell nobody of. Whether it was done the next round sees.
		if err := w.nc.PublishRequest("$SYS.REQ.SERVER."+l.Server.ID+".KICK", subjects.Warden().Inbox()+".ended", kick); err != nil {
			return n, err
		}
		w.log.Info("a connection was ended", "caller", c.Name, "why", why)
		n++
	}
	return n, nil
}
