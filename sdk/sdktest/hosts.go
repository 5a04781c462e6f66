package sdktest

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// fakeHost is one of the two hosts; a name with a state.
type fakeHost struct {
	id                      ids.Host
	lost, draining, removed bool
	deadline                time.Time
}

func newHosts() []*fakeHost { return []*fakeHost{{id: hostID}, {id: otherHost}} }

func (s *Server) hostState(id ids.Host) *fakeHost {
	for _, h := range s.hosts {
		if h.id == id && !h.removed {
			return h
		}
	}
	return nil
}

// takes is a host that takes sessions, rather this one; empty: there is none.
func (s *Server) takes(rather ids.Host) ids.Host {
	best := ids.Host("")
	for _, h := range s.hosts {
		if h.lost || h.draining || h.removed {
			continue
		}
		if h.id == rather {
			return h.id
		}
		best = h.id
	}
	return best
}

// hostOf is the host of a session; Server.mu is held.
func (s *Server) hostOf(key string) ids.Host {
	if x := s.sessions[key]; x != nil {
		return x.host
	}
	return hostID
}

// LoseHost loses the host of a session, as when its machine dies: nobody ends a stream, what ran is
// gone, and what was written after the last snapshot too. Sessions that were awake there wait for
// HandOver, or for their next open, which joins the handoff. A session that was never saved waits for
// its host. The host that was lost before is back. Nothing else happens, at any later time.
func (s *Server) LoseHost(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.sessions[key]
	if x == nil {
		return
	}
	gone := x.host
	s.faults.mute = false
	for _, h := range s.hosts {
		h.lost = h.id == gone
	}
	s.hostEvent(gone, "lost", "its lease ran out")
	for _, y := range s.sorted() {
		if y.host == gone && y.state != corev1.State_STATE_DELETED {
			s.displace(y)
		}
	}
}

func (s *Server) displace(x *session) {
	for id, st := range s.streams {
		if st.key == x.key {
			st.end()
			delete(s.streams, id)
		}
	}
	x.killAll("the host was lost")
	if x.state == corev1.State_STATE_ACTIVE {
		lost := &schedulerv1.Displaced{Host: string(x.host), Reason: "its lease ran out"}
		e := &schedulerv1.Event{Detail: &schedulerv1.Event_Displaced{Displaced: lost}}
		if x.terms.Persistence == corev1.Persistence_PERSISTENCE_EPHEMERAL {
			x.state = corev1.State_STATE_FAILED
			s.event(x, "displaced", e)
			s.event(x, "failed", &schedulerv1.Event{Detail: &schedulerv1.Event_Failed{Failed: &schedulerv1.Failed{
				Failure: &corev1.Failure{Kind: "data_loss", Reason: "its host was lost, and an ephemeral session is not saved"}}}})
			return
		}
		x.newest, x.handoff, lost.Handoff = x.host, x.host, true
		x.state = corev1.State_STATE_ASLEEP
		s.event(x, "displaced", e)
	}
	if len(x.snapshots) == 0 {
		return // waits for its host
	}
	x.host = s.takes(x.host)
}

// HandOver wakes a session that LoseHost left waiting.
func (s *Server) HandOver(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.sessions[key]; x != nil && x.handoff != "" {
		_, _ = s.wakeLocked(x, "")
	}
}

// placeable says why a session cannot wake now, or nil.
func (s *Server) placeable(x *session) error {
	if h := s.hostState(x.newest); x.newest != "" && len(x.snapshots) == 0 && (h == nil || h.lost) {
		return fault{errkind.Unplaceable, "it was never saved, and the host that has its files, " + string(x.newest) + ", is lost"}
	}
	if x.host = s.takes(x.host); x.host == "" {
		return fault{errkind.Unplaceable, "no host takes sessions"}
	}
	return nil
}

// plan is the plan that a wake would get now.
func (s *Server) plan(x *session) *schedulerv1.Placement {
	out := &schedulerv1.Placement{}
	for _, h := range s.hosts {
		row := &schedulerv1.PlacementRow{Host: string(h.id)}
		switch {
		case h.removed:
			continue
		case h.lost:
			row.Refused = "its lease ran out"
		case h.draining:
			row.Refused = "it is draining"
		case h.id == x.host:
			row.Ranks = []string{"disk", "image"}
			out.Host, out.Reason = string(h.id), "its disk is here"
		default:
			row.Ranks = []string{"load"}
		}
		out.Rows = append(out.Rows, row)
	}
	slices.SortStableFunc(out.Rows, func(a, b *schedulerv1.PlacementRow) int {
		return btoi(a.Host != out.Host) - btoi(b.Host != out.Host)
	})
	if out.Host == "" {
		out.Reason = "no host may take it"
	}
	return out
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (s *Server) hostRecord(h *fakeHost) *schedulerv1.HostRecord {
	out := &schedulerv1.HostRecord{Host: string(h.id), Boot: "boot1", Tiers: []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR},
		Capacity: &corev1.Limits{CpuMillis: 2000, MemoryBytes: 4 << 30, Pids: 4096, DiskBytes: 100 << 30}, Zone: "z1", Used: &corev1.Limits{},
		Alive: !h.lost, Lost: h.lost, Draining: h.draining, Drained: h.draining}
	if !h.lost {
		out.LeaseLeft = durationpb.New(8 * time.Second)
	}
	if h.draining {
		out.DrainDeadline = timestamppb.New(h.deadline)
	}
	for _, x := range s.sessions {
		if x.newest == h.id {
			out.Unsaved++
		}
		if x.host != h.id || x.state == corev1.State_STATE_DELETED {
			continue
		}
		out.Sessions++
		out.Drained = false
		if x.state == corev1.State_STATE_ACTIVE {
			out.Active++
			out.Used.MemoryBytes += x.terms.Limits.MemoryBytes
			out.Used.CpuMillis += x.terms.Limits.CpuMillis
			out.Used.Pids += x.terms.Limits.Pids
			out.Used.DiskBytes += x.terms.Limits.DiskBytes
		}
	}
	return out
}

func (s *Server) hostsReply() *schedulerv1.HostsReply {
	out := &schedulerv1.HostsReply{}
	for _, h := range s.hosts {
		if !h.removed {
			out.Hosts = append(out.Hosts, s.hostRecord(h))
		}
	}
	return out
}

// drainLocked begins or ends a drain. Sleepers move at once, and so do awake sessions in which nothing
// runs; the others when Sleep is called.
func (s *Server) drainLocked(req *schedulerv1.DrainRequest) (*schedulerv1.DrainReply, error) {
	h := s.hostState(ids.Host(req.GetHost()))
	if h == nil {
		return nil, fault{errkind.NotFound, "there is no host " + req.GetHost()}
	}
	within := 10 * time.Minute
	if req.GetWithin() != nil {
		within = req.GetWithin().AsDuration()
	}
	h.draining, h.deadline = req.GetOn(), time.Now().Add(within)
	s.hostEvent(h.id, "draining", map[bool]string{false: "it takes sessions again"}[h.draining])
	for _, x := range s.sorted() {
		busy := x.state == corev1.State_STATE_ACTIVE && x.execs.running()
		if h.draining && x.host == h.id && x.state != corev1.State_STATE_DELETED && !busy {
			s.leave(x)
		}
	}
	s.drained(h)
	return &schedulerv1.DrainReply{Host: s.hostRecord(h)}, nil
}

// drained tells when nothing is left on a draining host.
func (s *Server) drained(h *fakeHost) {
	if s.hostRecord(h).GetDrained() {
		s.hostEvent(h.id, "drained", "")
	}
}

// hostEvent publishes one fact of the scheduler about a host.
func (s *Server) hostEvent(h ids.Host, name, reason string) {
	raw, err := proto.Marshal(&schedulerv1.HostEvent{Host: string(h), Boot: "boot1", At: timestamppb.Now(), What: name, Reason: reason})
	if err == nil {
		_ = s.nc.Publish(subjects.HostEvent(h, name), raw)
	}
}

// leave moves a session off its draining host.
func (s *Server) leave(x *session) {
	old, awake := x.host, x.state == corev1.State_STATE_ACTIVE
	s.sleepLocked(x, "drain")
	to := s.takes("")
	if to == "" || x.state == corev1.State_STATE_DELETED {
		return
	}
	if x.host = to; awake {
		x.handoff = old
		_, _ = s.wakeLocked(x, "")
	}
}

func (s *Server) removeHost(req *schedulerv1.RemoveHostRequest) (*schedulerv1.RemoveHostReply, error) {
	h := s.hostState(ids.Host(req.GetHost()))
	if h == nil {
		return nil, fault{errkind.NotFound, "there is no host " + req.GetHost()}
	}
	r := s.hostRecord(h)
	switch {
	case r.GetAlive() && r.GetSessions() > 0:
		return nil, fault{errkind.Conflict, "host " + req.GetHost() + " is alive and has sessions; drain it first"}
	case r.GetUnsaved() > 0 && !req.GetLoseUnsaved():
		return nil, fault{errkind.Conflict, "some files are on host " + req.GetHost() + " alone"}
	}
	h.removed = true
	s.hostEvent(h.id, "removed", "")
	out := &schedulerv1.RemoveHostReply{}
	for _, x := range s.sorted() {
		switch {
		case x.newest != h.id:
		case len(x.snapshots) > 0:
			x.newest = ""
			out.Rewound = append(out.Rewound, x.ref())
		default:
			x.newest, x.handoff, x.state = "", "", corev1.State_STATE_FAILED
			s.event(x, "failed", &schedulerv1.Event{Detail: &schedulerv1.Event_Failed{Failed: &schedulerv1.Failed{
				Failure: &corev1.Failure{Kind: "data_loss", Reason: "its host was removed, and it was never saved"}}}})
			out.Lost = append(out.Lost, x.ref())
		}
	}
	return out, nil
}

// peersLocked answers what is asked of the group of replicas, which are names here.
func (s *Server) peersLocked(method string, read func(proto.Message) error) (proto.Message, error) {
	add, remove, transfer := &schedulerv1.AddPeerRequest{}, &schedulerv1.RemovePeerRequest{}, &schedulerv1.TransferRequest{}
	var err error
	switch method {
	case "add_peer":
		if err = read(add); err == nil && !slices.ContainsFunc(s.peers, func(p *schedulerv1.Peer) bool { return p.GetId() == add.GetId() }) {
			s.peers = append(s.peers, &schedulerv1.Peer{Id: add.GetId(), Addr: add.GetAddr(), Voter: true})
		}
	case "remove_peer":
		if err = read(remove); err == nil && len(s.peers) == 1 {
			err = fault{errkind.Refused, "the last replica cannot leave"}
		}
		if err == nil {
			s.peers = slices.DeleteFunc(s.peers, func(p *schedulerv1.Peer) bool { return p.GetId() == remove.GetId() })
		}
	case "transfer":
		err = read(transfer)
		for _, p := range s.peers {
			p.Leader = p.GetId() == transfer.GetId() || transfer.GetId() == "" && p == s.peers[len(s.peers)-1]
		}
	}
	return &schedulerv1.PeersReply{Peers: s.peers, Applied: s.index}, err
}
