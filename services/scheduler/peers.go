package scheduler

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// peers lists the replicas.
func (l *leader) peers(ctx context.Context, _ bus.Request, _ *schedulerv1.PeersRequest) (*schedulerv1.PeersReply, error) {
	const op = "scheduler.peers"
	if err := l.rep.Verify(ctx); err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	return l.group(op)
}

func (l *leader) group(op string) (*schedulerv1.PeersReply, error) {
	all, err := l.rep.Peers()
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	reply := &schedulerv1.PeersReply{Applied: l.rep.Applied(), Format: uint32(l.rep.Format()), NewestFormat: core.EntryVersion}
	for _, p := range all {
		reply.Peers = append(reply.Peers, &schedulerv1.Peer{Id: p.ID, Addr: p.Addr, Voter: p.Voter, Leader: p.Leader})
	}
	return reply, nil
}

// addPeer makes a running replica a member.
func (l *leader) addPeer(ctx context.Context, _ bus.Request, req *schedulerv1.AddPeerRequest) (*schedulerv1.PeersReply, error) {
	const op = "scheduler.add_peer"
	if len(req.GetAddr()) > maxID {
		return nil, errs.E(op, errkind.TooLarge, "", "the address is too long")
	}
	if err := l.rep.AddPeer(ctx, req.GetId(), req.GetAddr()); err != nil {
		return nil, errs.Wrap(op, req.GetId(), err)
	}
	return l.group(op)
}

// removePeer takes a replica out of the group.
func (l *leader) removePeer(ctx context.Context, _ bus.Request, req *schedulerv1.RemovePeerRequest) (*schedulerv1.PeersReply, error) {
	const op = "scheduler.remove_peer"
	if err := l.rep.RemovePeer(ctx, req.GetId()); err != nil {
		return nil, errs.Wrap(op, req.GetId(), err)
	}
	return l.group(op)
}

// transfer hands leadership over; the answer is this leader's last.
func (l *leader) transfer(ctx context.Context, _ bus.Request, req *schedulerv1.TransferRequest) (*schedulerv1.PeersReply, error) {
	const op = "scheduler.transfer"
	if req.GetId() == "" && time.Since(l.began) < l.cfg.times.newLeadership {
		return l.group(op)
	}
	if err := l.rep.Transfer(ctx, req.GetId()); err != nil {
		return nil, errs.Wrap(op, req.GetId(), err)
	}
	return l.group(op)
}
