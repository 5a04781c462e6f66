package grant

import (
	"context"
	"sync"
	"time"

	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"

	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	// AskEvery is how often a host asks what was revoked.
	AskEvery = 300 * time.Millisecond
	// MaxFeedAge is how old what a host knows may be: when it is older, the
	// host opens nothing new. It counts from the moment of asking.
	MaxFeedAge = 5 * time.Second
	// askTime bounds one asking, so that one lost message costs less than
	// MaxFeedAge.
	askTime = 1500 * time.Millisecond
	// feedWait is how long For waits for the next answer.
	feedWait = time.Second
)

// Ask asks credentials for its key set and revocations (RPC credentials.jwks).
type Ask func(context.Context, *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error)

// Feed keeps a verifier up to date by asking all the time. It guarantees that
// For gives out no verifier of which the asking is longer ago than MaxFeedAge:
// while credentials cannot be reached, nothing new is opened.
type Feed struct {
	ask Ask
	now func() time.Duration

	mu   sync.Mutex
	v    *Verifier // nil: nothing was heard yet
	name string    // of the run of credentials that v is from
	seq  uint64
	at   time.Duration // when what v says was asked for last
	// turned is closed and replaced when an asking ended, changed when v did.
	turned, changed chan struct{}
}

// NewFeed makes a feed that knows nothing; Run has it ask. clock is the time
// since any moment, on a clock that nobody sets and that goes on while the
// machine sleeps (CLOCK_BOOTTIME); nil is the monotonic clock of the process.
func NewFeed(ask Ask, clock func() time.Duration) *Feed {
	if clock == nil {
		began := time.Now()
		clock = func() time.Duration { return time.Since(began) }
	}
	return &Feed{ask: ask, now: clock, turned: make(chan struct{}), changed: make(chan struct{})}
}

// Run asks until ctx ends. Call it once.
func (f *Feed) Run(ctx context.Context) {
	tick := time.NewTicker(AskEvery)
	defer tick.Stop()
	for {
		f.turn(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// turn asks once and takes the answer over.
func (f *Feed) turn(ctx context.Context) {
	f.mu.Lock()
	req := &credentialsv1.JwksRequest{Feed: f.name, Seq: f.seq}
	f.mu.Unlock()
	began := f.now()
	asking, cancel := context.WithTimeout(ctx, askTime)
	reply, err := f.ask(asking, req)
	cancel()
	var v *Verifier
	same := err == nil && unchanged(req, reply)
	if err == nil && !same {
		v, err = FromReply(reply)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() {
		close(f.turned)
		f.turned = make(chan struct{})
	}()
	if err != nil {
		return
	}
	f.at = began
	if !same {
		f.v, f.name, f.seq = v, reply.GetFeed(), reply.GetSeq()
		close(f.changed)
		f.changed = make(chan struct{})
	}
}

// unchanged reports whether the answer says that what the asker has is what
// there is. A credentials without a feed says everything each time.
func unchanged(req *credentialsv1.JwksRequest, r *credentialsv1.JwksReply) bool {
	return req.GetFeed() != "" && r.GetFeed() == req.GetFeed() && r.GetSeq() == req.GetSeq() && len(r.GetJwks()) == 0
}

// Current returns what was heard last, however long ago, and a channel that is
// closed when something else is heard. The verifier is nil before the first.
func (f *Feed) Current() (v *Verifier, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.v, f.changed
}

// For returns a verifier of now for token. If what was heard is too old, or
// does not have the key of token, it waits a moment for the next answer. It
// fails, with kind Unavailable, if that did not come and what was heard is too
// old; a verifier that does not know the key refuses the token by itself.
func (f *Feed) For(ctx context.Context, token string) (*Verifier, error) {
	began := f.now()
	limit := time.NewTimer(feedWait)
	defer limit.Stop()
	for waiting := true; ; {
		v, at, turned := f.state()
		fresh := v != nil && f.now()-at <= MaxFeedAge
		switch {
		case fresh && (!waiting || at >= began || v.Knows(token)):
			return v, nil
		case !waiting && v == nil:
			return nil, refuse(errkind.Unavailable, "the keys that grants are checked with cannot be fetched now")
		case !waiting:
			return nil, refuse(errkind.Unavailable, "this host has not heard for %s which grants were revoked, and opens nothing before it does", MaxFeedAge)
		}
		select {
		case <-turned:
		case <-limit.C:
			waiting = false
		case <-ctx.Done():
			waiting = false
		}
	}
}

func (f *Feed) state() (v *Verifier, at time.Duration, turned <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.v, f.at, f.turned
}
