package replica

import (
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
	news chan struct{} // closed and made anew at each answer
}

type contact struct {
	sent    time.Time
	term    uint64
	lastLog uint64
}

func newContacts() *contacts {
	return &contacts{seen: map[raft.ServerID]contact{}, news: make(chan struct{})}
}

func (c *contacts) answered(id raft.ServerID, n contact) {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.seen[id]
	if n.term < old.term || n.term == old.term && n.sent.Before(old.sent) {
		return
	}
	c.seen[id] = n
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

// watched is a transport that notes who answers.
type watched struct {
	*raft.NetworkTransport
	contacts *contacts
}

// AppendEntries implements raft.Transport; heartbeats go this way too.
func (w *watched) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	sent := time.Now()
	if err := w.NetworkTransport.AppendEntries(id, target, args, resp); err != nil {
		return err
	}
	if resp.Term == args.Term {
		w.contacts.answered(id, contact{sent: sent, term: args.Term, lastLog: resp.LastLog})
	}
	return nil
}
