package sdktest

import (
	"slices"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/sdk"
)

// faults are what the next requests meet. Guarded by Server.mu.
type faults struct {
	mute      bool // openings of the data plane are not answered
	answers   int  // of identity to lose, after the request was handled
	notLeader int  // calls of scheduler that meet a replica which is no leader
	overtake  bool // the event of a sleep comes before the last frames of its streams
	direct    *nats.Subscription
}

// Mute has the hosts answer no opening of a stream any more, as a host that is cut off; LoseHost ends
// it.
func (s *Server) Mute() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.mute = true
}

// Overtake has the event of a sleep come before the last frames of the session's streams.
func (s *Server) Overtake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.overtake = true
}

// LoseAnswers loses the next n answers of identity's direct door; the requests are handled.
func (s *Server) LoseAnswers(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.answers = n
}

// NotLeader has the next n calls of scheduler meet a replica that is no leader.
func (s *Server) NotLeader(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.notLeader = n
}

// Away stops identity: nobody answers on its direct door until back is called.
func (s *Server) Away() (back func() error, err error) {
	s.mu.Lock()
	sub := s.faults.direct
	s.mu.Unlock()
	if err := sub.Unsubscribe(); err != nil {
		return nil, err
	}
	return s.listenDirect, s.nc.Flush()
}

// listenDirect serves identity's direct door.
func (s *Server) listenDirect() error {
	sub, err := s.nc.Subscribe("berth.v1.rpc.identity.*.*.*", func(m *nats.Msg) { go s.direct(m) })
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.direct = sub
	return s.nc.Flush()
}

// answerIsLost counts one answer down.
func (s *Server) answerIsLost() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.answers--
	return s.faults.answers >= 0
}

// leads fails for a call that meets a replica which is no leader; Server.mu is held.
func (s *Server) leads() error {
	if s.faults.notLeader--; s.faults.notLeader >= 0 {
		return fault{errkind.NotLeader, "this replica is not the leader"}
	}
	return nil
}

// ShutOut has the bus end the connection of a tenant's frontend, and refuse its login until letIn is
// called, as it does with a tenant that is suspended.
func (s *Server) ShutOut(tenant string) (letIn func() error, err error) {
	f, err := sdk.ReadClientFile(s.ClientFile(tenant))
	if err != nil {
		return nil, err
	}
	kp, err := nkeys.FromSeed([]byte(f.Seed))
	if err != nil {
		return nil, err
	}
	pub, err := kp.PublicKey()
	if err != nil {
		return nil, err
	}
	without := s.bus.Clone()
	without.Nkeys = slices.DeleteFunc(slices.Clone(without.Nkeys), func(u *server.NkeyUser) bool { return u.Nkey == pub })
	return func() error { return s.ns.ReloadOptions(s.bus.Clone()) }, s.ns.ReloadOptions(without)
}
