package grant_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
)

// source is credentials as far as a feed sees it.
type source struct {
	mu     sync.Mutex
	feed   string
	seq    uint64
	ended  []*credentialsv1.EndedGrants
	down   bool
	took   time.Duration
	asked  []time.Time
	whole  int
	answer func(*credentialsv1.JwksReply)
}

func (s *source) ask(ctx context.Context, req *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, time.Now())
	took := s.took
	if took > 0 {
		s.mu.Unlock()
		select {
		case <-time.After(took):
			s.mu.Lock()
		case <-ctx.Done():
			s.mu.Lock()
			return nil, ctx.Err()
		}
	}
	if s.down {
		return nil, errors.New("down")
	}
	out := &credentialsv1.JwksReply{Feed: s.feed, Seq: s.seq}
	if s.feed == "" || req.GetFeed() != s.feed || req.GetSeq() != s.seq {
		out.Jwks, out.Ended = jwks(string(kid), pub(signer)), s.ended
		s.whole++
	}
	if s.answer != nil {
		s.answer(out)
	}
	return out, nil
}

// heard is when it was asked, and how often it told everything.
func (s *source) heard() (asked []time.Time, whole int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked), s.whole
}

func (s *source) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// run has a feed ask in a bubble of time of its own.
func run(t *testing.T, s *source) *grant.Feed {
	t.Helper()
	f := grant.NewFeed(s.ask, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return f
}

// What did not change is not told again, and a change is known within the
// pause between two askings.
func TestAFeedHearsOfAChangeAtTheNextAsking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{feed: "f1", seq: 1}
		f := run(t, s)
		token := sign(t, claims())
		v, err := f.For(t.Context(), token)
		if err != nil || v.Alive(claims()) != nil {
			t.Fatal(v, err)
		}
		time.Sleep(3 * time.Second)
		if asked, whole := s.heard(); whole != 1 || len(asked) < 10 {
			t.Errorf("told everything %d times in %d askings", whole, len(asked))
		}
		_, changed := f.Current()
		s.set(func() { s.seq, s.ended = 2, []*credentialsv1.EndedGrants{{Tenant: "acme", At: timestamppb.New(now)}} })
		began := time.Now()
		<-changed
		if took := time.Since(began); took > grant.AskEvery {
			t.Errorf("it was heard of after %s", took)
		}
		if v, err = f.For(t.Context(), token); err != nil {
			t.Fatal(err)
		}
		wantKind(t, v.Alive(claims()), errkind.Denied)
	})
}

// A feed that does not hear counts from its last good asking, not from the
// answer: older than MaxFeedAge it gives out nothing, in one sentence.
func TestAnOldFeedOpensNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{feed: "f1", seq: 1, took: time.Second}
		f := run(t, s)
		token := sign(t, claims())
		time.Sleep(3500 * time.Millisecond)
		s.set(func() { s.down = true })
		synctest.Wait()
		asked, _ := s.heard()
		last := asked[len(asked)-1]
		// The answer to the asking at last will fail; the one before it counts.
		good := asked[len(asked)-2]
		if good.Equal(last) {
			t.Fatal("the test has no good asking")
		}
		time.Sleep(time.Until(good.Add(grant.MaxFeedAge)))
		if _, err := f.For(t.Context(), token); err != nil {
			t.Errorf("as old as it may be: %v", err)
		}
		time.Sleep(time.Nanosecond)
		began := time.Now()
		_, err := f.For(t.Context(), token)
		wantKind(t, err, errkind.Unavailable)
		if err == nil || !strings.Contains(err.Error(), "revoked") || time.Since(began) > 2*time.Second {
			t.Errorf("%v, after %s", err, time.Since(began))
		}
		s.set(func() { s.down = false })
		time.Sleep(2 * time.Second)
		if _, err := f.For(t.Context(), token); err != nil {
			t.Errorf("after credentials came back: %v", err)
		}
	})
}

// An asking that nobody answers is given up before what is known is too old.
func TestALostAnswerDoesNotMakeTheFeedOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{feed: "f1", seq: 1}
		f := run(t, s)
		token := sign(t, claims())
		time.Sleep(time.Second)
		s.set(func() { s.took = time.Hour })
		time.Sleep(grant.AskEvery)
		s.set(func() { s.took = 0 })
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			if _, err := f.For(t.Context(), token); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A new run of credentials, which counts from the start again, is heard whole.
func TestANewRunOfCredentialsIsHeardWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{feed: "f1", seq: 7}
		f := run(t, s)
		time.Sleep(time.Second)
		s.set(func() {
			s.feed, s.ended = "f2", []*credentialsv1.EndedGrants{{Tenant: "acme", At: timestamppb.New(now)}}
		})
		time.Sleep(2 * grant.AskEvery)
		v, err := f.For(t.Context(), sign(t, claims()))
		if err != nil {
			t.Fatal(err)
		}
		wantKind(t, v.Alive(claims()), errkind.Denied)
	})
}

// An answer that cannot be read is none: what it revokes is not known.
func TestAMalformedAnswerMakesTheFeedOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{feed: "f1", seq: 1}
		f := run(t, s)
		time.Sleep(time.Second)
		s.set(func() {
			s.seq, s.answer = 2, func(r *credentialsv1.JwksReply) { r.Ended = []*credentialsv1.EndedGrants{{}} }
		})
		time.Sleep(grant.MaxFeedAge + time.Second)
		_, err := f.For(t.Context(), sign(t, claims()))
		wantKind(t, err, errkind.Unavailable)
	})
}

// A key that nobody has is waited for until the next asking ends, and causes
// no asking of its own.
func TestForgedKeyNamesCauseNoAsking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{feed: "f1", seq: 1}
		f := run(t, s)
		forged := forge(thief, `{"alg":"EdDSA","kid":"k9","typ":"berth-grant+jwt"}`, "{}")
		began := time.Now()
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				if v, err := f.For(t.Context(), forged); err != nil || v.Knows(forged) {
					t.Error(v, err)
				}
			})
		}
		all.Wait()
		if asked, _ := s.heard(); time.Since(began) > 2*grant.AskEvery || len(asked) > 3 {
			t.Errorf("took %s and %d askings", time.Since(began), len(asked))
		}
	})
}

func TestAFeedWithoutCredentialsSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := run(t, &source{down: true})
		_, err := f.For(t.Context(), sign(t, claims()))
		wantKind(t, err, errkind.Unavailable)
	})
}

// Before there was a feed, each answer was whole.
func TestACredentialsWithoutAFeedIsHeardEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &source{}
		f := run(t, s)
		time.Sleep(time.Second)
		_, err := f.For(t.Context(), sign(t, claims()))
		if _, whole := s.heard(); err != nil || whole < 3 {
			t.Error(whole, err)
		}
	})
}
