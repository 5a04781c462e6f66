package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/hashicorp/raft"
)

const (
	// maxPeers leaves room to replace members of a group of five one by one.
	maxPeers = 7
	// joinTime bounds how long a new replica may take to catch up before it is given up.
	joinTime = 2 * time.Minute
	// changeTime bounds one change of the group.
	changeTime = 10 * time.Second
	// transferTime bounds what a transfer of leadership that comes to nothing may hold up.
	transferTime = 2 * time.Second
	// nearEntries is how far behind a replica may be that takes over: a few requests' worth.
	nearEntries = 1024
)

// Verify returns nil if this replica was the leader at a moment after the
// call, and View shows everything whose Apply returned, at any replica, before
// the call. A request answered from View after it is linearizable.
func (r *Replica) Verify(ctx context.Context) error {
	const op = "verify leadership"
	since := time.Now()
	term, err := r.settle(ctx)
	if err != nil {
		return err
	}
	for {
		news := r.contacts.changed()
		if err := await(ctx, r.raft.VerifyLeader().Error); err != nil {
			return r.failed(op, err)
		}
		// Raft's own word is not enough: see contacts.
		if r.contacts.majority(r.voters(), raft.ServerID(r.cfg.ID), term, since) {
			break
		}
		select {
		case <-news:
		case <-ctx.Done():
			return r.failed(op, ctx.Err())
		}
	}
	if !r.IsLeader() || r.raft.CurrentTerm() != term {
		return errs.E(op, errkind.NotLeader, "", raft.ErrLeadershipLost)
	}
	return nil
}

// settle returns the term in which this replica leads, once all that was
// committed in earlier terms is applied here.
func (r *Replica) settle(ctx context.Context) (uint64, error) {
	term := r.raft.CurrentTerm()
	if !r.IsLeader() {
		return 0, errs.E("wait for the log", errkind.NotLeader, "", raft.ErrNotLeader)
	}
	if r.settled.Load() == term {
		return term, nil
	}
	if err := r.barrier(ctx); err != nil {
		return 0, err
	}
	return term, nil
}

// barrier returns an error unless one term was on throughout.
func (r *Replica) barrier(ctx context.Context) error {
	const op = "wait for the log"
	term := r.raft.CurrentTerm()
	if err := await(ctx, r.raft.Barrier(changeTime).Error); err != nil {
		return r.failed(op, err)
	}
	if r.raft.CurrentTerm() != term {
		return errs.E(op, errkind.NotLeader, "", raft.ErrLeadershipLost)
	}
	r.raiseFirst(term)
	r.settled.Store(term)
	return nil
}

// Applied is the index of the last entry that is applied here.
func (r *Replica) Applied() uint64 { return r.fsm.applied.Load() }

// Peers lists the members of the group as this replica knows them.
func (r *Replica) Peers() ([]Peer, error) {
	servers, _, err := r.servers()
	if err != nil {
		return nil, errs.E("list replicas", errkind.Unavailable, "", err)
	}
	_, leader := r.raft.LeaderWithID()
	var out []Peer
	for _, s := range servers {
		out = append(out, Peer{ID: string(s.ID), Addr: string(s.Address), Voter: s.Suffrage == raft.Voter, Leader: s.ID == leader})
	}
	return out, nil
}

func (r *Replica) servers() ([]raft.Server, uint64, error) {
	f := r.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, 0, err
	}
	return f.Configuration().Servers, f.Index(), nil
}

func (r *Replica) voters() (out []raft.ServerID) {
	servers, _, _ := r.servers()
	for _, s := range servers {
		if s.Suffrage == raft.Voter {
			out = append(out, s.ID)
		}
	}
	return out
}

// AddPeer makes a running replica, which was started with Join, a member. One
// that does not answer is not added. It has no vote until it has caught up, so
// that it takes no majority away, and is forgotten if it does not. Only at the leader;
// adding a member again is no error, and a new address for one is taken over
// once it answers there.
func (r *Replica) AddPeer(ctx context.Context, id, addr string) error {
	const op = "add replica"
	if !ids.IsToken(id) {
		return errs.Errorf(op, errkind.Invalid, "%.40q is no id of a replica: one token of a-z, 0-9, _ and - is", id)
	}
	if host, port, err := net.SplitHostPort(addr); err != nil || host == "" || port == "" {
		return errs.Errorf(op, errkind.Invalid, "%.80q is no address of a replica: host:port is", addr)
	}
	if r.cfg.Bind == "" {
		return errs.E(op, errkind.Invalid, id, "this scheduler runs alone: give it replica_id, bind and certificates first")
	}
	done, err := r.exclusive(ctx, op)
	if err != nil {
		return err
	}
	defer done()
	servers, index, err := r.servers()
	if err != nil {
		return r.failed(op, err)
	}
	member := false
	for _, s := range servers {
		switch {
		case string(s.ID) == id && string(s.Address) == addr && s.Suffrage == raft.Voter:
			return nil
		case string(s.ID) == id:
			member = s.Suffrage == raft.Voter
		case string(s.Address) == addr:
			return errs.Errorf(op, errkind.Conflict, "%s is the address of replica %s", addr, s.ID)
		}
	}
	if !member && len(servers) >= maxPeers {
		return errs.Errorf(op, errkind.Quota, "the group has %d replicas already; more make it slower, not safer", len(servers))
	}
	if member {
		err = r.isAt(ctx, id, addr)
	} else if err = r.waits(ctx, id, addr); err == nil {
		index, err = r.admit(ctx, id, addr, index)
	}
	if err != nil {
		return errs.Wrap(op, id, err)
	}
	f := r.raft.AddVoter(raft.ServerID(id), raft.ServerAddress(addr), index, changeTime)
	return r.failed(op, await(ctx, f.Error))
}

// isAt returns nil if a member answers at an address: a wrong one would take
// its vote away, and nothing would say so before the next replica is lost.
func (r *Replica) isAt(ctx context.Context, id, addr string) error {
	if id == r.cfg.ID { // it does not call itself; a leader corrects its own address
		return errs.Errorf("move a replica", errkind.Refused, "replica %s leads and knows its address itself: %s", id, r.link.addr)
	}
	if _, err := r.reads(ctx, id, addr); err != nil {
		return errs.E("move a replica", errkind.Unavailable, id, fmt.Errorf("it does not answer at %s; its address stays what it is: %w", addr, err))
	}
	return nil
}

// waits returns nil if a new replica answers at an address, also one that is just starting: one that
// does not is not made a member.
func (r *Replica) waits(ctx context.Context, id, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, greetTime)
	defer cancel()
	for {
		reads, err := r.reads(ctx, id, addr)
		if err == nil {
			return r.canRead(id, reads)
		}
		var no refused
		if !errors.As(err, &no) {
			select {
			case <-time.After(r.cfg.Heartbeat / 4):
				continue
			case <-ctx.Done():
			}
		}
		return errs.E("ask a new replica", errkind.Unavailable, id, fmt.Errorf(
			"it does not answer at %s, so it was not added; start it with join set and a certificate that names it: %w", addr, err))
	}
}

// admit has a new replica catch up without a vote, or forgets it.
func (r *Replica) admit(ctx context.Context, id, addr string, index uint64) (uint64, error) {
	const op = "let a replica catch up"
	ctx, cancel := context.WithTimeout(ctx, joinTime)
	defer cancel()
	since, term := time.Now(), r.raft.CurrentTerm()
	f := r.raft.AddNonvoter(raft.ServerID(id), raft.ServerAddress(addr), index, changeTime)
	if err := await(ctx, f.Error); err != nil {
		return 0, r.failed(op, err)
	}
	goal := f.Index()
	for {
		news := r.contacts.changed()
		if c, ok := r.contacts.of(raft.ServerID(id), term); ok && !c.sent.Before(since) && c.lastLog >= goal {
			return f.Index(), nil
		}
		if !r.IsLeader() || r.raft.CurrentTerm() != term {
			return 0, r.failed(op, raft.ErrLeadershipLost)
		}
		select {
		case <-news:
		case <-time.After(r.cfg.Heartbeat): // leadership may be gone
		case <-ctx.Done():
			// The caller's time is over; forgetting needs its own.
			err := r.raft.RemoveServer(raft.ServerID(id), 0, changeTime).Error()
			return 0, errs.E(op, errkind.Unavailable, "", errors.Join(
				errors.New("it did not catch up at "+addr+" in time, and is no member"), err))
		}
	}
}

// RemovePeer takes a replica out of the group. The last one is refused, and
// one without which those that live were no majority of the rest. The leader
// does not remove itself: it hands over and answers with kind NotLeader, and
// the same request at the next leader removes it. Removing a stranger is no
// error.
func (r *Replica) RemovePeer(ctx context.Context, id string) error {
	const op = "remove replica"
	done, err := r.exclusive(ctx, op)
	if err != nil {
		return err
	}
	defer done()
	servers, index, err := r.servers()
	if err != nil {
		return r.failed(op, err)
	}
	at := slices.IndexFunc(servers, func(s raft.Server) bool { return string(s.ID) == id })
	if at < 0 {
		return nil
	}
	var rest []raft.ServerID
	for _, v := range r.voters() {
		if string(v) != id {
			rest = append(rest, v)
		}
	}
	if len(rest) == 0 {
		return errs.E(op, errkind.Refused, id, "it is the last replica of the group")
	}
	if id == r.cfg.ID {
		if err := r.transfer(ctx, ""); err != nil {
			return errs.Wrap(op, id, err)
		}
		return errs.E(op, errkind.NotLeader, id, "it was the leader and handed over; ask the new one")
	}
	if servers[at].Suffrage == raft.Voter {
		if err := r.enough(ctx, rest); err != nil {
			return errs.Wrap(op, id, err)
		}
	}
	f := r.raft.RemoveServer(raft.ServerID(id), index, changeTime)
	return r.failed(op, await(ctx, f.Error))
}

// enough waits a moment for a majority of voters to show that they live.
func (r *Replica) enough(ctx context.Context, voters []raft.ServerID) error {
	since, term := time.Now(), r.raft.CurrentTerm()
	over := time.NewTimer(4 * r.cfg.Heartbeat)
	defer over.Stop()
	for {
		news := r.contacts.changed()
		if r.contacts.majority(voters, raft.ServerID(r.cfg.ID), term, since) {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return r.failed("ask who lives", ctx.Err())
		case <-over.C:
			return errs.Errorf("ask who lives", errkind.Refused,
				"fewer than %d of the %d replicas that would be left answer; bring one back first", len(voters)/2+1, len(voters))
		}
	}
}

// Transfer hands leadership to a replica, or to the one that is most advanced
// when id is empty. It returns once this replica does not lead any more.
func (r *Replica) Transfer(ctx context.Context, id string) error {
	done, err := r.exclusive(ctx, "hand leadership over")
	if err != nil {
		return err
	}
	defer done()
	return r.transfer(ctx, id)
}

func (r *Replica) transfer(ctx context.Context, id string) error {
	const op = "hand leadership over"
	if id == r.cfg.ID {
		return nil
	}
	if len(r.voters()) < 2 {
		return errs.E(op, errkind.Refused, "", "there is no other replica")
	}
	to, err := r.successor(ctx, id)
	if err != nil {
		return errs.Wrap(op, id, err)
	}
	return r.handTo(ctx, to)
}

func (r *Replica) handTo(ctx context.Context, to raft.Server) error {
	// Raft takes no entry until what it does for the transfer has ended, and ends nothing by itself
	// that waits in the transport: see watched.
	r.contacts.hand(to.ID, time.Now().Add(transferTime))
	return r.failed("hand leadership over", await(ctx, r.raft.LeadershipTransferToServer(to.ID, to.Address).Error))
}

// successor is the voter that takes over: the named one or, with no name, the most advanced. It must
// have answered just now and have about the whole log; a leader that has just begun waits a moment for
// the answer.
func (r *Replica) successor(ctx context.Context, id string) (raft.Server, error) {
	const op = "choose who takes over"
	servers, _, err := r.servers()
	if err != nil {
		return raft.Server{}, r.failed(op, err)
	}
	find := func(id string) int {
		return slices.IndexFunc(servers, func(s raft.Server) bool { return string(s.ID) == id && s.Suffrage == raft.Voter })
	}
	if id != "" && find(id) < 0 {
		return raft.Server{}, errs.E(op, errkind.NotFound, id, "there is no such replica with a vote")
	}
	over := time.NewTimer(2 * r.cfg.Heartbeat)
	defer over.Stop()
	for {
		news := r.contacts.changed()
		if best := r.advanced(id); best != "" {
			return servers[find(best)], r.near(best)
		}
		select {
		case <-news:
		case <-ctx.Done():
			return raft.Server{}, r.failed(op, ctx.Err())
		case <-over.C:
			if id == "" {
				return raft.Server{}, errs.E(op, errkind.Unavailable, "", "no other replica answers")
			}
			return raft.Server{}, errs.E(op, errkind.Unavailable, id, "this replica does not answer; name one that does, or none")
		}
	}
}

// near refuses a replica that would have to catch up first: nobody could write meanwhile.
func (r *Replica) near(id string) error {
	c, _ := r.contacts.of(raft.ServerID(id), r.raft.CurrentTerm())
	if last := r.raft.LastIndex(); c.lastLog+nearEntries < last {
		return errs.Errorf("choose who takes over", errkind.Unavailable, "replica %s is %d entries behind; it can take over once it has caught up", id, last-c.lastLog)
	}
	return nil
}

// advanced is the voter with the longest log among those that answered just now, or of the one that is
// named.
func (r *Replica) advanced(named string) (id string) {
	term, most := r.raft.CurrentTerm(), uint64(0)
	for _, v := range r.voters() {
		if named != "" && string(v) != named {
			continue
		}
		c, ok := r.contacts.of(v, term)
		if ok && string(v) != r.cfg.ID && time.Since(c.sent) < r.cfg.Heartbeat && (id == "" || c.lastLog > most) {
			id, most = string(v), c.lastLog
		}
	}
	return id
}

// exclusive lets one change of the group run at a time, at the leader only.
func (r *Replica) exclusive(ctx context.Context, op string) (func(), error) {
	select {
	case r.change <- struct{}{}:
	case <-ctx.Done():
		return nil, r.failed(op, ctx.Err())
	}
	if !r.IsLeader() {
		<-r.change
		return nil, errs.E(op, errkind.NotLeader, "", raft.ErrNotLeader)
	}
	return func() { <-r.change }, nil
}

// await gives up when ctx ends; what f does goes on, so its end is unknown.
func await(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
