// Package callout lets hosts, frontends, users and operators log in to the bus: it answers the question
// that a server asks about every login it does not know (the NATS auth callout), and ends connections
// of whoever may not be there any more. It guarantees that nobody is let in without a signature over
// this connection's nonce by a registered nkey, or a token that its issuer signed; that a login has
// exactly the permissions of its bus identity and ends by itself; that an issuer which answers slowly
// holds up no login by nkey; and that one who is connected stays so while nobody answers.
package callout

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Guest is who may log in.
type Guest struct {
	Caller subjects.Caller
	// Mark stands on the connection, so that it is known again when connections are looked at.
	Mark Mark
	// Expires is when a user's token does; zero for others.
	Expires time.Time
	// Sessions are those of a user whose events its own login hears.
	Sessions []ids.SessionKey
}

// Guests says who may log in. Both are safe for concurrent use. An error is a refusal, whose text is one
// sentence, with as much of the guest as is known; of kind Unavailable it is none: nobody answers, and
// the client tries again.
type Guests interface {
	// ByNKey is whose registered nkey it is that the question showed.
	ByNKey(q bus.Question) (Guest, error)
	// ByToken is the user whose token it is. It may take until ctx ends.
	ByToken(ctx context.Context, token string) (Guest, error)
}

// Mark tells by what somebody logged in.
type Mark string

// NKeyMark is of a login by nkey.
func NKeyMark(nkey string) Mark { return Mark("nkey:" + strings.ToLower(nkey)) }

// IssuerMark is of a login by a token of this issuer.
func IssuerMark(issuer string) Mark {
	sum := sha256.Sum256([]byte(issuer))
	return Mark("issuer:" + hex.EncodeToString(sum[:16]))
}

// NKey is the public nkey of a login by nkey.
func (m Mark) NKey() (string, bool) {
	key, ok := strings.CutPrefix(string(m), "nkey:")
	return strings.ToUpper(key), ok
}

// Outcome is what became of one login.
type Outcome struct {
	Guest   Guest  // as far as it is known
	NKey    string // public; empty for a user
	From    string
	Until   time.Time // when the connection will end by itself
	Refused error     // nil: let in
	Took    time.Duration
}

// Config of a responder.
type Config struct {
	Keys   bus.CalloutKeys
	Guests Guests
	Lives  Lives
	Log    *slog.Logger
	// Told, which must not block, hears of each login that was answered.
	Told func(Outcome)
	// Random is a number from 0 to 1, for the spread of ends.
	Random func() float64
}

const (
	workers = 32
	// verifying is the most tokens that are verified at once; the others' clients try again. It is several
	// times as many as may wait for the keys of one issuer: tokens that anybody can make up fill no more.
	verifying = 1024
	// tokenTime leaves the server time to hear the answer.
	tokenTime = bus.CalloutTime - 500*time.Millisecond
)

// Responder answers logins. Several share the questions.
type Responder struct {
	cfg    Config
	svc    micro.Service
	queue  chan asked
	tokens chan struct{}
	ctx    context.Context
	stop   context.CancelFunc
	under  sync.WaitGroup
	silent silent
}

// Serve answers logins until Stop. nc must be logged in as subjects.Callout.
func Serve(nc *nats.Conn, cfg Config) (*Responder, error) {
	const op = "answer logins"
	ctx, stop := context.WithCancel(context.Background())
	r := &Responder{cfg: cfg, ctx: ctx, stop: stop, queue: make(chan asked, waiting), tokens: make(chan struct{}, verifying)}
	for range workers {
		r.under.Go(r.work)
	}
	var err error
	r.svc, err = micro.AddService(nc, micro.Config{Name: "logins", Version: "1.0.0", Description: "who may log in to the bus", QueueGroup: "identity"})
	if err == nil {
		err = r.svc.AddEndpoint("login", micro.HandlerFunc(r.take), micro.WithEndpointSubject(bus.CalloutSubject))
	}
	if err == nil {
		err = nc.FlushTimeout(5 * time.Second)
	}
	if err != nil {
		stop()
		return nil, errs.E(op, errkind.Unavailable, "", err)
	}
	return r, nil
}

// Stop takes no more questions and waits for those under way until ctx ends.
func (r *Responder) Stop(ctx context.Context) error {
	err := r.svc.Stop()
	r.stop()
	done := make(chan struct{})
	go func() { r.under.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		err = errors.Join(err, ctx.Err())
	}
	return err
}

// answer reads a question and answers it. A token is verified beside it, for that takes time.
func (r *Responder) answer(req micro.Request) {
	began := time.Now()
	q, why, err := r.cfg.Keys.Open(req.Data(), req.Headers().Get(bus.CalloutXKeyHeader))
	if err != nil {
		r.unanswered(err)
		return
	}
	out := Outcome{NKey: q.NKey, From: q.From}
	switch {
	case why != "":
		out.Refused = errors.New(why)
	case q.NKey != "":
		out.Guest, out.Refused = r.cfg.Guests.ByNKey(q)
	default:
		select {
		case r.tokens <- struct{}{}:
			r.under.Go(func() { r.verify(req, q, out, began) })
		default:
			r.unanswered(errTokens)
		}
		return
	}
	r.send(req, q, out, began)
}

// verify gives the token's place back when it ends.
func (r *Responder) verify(req micro.Request, q bus.Question, out Outcome, began time.Time) {
	defer func() { <-r.tokens }()
	ctx, cancel := context.WithTimeout(r.ctx, tokenTime)
	defer cancel()
	out.Guest, out.Refused = r.cfg.Guests.ByToken(ctx, q.Token)
	r.send(req, q, out, began)
}

// send ends the matter.
func (r *Responder) send(req micro.Request, q bus.Question, out Outcome, began time.Time) {
	if errs.Is(out.Refused, errkind.Unavailable) {
		r.unanswered(out.Refused)
		return
	}
	now := time.Now()
	if out.Refused == nil {
		out.Until, out.Refused = r.cfg.Lives.until(out.Guest.Caller, out.Guest.Expires, now, r.cfg.Random())
	}
	var answer []byte
	var err error
	if out.Refused != nil {
		answer, err = r.cfg.Keys.Refuse(q, out.Refused.Error())
	} else {
		answer, err = r.cfg.Keys.Admit(q, out.Guest.Caller, string(out.Guest.Mark), out.Until, out.Guest.Sessions...)
	}
	if err == nil {
		err = req.Respond(answer)
	}
	if err != nil {
		r.cfg.Log.Error("a login was not answered", "caller", out.Guest.Caller.Name(), "error", err)
		return
	}
	out.Took = time.Since(began)
	r.cfg.Told(out)
}

// Lives are how long a login lasts before the connection ends and its client logs in again.
type Lives struct {
	Hosts, Frontends, Operators, Users time.Duration
}

// spread is the part of a life by which it may end sooner, so that not all who came together end
// together.
const spread = 0.1

// until is when a login of now ends: sooner by up to a tenth, and never after the user's token.
func (l Lives) until(c subjects.Caller, token, now time.Time, random float64) (time.Time, error) {
	var life time.Duration
	switch {
	case c.Role == subjects.RoleHost, c.Role == subjects.RoleGate:
		life = l.Hosts
	case c.Role == subjects.RoleOperator:
		life = l.Operators
	case c.Role == subjects.RoleFrontend && subjects.IsUserFrontend(c.Frontend):
		life = l.Users
		if token.IsZero() {
			return token, errors.New("a user logs in with a token that expires")
		}
	case c.Role == subjects.RoleFrontend:
		life = l.Frontends
	default:
		return time.Time{}, fmt.Errorf("%s does not log in here", c)
	}
	end := now.Add(life - time.Duration(float64(life)*spread*random))
	if !token.IsZero() && token.Before(end) {
		end = token
	}
	if end.Before(now.Add(time.Second)) { // ends are whole seconds
		return end, errors.New("the token expires at once; sign in again")
	}
	return end, nil
}
