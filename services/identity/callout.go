package identity

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/callout"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/registry"
)

// Callout is how identity answers a bus that asks it who may log in. Its keys are in Config.KeyDir.
type Callout struct {
	// Login and Warden are the client files of identity's two further bus identities: one answers, the
	// other ends connections. Without them logins are not answered, and a bus that asks lets in nobody
	// that it does not know itself.
	Login  string `yaml:"login"`
	Warden string `yaml:"warden"`
	// How long a login lasts before its connection ends and the client logs in again; it may end sooner
	// by a tenth. A user's login ends with its token at the latest.
	Hosts     time.Duration `yaml:"hosts"`
	Frontends time.Duration `yaml:"frontends"`
	Operators time.Duration `yaml:"operators"`
	Users     time.Duration `yaml:"users"`
	// Connect, instead of Login and Warden, is for a bus within the process.
	Connect func(context.Context, subjects.Caller) (*bus.Conn, error) `yaml:"-" json:"-"`
}

func newCallout() Callout {
	return Callout{Hosts: 24 * time.Hour, Frontends: 12 * time.Hour, Operators: 8 * time.Hour, Users: time.Hour}
}

// shortestLife is the shortest time that a login can be configured to last: ends are whole seconds.
const shortestLife = 2 * time.Second

func (c Callout) validate() error {
	if (c.Login == "") != (c.Warden == "") {
		return errs.E(configure, errkind.Invalid, "", "callout.login and callout.warden belong together: set both, or neither")
	}
	for _, life := range []time.Duration{c.Hosts, c.Frontends, c.Operators, c.Users} {
		if life < shortestLife && c.serves() {
			return errs.Errorf(configure, errkind.Invalid, "callout: no login can last less than %s", shortestLife)
		}
	}
	return nil
}

func (c Callout) serves() bool { return c.Login != "" || c.Connect != nil }

// connect logs one of the two in.
func (c Callout) connect(ctx context.Context, who subjects.Caller, file string, log *slog.Logger) (*bus.Conn, error) {
	if c.Connect != nil {
		return c.Connect(ctx, who)
	}
	login, err := bus.ReadLogin(file)
	if err != nil {
		return nil, err
	}
	if login.Name != who.Name() {
		return nil, errs.Errorf(configure, errkind.Invalid, "the client file %s is that of %s, not of %s", file, login.Name, who)
	}
	return bus.Connect(ctx, login, bus.WithLogger(log))
}

// logins is what identity runs for the bus's logins.
type logins struct {
	*service
	answers, ends *bus.Conn
	responder     *callout.Responder
	stopWatch     context.CancelFunc
	watched       chan struct{}
	refusals      *sparing
}

// serveLogins answers logins from now on, and ends connections of whoever is shut out. The registry must
// be open.
func (s *service) serveLogins(ctx context.Context, cfg Config) (*logins, error) {
	if !cfg.Callout.serves() {
		return nil, nil
	}
	l := &logins{service: s, watched: make(chan struct{}), refusals: newSparing(time.Now)}
	if err := l.begin(ctx, cfg); err != nil {
		l.stop(ctx)
		return nil, err
	}
	return l, nil
}

func (l *logins) begin(ctx context.Context, cfg Config) error {
	starting, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	keys, err := bus.ReadCallout(cfg.KeyDir)
	if err != nil {
		return err
	}
	if l.answers, err = cfg.Callout.connect(starting, subjects.Callout(), cfg.Callout.Login, l.log); err != nil {
		return err
	}
	if l.ends, err = cfg.Callout.connect(starting, subjects.Warden(), cfg.Callout.Warden, l.log); err != nil {
		return err
	}
	c := cfg.Callout
	l.responder, err = callout.Serve(l.answers.NATS(), callout.Config{Keys: keys, Guests: guests{l.service}, Log: l.log, Told: l.told, Random: rand.Float64,
		Lives: callout.Lives{Hosts: c.Hosts, Frontends: c.Frontends, Operators: c.Operators, Users: c.Users}})
	if err != nil {
		return err
	}
	watch, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.stopWatch = stop
	warden := callout.NewWarden(l.ends.NATS(), l.log)
	go func() {
		defer close(l.watched)
		warden.Watch(watch, l.registry.Changed, func() callout.Over { return over(l.registry.Current()) })
	}()
	return nil
}

// stop returns when nothing of it runs any more. Who is connected stays so.
func (l *logins) stop(ctx context.Context) {
	if l == nil {
		return
	}
	if l.responder != nil {
		if err := l.responder.Stop(ctx); err != nil {
			l.log.Warn("logins under way were not answered", "error", err)
		}
	}
	if l.stopWatch != nil {
		l.stopWatch()
		<-l.watched
	}
	for _, c := range []*bus.Conn{l.answers, l.ends} {
		if c != nil {
			c.Close()
		}
	}
}

// told records what became of a login. Nothing waits for it: a bus that cannot store must be able to be
// logged in to.
func (l *logins) told(o callout.Outcome) {
	c := o.Guest.Caller
	if o.Refused == nil {
		l.log.Debug("logged in to the bus", "caller", c.Name(), "from", o.From, "until", o.Until, "took", o.Took)
	} else if !l.refusals.more() {
		return // a flood of them; how many is told later
	} else {
		l.log.Warn("a login to the bus was refused", "caller", c.Name(), "nkey", o.NKey, "from", o.From, "reason", o.Refused.Error(), "not_told", l.refusals.left())
	}
	rec := core.NewAudit(core.Asked{Door: "bus", Verb: "login", Tenant: c.Tenant, Frontend: c.Frontend}, nil, time.Now())
	if c.Role != subjects.RoleFrontend {
		rec.Actor.Role = c.Name()
	}
	if o.Refused != nil {
		rec.Admitted, rec.Failure = false, refusalOf(o.Refused)
	}
	if !l.audit.Offer(context.Background(), subjects.Audit("identity", c.Tenant, ""), rec) {
		l.log.Error("a login is not under audit: too many records wait for the bus", "caller", c.Name())
	}
}

// refusalOf says it as a record has it.
func refusalOf(err error) *corev1.Failure {
	var r *core.Refusal
	if !errors.As(err, &r) {
		r = &core.Refusal{Kind: errkind.Unauthenticated, Reason: err.Error()}
	}
	return core.FailureOf(r)
}

// guests are those of the registry.
type guests struct{ s *service }

func (g guests) ByNKey(q bus.Question) (callout.Guest, error) {
	now := g.s.registry.Current()
	l, ok := now.ByNKey(q.NKey)
	if !ok {
		return callout.Guest{}, &core.Refusal{Kind: errkind.Unauthenticated, Reason: "this nkey is not registered"}
	}
	out := callout.Guest{Caller: l.Caller, Mark: callout.NKeyMark(q.NKey)}
	if why, may := now.May(l.Caller, q.NKey); !may {
		return out, shutOut(l.Caller.Name(), why)
	}
	if role, ok := certified[l.Caller.Role]; ok && q.TLS && !shows(q.Peer, role, l.Caller) {
		return out, &core.Refusal{Kind: errkind.Unauthenticated, Reason: fmt.Sprintf("a %s must show its own certificate, which names it", role)}
	}
	return out, nil
}

// certified are the logins that must show a certificate, with the role that it names.
var certified = map[subjects.Role]string{subjects.RoleHost: certs.RoleHost, subjects.RoleGate: certs.RoleGate}

// shows reports whether a certificate is the caller's own.
func shows(cert *x509.Certificate, role string, c subjects.Caller) bool {
	if cert == nil {
		return false
	}
	p, ok := certs.PeerOf(cert)
	return ok && p.Role == role && p.Name == string(c.Host)
}

func (g guests) ByToken(ctx context.Context, token string) (callout.Guest, error) {
	v := g.s.view()
	tok, err := v.tokens.Verify(ctx, token)
	if errs.Is(err, errkind.Unavailable) {
		return callout.Guest{}, err
	}
	if err != nil {
		return callout.Guest{}, &core.Refusal{Kind: errs.Kind(err), Reason: reasonOf(err)}
	}
	vouched, err := v.snapshot.Policy.Vouch(coreToken(tok), time.Now())
	who := vouched.Principal
	if err != nil {
		return callout.Guest{}, err
	}
	out := callout.Guest{Caller: subjects.Frontend(who.Tenant, subjects.UserFrontend(who.Issuer, who.Subject)),
		Mark: callout.IssuerMark(who.Issuer), Expires: tok.Expires}
	if tok.Acting != "" {
		return out, &core.Refusal{Kind: errkind.Denied, Reason: "a token that was exchanged for a frontend is no user's login"}
	}
	if len(vouched.Entry.Frontends) > 0 {
		return out, &core.Refusal{Kind: errkind.Denied, Reason: "tokens of this issuer are carried by certain frontends only"}
	}
	if why, shut := v.snapshot.Shut(out.Caller); shut {
		return out, shutOut("the user", why)
	}
	for _, key := range g.s.derive.secrets(time.Now()) {
		out.Sessions = append(out.Sessions, ids.DeriveSessionKey(key, who.Issuer, who.Tenant, who.Subject, ids.DefaultSession))
	}
	return out, nil
}

func shutOut(who, why string) error {
	if why == "" {
		return &core.Refusal{Kind: errkind.Refused, Reason: who + " is suspended"}
	}
	return &core.Refusal{Kind: errkind.Refused, Reason: fmt.Sprintf("%s is shut out: %s", who, why)}
}

// over tells which connections may not be any more, by one state of the registry.
func over(now *registry.Snapshot) callout.Over {
	users := map[subjects.Caller]string{}
	for p, rule := range now.Policy.Users {
		users[subjects.Frontend(p.Tenant, subjects.UserFrontend(p.Issuer, p.Subject))] = rule.Why
	}
	issuers := map[string]bool{}
	for _, e := range now.Policy.Entries {
		issuers[string(e.Tenant)+" "+string(callout.IssuerMark(e.Issuer))] = true
	}
	return func(c callout.Connected) (why string, is bool) {
		if nkey, ok := c.Mark.NKey(); ok {
			why, may := now.May(c.Caller, nkey)
			return why, !may
		}
		if why, shut := now.Shut(c.Caller); shut {
			return why, true
		}
		if why, shut := users[c.Caller]; shut {
			return why, true
		}
		if !issuers[string(c.Caller.Tenant)+" "+string(c.Mark)] {
			return "its issuer was removed", true
		}
		return "", false
	}
}
