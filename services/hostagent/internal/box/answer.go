package box

import (
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/grant"
)

// answer seals the reply of an opening and sends it.
func (b *Box) answer(reply, key string, r *boxv1.OpenReply) error {
	plain, err := proto.Marshal(r)
	if err != nil {
		return errs.E(opOpen, errkind.Internal, "", err)
	}
	sealed, err := b.srv.answers.Envelope(key, plain)
	if err != nil {
		return errs.E(opOpen, errkind.Invalid, "", fmt.Errorf("seal the answer: %w", err))
	}
	raw, err := proto.Marshal(&boxv1.SealedOpenReply{Sealed: sealed})
	if err != nil {
		return errs.E(opOpen, errkind.Internal, "", err)
	}
	return b.srv.cfg.Bus.Publish(reply, raw)
}

// window is what a client may send ahead on a new stream. A session with many streams gets less for
// each, so that one session cannot fill the host's memory.
func (b *Box) window(input bool) uint32 {
	if !input {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.streams) > fewStreams {
		return MaxChunk
	}
	return MaxCredit
}

// maxGrants is how many grants of one session are remembered as good.
const maxGrants = 64

// grants remembers which grants one verifier found good for this box, so that the signature of a
// grant is checked once and not for each opening. A new verifier (new keys, new revocations)
// forgets them all. Proof, age and nonce are checked each time.
type grants struct {
	mu   sync.Mutex
	by   *grant.Verifier
	good map[string]grant.Claims
}

// open is grant.Verifier.Open with that memory.
func (g *grants) open(v *grant.Verifier, o grant.Opening, proof []byte, b *Box) (grant.Claims, error) {
	now := time.Now()
	claims, ok := g.find(v, o.Grant, now)
	if !ok {
		var err error
		if claims, err = v.Verify(o.Grant, b.want, now); err != nil {
			return grant.Claims{}, err
		}
		g.keep(v, o.Grant, claims)
	}
	key, err := claims.ProofKey()
	if err != nil {
		return grant.Claims{}, err
	}
	if err := o.Verify(key, proof, now); err != nil {
		return grant.Claims{}, err
	}
	return claims, b.srv.replay.Spend(string(claims.Session), o.Nonce, now)
}

func (g *grants) find(v *grant.Verifier, token string, now time.Time) (grant.Claims, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.by != v {
		return grant.Claims{}, false
	}
	c, ok := g.good[token]
	return c, ok && now.Before(c.ExpiresAt())
}

func (g *grants) keep(v *grant.Verifier, token string, c grant.Claims) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.by != v || len(g.good) >= maxGrants {
		g.by, g.good = v, map[string]grant.Claims{}
	}
	g.good[token] = c
}
