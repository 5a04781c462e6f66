package replica

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// contacts remembers, for each other replica, the newest request that it
// answered in the leader's term, by the time at which the request was SENT.
// Raft's own notion of contact is the time at which an answer was read: after
// a pause of this process an old answer, still in the socket, counts as fresh
// there, and a deposed leader would verify itself.
type contacts struct {
	mu   sync.Mutex
	seen map[raft.ServerID]contact
	down map[raft.ServerID]bool // the last call failed
	news chan struct{}          // closed and made anew at each answer
	// heir is who leadership is handed to, heirUntil how long calls to it may take.
	heir      raft.ServerID
	heirUntil time.Time
}

type contact struct {
	sent    time.Time
	term    uint64
	lastLog uint64
}

func newContacts() *contacts {
	return &contacts{seen: map[raft.ServerID]contact{}, down: map[raft.ServerID]bool{}, news: make(chan struct{})}
}

func (c *contacts) answered(id raft.ServerID, n contact) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down[id] = false
	if old := c.seen[id]; n.term > old.term || n.term == old.term && n.sent.After(old.sent) {
		c.seen[id] = n
	}
	close(c.news)
	c.news = make(chan struct{})
}

// changed is closed at the next answer.
func (c *contacts) changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.news
}

// of returns the newest contact with a replica in a term.
func (c *contacts) of(id raft.ServerID, term uint64) (contact, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.seen[id]
	return n, ok && n.term == term
}

// majority reports whether more than half of the voters, self among them,
// answered in this term a request sent at since or later.
func (c *contacts) majority(voters []raft.ServerID, self raft.ServerID, term uint64, since time.Time) bool {
	n := 0
	for _, id := range voters {
		if id == self {
			n++
		} else if at, ok := c.of(id, term); ok && !at.sent.Before(since) {
			n++
		}
	}
	return n > len(voters)/2
}

func (c *contacts) failed(id raft.ServerID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down[id] = true
}

// up says that a replica answered, but not as one that follows.
func (c *contacts) up(id raft.ServerID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down[id] {
		c.down[id] = false
		close(c.news)
		c.news = make(chan struct{})
	}
}

func (c *contacts) isDown(id raft.ServerID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down[id]
}

// hand says that leadership is handed to a replica now.
func (c *contacts) hand(id raft.ServerID, until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heir, c.heirUntil = id, until
}

// handing is when the transfer of leadership to a replica must have ended, if there is one.
func (c *contacts) handing(id raft.ServerID) (until time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.heirUntil, c.heir == id && time.Now().Before(c.heirUntil)
}

// watched is a transport that notes who answers.
type watched struct {
	*raft.NetworkTransport
	contacts *contacts
	worth    func(id raft.ServerID, term uint64) bool
}

// AppendEntries implements raft.Transport; heartbeats go this way too. Entries
// for a replica that is down wait here until a heartbeat reaches it: raft backs
// off by up to ten seconds after failed tries, and would not see it come back
// while its vote may be what a commit waits for. The one that leadership is
// handed to is not waited for: raft takes no entries until the call returns.
func (w *watched) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if !isHeartbeat(args) {
		for w.contacts.isDown(id) && w.worth(id, args.Term) {
			if _, ok := w.contacts.handing(id); ok {
				return errUnreachable
			}
			select {
			case <-w.contacts.changed():
			case <-time.After(50 * time.Millisecond): // it may not be worth it any more
			}
		}
	}
	sent := time.Now()
	if err := w.NetworkTransport.AppendEntries(id, target, args, resp); err != nil {
		w.contacts.failed(id)
		return err
	}
	if resp.Term == args.Term {
		w.contacts.answered(id, contact{sent: sent, term: args.Term, lastLog: resp.LastLog})
	} else {
		// It was told to take over, or was alone, and is a term ahead. Raft's heartbeat overlooks that,
		// entries do not: they must not wait, or it would never be heard and never hear again.
		w.contacts.up(id)
	}
	return nil
}

var errUnreachable = errors.New("the replica that leadership is handed to does not answer")

// TimeoutNow implements raft.Transport: the word to take over. It is given up in time, since raft takes
// no entries meanwhile; should it arrive yet, there is one more election.
func (w *watched) TimeoutNow(id raft.ServerID, target raft.ServerAddress, args *raft.TimeoutNowRequest, resp *raft.TimeoutNowResponse) error {
	until, ok := w.contacts.handing(id)
	if !ok {
		return errUnreachable
	}
	ctx, cancel := context.WithDeadline(context.Background(), until)
	defer cancel()
	var late raft.TimeoutNowResponse // of its own: a late answer must not be written to what raft reads
	err := await(ctx, func() error { return w.NetworkTransport.TimeoutNow(id, target, args, &late) })
	if err == nil {
		*resp = late
	}
	return err
}

// AppendEntriesPipeline implements raft.Transport by saying that there is none.
// Raft's own pipeline stands still for ever when a replica answers with a newer
// term, or refuses entries, while the next request is being sent: its reader is
// gone, its writer waits for the reader. That replica then gets no more entries
// from this leader, and raft cannot be shut down. Without it a request is sent
// when the one before is answered, with all entries that came meanwhile.
func (w *watched) AppendEntriesPipeline(raft.ServerID, raft.ServerAddress) (raft.AppendPipeline, error) {
	return nil, raft.ErrPipelineReplicationNotSupported
}

func isHeartbeat(a *raft.AppendEntriesRequest) bool {
	return len(a.Entries) == 0 && a.PrevLogEntry == 0 && a.PrevLogTerm == 0 && a.LeaderCommitIndex == 0
}
