package replica

import (
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// rpcTime bounds a call between replicas that carries no snapshot.
const rpcTime = 3 * time.Second

// transport is in memory for one replica and mutual TLS for a group.
func (r *Replica) transport(logger hclog.Logger) (raft.Transport, []raft.Server, error) {
	self := raft.Server{Suffrage: raft.Voter, ID: raft.ServerID(r.cfg.ID)}
	if r.cfg.Bind == "" {
		addr, t := raft.NewInmemTransport(raft.ServerAddress(r.cfg.ID))
		self.Address = addr
		return t, []raft.Server{self}, nil
	}
	l, err := net.Listen("tcp", r.cfg.Bind)
	if err != nil {
		return nil, nil, fmt.Errorf("listen for replicas on %s: %w", r.cfg.Bind, err)
	}
	r.link = &link{self: r.cfg.ID, addr: r.advertise(l), reads: r.fsm.reads, peers: peersText(r.cfg.Peers), conf: r.cfg.TLS, log: r.cfg.Log, pins: r.pins,
		idOf: r.idOf, mayTalk: r.mayTalk, listener: l, wrap: r.cfg.wrapConn}
	r.link.start()
	t := &watched{NetworkTransport: raft.NewNetworkTransportWithLogger(r.link, 3, rpcTime, logger), contacts: r.contacts, worth: r.worth}
	var peers []raft.Server
	for _, p := range r.cfg.Peers {
		peers = append(peers, raft.Server{Suffrage: raft.Voter, ID: raft.ServerID(p.ID), Address: raft.ServerAddress(p.Addr)})
	}
	if len(peers) == 0 {
		self.Address = t.LocalAddr()
		peers = []raft.Server{self}
	}
	return t, peers, nil
}

// advertise is where the others reach this replica.
func (r *Replica) advertise(l net.Listener) string {
	if r.cfg.Advertise != "" {
		return r.cfg.Advertise
	}
	for _, p := range r.cfg.Peers {
		if p.ID == r.cfg.ID {
			return p.Addr
		}
	}
	return l.Addr().String()
}

func peersText(peers []Peer) string {
	var out []string
	for _, p := range peers {
		out = append(out, p.ID+"@"+p.Addr)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// idOf knows who is at an address: by the group's own record, or by
// configuration while there is none.
func (r *Replica) idOf(addr raft.ServerAddress) (string, bool) {
	for _, s := range r.members() {
		if s.Address == addr {
			return string(s.ID), true
		}
	}
	for _, p := range r.cfg.Peers {
		if p.Addr == string(addr) {
			return p.ID, true
		}
	}
	return "", false
}

// mayTalk refuses who is no member. A replica that hears from no leader may be
// the one whose list is old, and lets a stranger with a certificate speak;
// raft gives no vote to who is not in the list.
func (r *Replica) mayTalk(id string) error {
	members := r.members()
	if len(members) == 0 || slices.ContainsFunc(members, func(s raft.Server) bool { return string(s.ID) == id }) {
		return nil
	}
	if _, leader := r.started.Load().LeaderWithID(); leader == "" {
		return nil
	}
	return fmt.Errorf("replica %.40q is no member of the group; it was removed, or not added yet", id)
}

// members is empty before raft has started and before this replica was added.
func (r *Replica) members() []raft.Server {
	node := r.started.Load()
	if node == nil {
		return nil
	}
	f := node.GetConfiguration()
	if f.Error() != nil {
		return nil
	}
	return f.Configuration().Servers
}

// worth reports whether entries for a replica still have to be sent in a term.
func (r *Replica) worth(id raft.ServerID, term uint64) bool {
	select {
	case <-r.done:
		return false
	default:
	}
	node := r.started.Load()
	return node != nil && node.State() == raft.Leader && node.CurrentTerm() == term &&
		slices.ContainsFunc(r.members(), func(s raft.Server) bool { return s.ID == id })
}

// newLogger sends raft's own log to slog. Its warnings are the ordinary course of elections, also
// of the first one on a new disk, so they are information here; its errors stay errors.
func newLogger(l *slog.Logger) hclog.Logger {
	return hclog.NewInterceptLogger(&hclog.LoggerOptions{Name: "raft", Level: hclog.Warn, Output: slogWriter{l}, DisableTime: true})
}

type slogWriter struct{ l *slog.Logger }

func (w slogWriter) Write(p []byte) (int, error) {
	line := string(trimLine(p))
	if text, isError := strings.CutPrefix(line, "[ERROR] "); isError {
		w.l.Error(text)
	} else {
		w.l.Info(strings.TrimPrefix(line, "[WARN]  "))
	}
	return len(p), nil
}

func trimLine(p []byte) []byte {
	for len(p) > 0 && (p[len(p)-1] == '\n' || p[len(p)-1] == ' ') {
		p = p[:len(p)-1]
	}
	return p
}
