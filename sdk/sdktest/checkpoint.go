package sdktest

import (
	"maps"
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// checkpoints is what a test wants of those to come, and those under way; Server.mu guards it.
type checkpoints struct {
	why   string        // they fail
	hold  chan struct{} // they take until it is closed; nil: no time
	asked chan bool
	held  map[string][]*hostStream // by session and the client's key
}

// HoldCheckpoints has checkpoints take until release is called. asked tells of each that has its
// stream: true for one that began, false for a client that joined one under way with its key.
func (s *Server) HoldCheckpoints() (asked <-chan bool, release func()) {
	hold, told := make(chan struct{}), make(chan bool, 64)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saves = checkpoints{why: s.saves.why, hold: hold, asked: told, held: map[string][]*hostStream{}}
	return told, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.saves.hold == hold {
			s.saves.hold = nil
			close(hold)
		}
	}
}

// BreakStreams loses a message of every stream on the way, so that its client gives it up; the host
// does not know. With ended, the host ends them all as it does when it stops.
func (s *Server) BreakStreams(ended bool) {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.streams))
	s.mu.Unlock()
	for _, st := range all {
		if ended {
			st.fail(fault{errkind.Unavailable, "the host is stopping; attach again soon"})
			continue
		}
		st.mu.Lock()
		st.seqOut++
		st.mu.Unlock()
		st.send(&boxv1.Frame{Body: &boxv1.Frame_Ping{Ping: &boxv1.Ping{}}}, false)
	}
}

// FailCheckpoints has checkpoints fail as without a store; an empty reason heals.
func (s *Server) FailCheckpoints(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saves.why = reason
}

// checkpoint answers at once, or on a stream while checkpoints are held.
func (s *Server) checkpoint(x *session, st *hostStream, key string, begin func(uint32, *boxv1.Result), answer func(*boxv1.OpenReply)) error {
	s.mu.Lock()
	c := &s.saves
	hold, asked, anew := c.hold, c.asked, true
	if hold != nil && key != "" {
		key = x.key + " " + key
		anew = !slices.ContainsFunc(c.held[key], (*hostStream).alive)
		c.held[key] = append(c.held[key], st)
	}
	s.mu.Unlock()
	if hold == nil {
		r, err := s.checkpointed(x)
		if err == nil {
			answer(&boxv1.OpenReply{Result: r})
		}
		return err
	}
	begin(0, nil)
	asked <- anew
	go func() {
		select {
		case <-st.done:
			return
		case <-hold:
		}
		if r, err := s.checkpointed(x); err != nil {
			st.fail(err)
		} else {
			st.result(r)
		}
	}()
	return nil
}

func (s *Server) checkpointed(x *session) (*boxv1.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.saves.why != "" {
		return nil, fault{errkind.Unsaved, s.saves.why}
	}
	parent := x.manifest
	snap, r := s.commit(x, ""), x.ref()
	return &boxv1.Result{Manifest: &corev1.Manifest{Id: snap.GetId(), Parent: parent, Generation: r.GetGeneration(), Epoch: r.GetEpoch(),
		TakenAt: snap.GetTakenAt(), SizeBytes: snap.GetSizeBytes(), AllocatedBytes: snap.GetAllocatedBytes(), Host: string(x.host)}}, nil
}

// alive reports whether the stream has not ended.
func (st *hostStream) alive() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return !st.ended
}
