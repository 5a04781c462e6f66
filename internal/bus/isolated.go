package bus

import (
	"context"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// A node that lost the other nodes, but not its clients, would keep them for
// ever: they are connected, and reach nobody who is connected elsewhere. So it
// sends them away, and they go to the nodes that they know besides. It does
// not refuse them: when the others are not there for anybody, those who come
// back still reach one another here.

const (
	isolatedEvery = 250 * time.Millisecond
	// isolatedAgain is how often an isolated node sends away who came to it.
	isolatedAgain = 5 * time.Second
)

// watchRoutes sends clients away while fewer than a majority of the nodes are
// there. It begins when the streams are declared, and so when they were.
func (s *Server) watchRoutes(ctx context.Context, nodes int, isolated func()) {
	tick := time.NewTicker(isolatedEvery)
	defer tick.Stop()
	var sent time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s.ns.NumRemotes()+1 > nodes/2 {
			sent = time.Time{}
			continue
		}
		if !sent.IsZero() && time.Since(sent) < isolatedAgain {
			continue
		}
		sent = time.Now()
		isolated()
		s.sendAway()
	}
}

// sendAway ends the connections of clients from other processes.
func (s *Server) sendAway() {
	all, err := s.ns.Connz(&server.ConnzOptions{Limit: 1 << 16})
	if err != nil {
		return // without options that it could refuse, it does not happen
	}
	for _, c := range all.Conns {
		if c.Port != 0 { // in process it is the keeper, who has nowhere else to go
			_ = s.ns.DisconnectClientByID(c.Cid) // it may have gone by itself
		}
	}
}
