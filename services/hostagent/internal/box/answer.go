package box

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
)

// sealReply makes what goes on the bus of an answer.
func sealReply(key string, r *boxv1.OpenReply) ([]byte, error) {
	plain, err := proto.Marshal(r)
	if err != nil {
		return nil, errs.E(opOpen, errkind.Internal, "", err)
	}
	sealed, err := seal.SealTo(seal.Public(key), plain, rand.Reader)
	if err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, "", fmt.Errorf("seal the answer: %w", err))
	}
	return proto.Marshal(&boxv1.SealedOpenReply{Sealed: sealed})
}

// answer seals the reply of an opening and sends it.
func (b *Box) answer(reply, key string, r *boxv1.OpenReply) error {
	raw, err := sealReply(key, r)
	if err != nil {
		return err
	}
	return b.srv.cfg.Bus.Publish(reply, raw)
}

// ahead is the likely answer to the start of an exec, sealed while the guest starts it: sealing
// takes a tenth of the time that a start takes.
type ahead struct {
	stream ids.StreamID
	reply  *boxv1.OpenReply
	raw    []byte
	err    error
	done   chan struct{}
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

func (b *Box) sealAhead(key string, input bool) *ahead {
	a := &ahead{stream: ids.NewStreamID(), done: make(chan struct{})}
	a.reply = &boxv1.OpenReply{Stream: a.stream.String(), Credit: b.window(input)}
	go func() {
		defer close(a.done)
		a.raw, a.err = sealReply(key, a.reply)
	}()
	return a
}

// id is the name of the stream that will be opened.
func (a *ahead) id() ids.StreamID {
	if a == nil {
		return ids.NewStreamID()
	}
	return a.stream
}

// answerWith sends r, with the work that was done ahead if it is the answer that was expected.
func (b *Box) answerWith(c *call, r *boxv1.OpenReply) error {
	if c.ahead == nil || !proto.Equal(c.ahead.reply, r) {
		return b.answer(c.reply, c.replyKey, r)
	}
	<-c.ahead.done
	if c.ahead.err != nil {
		return c.ahead.err
	}
	return b.srv.cfg.Bus.Publish(c.reply, c.ahead.raw)
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
