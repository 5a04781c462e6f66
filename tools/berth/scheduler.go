package main

import (
	"fmt"
	"net"
	"slices"
	"strconv"

	"google.golang.org/protobuf/proto"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type schedulerCmd struct {
	Peers    schedulerPeersCmd    `cmd:"" help:"List the replicas of the scheduler."`
	Join     schedulerJoinCmd     `cmd:"" help:"Add a replica, which runs already and waits to be added."`
	Leave    schedulerLeaveCmd    `cmd:"" help:"Take a replica out of the group."`
	Transfer schedulerTransferCmd `cmd:"" help:"Hand leadership to another replica."`
}

type schedulerPeersCmd struct{}

func (c *schedulerPeersCmd) Run(a *app) error { return a.peers("peers", &schedulerv1.PeersRequest{}) }

type schedulerJoinCmd struct {
	ID   string `arg:"" help:"Id of the replica, as in its configuration." placeholder:"ID"`
	Addr string `arg:"" help:"Where the other replicas reach it." placeholder:"HOST:PORT"`
}

func (c *schedulerJoinCmd) Run(a *app) error {
	if err := replica(c.ID); err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(c.Addr)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || host == "" || n == 0 {
		return usage("%.80q is no address; write it as HOST:PORT", c.Addr)
	}
	return a.peers("add_peer", &schedulerv1.AddPeerRequest{Id: c.ID, Addr: c.Addr})
}

type schedulerLeaveCmd struct {
	ID string `arg:"" help:"Id of the replica." placeholder:"ID"`
}

func (c *schedulerLeaveCmd) Run(a *app) error {
	if err := replica(c.ID); err != nil {
		return err
	}
	// For scheduler a stranger is no error: a removal may be asked for twice. Who types an id means one.
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	group := &schedulerv1.PeersReply{}
	if err := op.Call(a.ctx, "scheduler", "peers", &schedulerv1.PeersRequest{}, group); err != nil {
		return err
	}
	if !slices.ContainsFunc(group.GetPeers(), func(p *schedulerv1.Peer) bool { return p.GetId() == c.ID }) {
		return fmt.Errorf("there is no replica %s in the group", c.ID)
	}
	return a.peersBy(op, "remove_peer", &schedulerv1.RemovePeerRequest{Id: c.ID})
}

type schedulerTransferCmd struct {
	ID string `arg:"" optional:"" help:"Id of the replica; default: the most advanced one." placeholder:"ID"`
}

func (c *schedulerTransferCmd) Run(a *app) error {
	if c.ID != "" {
		if err := replica(c.ID); err != nil {
			return err
		}
	}
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	if err := op.Call(a.ctx, "scheduler", "transfer", &schedulerv1.TransferRequest{Id: c.ID}, &schedulerv1.PeersReply{}); err != nil {
		return err
	}
	return a.peers("peers", &schedulerv1.PeersRequest{}) // of the new leader: the old one did not know it yet
}

func replica(id string) error {
	if !ids.IsToken(id) {
		return usage("%.80q is no replica; its id has 1 to %d characters of a-z, 0-9, _ and -", id, ids.MaxToken)
	}
	return nil
}

// peers asks something of the group, and prints what it is afterwards.
func (a *app) peers(method string, req proto.Message) error {
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	return a.peersBy(op, method, req)
}

func (a *app) peersBy(op *sdk.Client, method string, req proto.Message) error {
	reply := &schedulerv1.PeersReply{}
	if err := op.Call(a.ctx, "scheduler", method, req, reply); err != nil {
		return err
	}
	out := peersOutOf(reply)
	return a.print(out, func() { a.renderPeers(out) })
}

type peersOut struct {
	Peers   []peerOut `json:"peers"`
	Applied uint64    `json:"applied"`
	// Formats of log entries: that the leader writes, and the newest that it reads; 0: an older version leads.
	Format       uint32 `json:"format"`
	NewestFormat uint32 `json:"newest_format"`
}

type peerOut struct {
	ID     string `json:"id"`
	Addr   string `json:"addr"`
	Voter  bool   `json:"voter"`
	Leader bool   `json:"leader"`
}

func peersOutOf(r *schedulerv1.PeersReply) peersOut {
	out := peersOut{Peers: []peerOut{}, Applied: r.GetApplied(), Format: r.GetFormat(), NewestFormat: r.GetNewestFormat()}
	for _, p := range r.GetPeers() {
		out.Peers = append(out.Peers, peerOut{p.GetId(), p.GetAddr(), p.GetVoter(), p.GetLeader()})
	}
	return out
}

func (a *app) renderPeers(o peersOut) {
	rows := [][]string{{"REPLICA", "ROLE", "ADDRESS"}}
	voters := 0
	for _, p := range o.Peers {
		role := "follower"
		switch {
		case p.Leader:
			role = "leader"
		case !p.Voter:
			role = "catching up"
		}
		if p.Voter {
			voters++
		}
		rows = append(rows, []string{plain(p.ID), role, plain(p.Addr)})
	}
	table(a.stdout, rows)
	fmt.Fprintf(a.stdout, "the leader has applied entry %s; %s may be away\n", strconv.FormatUint(o.Applied, 10), count((voters-1)/2, "replica", "replicas"))
	if o.Format < o.NewestFormat {
		fmt.Fprintf(a.stdout, "the group writes log entries of format %d, since a replica does not answer or reads no newer one; this version has format %d\n", o.Format, o.NewestFormat)
	}
}
