package box

import (
	"context"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

// listen begins to ask what is revoked, and ends what a revocation meets.
func (s *Server) listen() {
	ctx, cancel := context.WithCancel(context.Background())
	go s.cfg.Grants.Run(ctx)
	go func() {
		defer cancel()
		for {
			v, changed := s.cfg.Grants.Current()
			if v != nil {
				for _, b := range s.all() {
					b.judge(v)
				}
			}
			select {
			case <-s.stop:
				return
			case <-changed:
			}
		}
	}()
}

// judge ends the streams whose grants are revoked, each with the reason. Execs go on, with nobody
// attached.
func (b *Box) judge(v *grant.Verifier) {
	for _, st := range b.open() {
		if err := v.Alive(st.claims); err != nil {
			st.fail(err)
		}
	}
}

// revoked is asked for a stream that is among the open ones already: what is heard from now on, judge
// applies to it, and what was heard before, this does.
func (b *Box) revoked(c grant.Claims) error {
	v, _ := b.srv.cfg.Grants.Current()
	if v == nil {
		return nil
	}
	return v.Alive(c)
}

// maxHolders bounds how many holders of grants of one session are remembered.
const maxHolders = 1024

// holder is who may use grants for a proof key.
type holder struct {
	key      string
	frontend ids.Frontend
	who      grant.Principal
}

// holders knows until when each holder has shown a grant: a stream goes on for as long as its holder
// renews, and no longer. So a revocation need not be remembered for longer than a grant lives, also
// for a host that was cut off meanwhile.
type holders struct {
	mu    sync.Mutex
	until map[holder]int64 // Unix seconds
}

func holderOf(c grant.Claims) holder { return holder{c.Confirm.JWK.X, c.Frontend, c.Principal} }

// hold notes a grant that was found good. One that cannot be renewed keeps no other stream.
func (h *holders) hold(c grant.Claims) {
	if c.Once {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	who := holderOf(c)
	had, known := h.until[who]
	if !known && len(h.until) >= maxHolders {
		return // its streams have the life of their own grant
	}
	if h.until == nil {
		h.until = map[holder]int64{}
	}
	h.until[who] = max(had, c.Expires)
}

// forget drops the holders whose grants have expired.
func (h *holders) forget(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for who, until := range h.until {
		if until <= now.Unix() {
			delete(h.until, who)
		}
	}
}

// expired is why a stream that was opened with these claims ends, or nil: its grant has expired, and its
// holder has shown no fresh one.
func (h *holders) expired(c grant.Claims, now time.Time) error {
	if now.Before(c.ExpiresAt()) {
		return nil
	}
	if c.Once {
		return errs.E("stream", errkind.Expired, "", "the grant of this stream has expired and cannot be renewed")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Unix() < h.until[holderOf(c)] {
		return nil
	}
	return errs.E("stream", errkind.Unavailable, "", "the grant of this stream has expired and no renewed one was shown; attach again")
}
