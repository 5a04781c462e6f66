package identity

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/registry"
)

// serveRegistry serves what operators ask of the registry.
func (s *service) serveRegistry() error {
	for _, add := range []func() error{
		func() error { return bus.Handle(s.rpc, "tenants", s.tenants) },
		func() error { return bus.Handle(s.rpc, "tenant_put", s.putTenant) },
		func() error { return bus.Handle(s.rpc, "issuer_put", s.putIssuer) },
		func() error { return bus.Handle(s.rpc, "issuer_test", s.testIssuer) },
		func() error { return bus.Handle(s.rpc, "login_put", s.putLogin) },
		func() error { return bus.Handle(s.rpc, "suspend", s.operatorSuspends) },
	} {
		if err := add(); err != nil {
			return err
		}
	}
	return nil
}

// tenants lists; an unknown tenant is NotFound.
func (s *service) tenants(_ context.Context, _ bus.Request, r *identityv1.TenantsRequest) (*identityv1.TenantsReply, error) {
	now, of := s.registry.Current(), ids.Tenant(r.GetTenant())
	if _, ok := now.Tenant(of); of != "" && !ok {
		return nil, errs.E("list tenants", errkind.NotFound, "", "there is no such tenant")
	}
	return now.List(of), nil
}

func (s *service) putTenant(ctx context.Context, r bus.Request, q *identityv1.TenantPutRequest) (*identityv1.TenantPutReply, error) {
	t, err := s.registry.PutTenant(ctx, q.GetTenant())
	s.changed(ctx, r, &corev1.Actor{Tenant: q.GetTenant().GetTenant()}, "", err)
	return &identityv1.TenantPutReply{Tenant: t}, err
}

// putIssuer: the grants of users of an issuer that was removed end.
func (s *service) putIssuer(ctx context.Context, r bus.Request, q *identityv1.IssuerPutRequest) (*identityv1.IssuerPutReply, error) {
	i, err := s.registry.PutIssuer(ctx, q.GetIssuer(), q.GetRemove())
	s.changed(ctx, r, &corev1.Actor{Tenant: q.GetIssuer().GetTenant(), Issuer: q.GetIssuer().GetIssuer()}, "", err)
	if err == nil && q.GetRemove() && !s.registry.Current().Names(i.GetTenant(), i.GetIssuer()) {
		err = s.endGrants(ctx, &credentialsv1.EndGrantsRequest{Tenant: i.GetTenant(), Issuer: i.GetIssuer(), Reason: "the issuer was removed"})
	}
	return &identityv1.IssuerPutReply{Issuer: i}, err
}

// putLogin: the grants that a removed frontend holds end.
func (s *service) putLogin(ctx context.Context, r bus.Request, q *identityv1.LoginPutRequest) (*identityv1.LoginPutReply, error) {
	l, err := s.registry.PutLogin(ctx, q.GetLogin(), q.GetRemove())
	c, perr := subjects.ParseName(q.GetLogin().GetName())
	frontend := perr == nil && c.Role == subjects.RoleFrontend
	about := &corev1.Actor{}
	switch {
	case frontend:
		about = &corev1.Actor{Tenant: string(c.Tenant), Frontend: string(c.Frontend)}
	case perr == nil:
		about.Role = c.Name()
	}
	s.changed(ctx, r, about, l.GetSuspendedWhy(), err)
	if err == nil && frontend && (q.GetRemove() || l.GetSuspended()) {
		err = s.endGrants(ctx, &credentialsv1.EndGrantsRequest{Tenant: string(c.Tenant), Frontend: string(c.Frontend), Reason: "the frontend is shut out"})
	}
	return &identityv1.LoginPutReply{Login: l}, err
}

func (s *service) operatorSuspends(ctx context.Context, r bus.Request, q *identityv1.SuspendRequest) (*identityv1.SuspendReply, error) {
	what := q.GetWhat()
	if what == nil {
		return nil, errs.E("suspend", errkind.Invalid, "", "nobody is named")
	}
	what.By = registry.ByOperator
	err := s.suspend(ctx, what, q.GetSuspended())
	stored := err
	if errors.Is(err, errUnended) {
		stored = nil // who was shut out is
	}
	s.changed(ctx, r, &corev1.Actor{Tenant: what.GetTenant(), Issuer: what.GetIssuer(), Subject: what.GetSubject(), Frontend: what.GetFrontend()}, what.GetReason(), stored)
	return &identityv1.SuspendReply{}, err
}

// suspend shuts out, or lets in again, on behalf of what.By. Grants of whoever is shut out end; their
// connections are ended by the callout, which follows the registry. When the grants cannot be ended now
// the answer is Unavailable, and it is tried again until they are.
func (s *service) suspend(ctx context.Context, what *identityv1.Suspension, on bool) error {
	if err := s.registry.Suspend(ctx, what, what.GetBy(), on); err != nil || !on {
		return err
	}
	return s.endGrants(ctx, endOf(what))
}

func endOf(what *identityv1.Suspension) *credentialsv1.EndGrantsRequest {
	return &credentialsv1.EndGrantsRequest{Tenant: what.GetTenant(), Issuer: what.GetIssuer(), Subject: what.GetSubject(), Frontend: what.GetFrontend(), Reason: "suspended"}
}

const (
	// endAgain is when grants are ended once more: a request that another
	// identity had under way may have got one in between.
	endAgain = 2 * time.Second
	// endWithin bounds how long it is tried.
	endWithin = 30 * time.Minute
)

// errUnended: the change was made, and holds.
var errUnended = errs.E("end grants", errkind.Unavailable, "", "it is stored and nobody new is let in, but grants that were given out cannot be ended now; that is tried until it is done")

// endGrants ends grants now, and once more a little later.
func (s *service) endGrants(ctx context.Context, q *credentialsv1.EndGrantsRequest) error {
	_, err := bus.Invoke[*credentialsv1.EndGrantsReply](ctx, s.conn, "credentials", "end_grants", q)
	s.endLater(q)
	if err != nil {
		s.log.Warn("grants of whoever was shut out cannot be ended now; it is tried again", "error", err)
		return errUnended
	}
	return nil
}

// shutOut reports whether what a request ends grants for still holds: the tenant, user, frontend or issuer was not let
// in again meanwhile.
func (s *service) shutOut(q *credentialsv1.EndGrantsRequest) bool {
	now, t := s.registry.Current(), ids.Tenant(q.GetTenant())
	for _, what := range now.List(t).GetSuspended() {
		if keyOf(endOf(what)) == keyOf(q) {
			return true
		}
	}
	switch {
	case q.GetFrontend() != "" && q.GetSubject() != "":
		return s.acting.Revoked(&corev1.Actor{Tenant: q.GetTenant(), Issuer: q.GetIssuer(), Subject: q.GetSubject(), Frontend: q.GetFrontend()})
	case q.GetFrontend() != "":
		_, known := now.Policy.Frontends[core.FrontendID{Tenant: t, Frontend: ids.Frontend(q.GetFrontend())}]
		_, shut := now.Shut(subjects.Frontend(t, ids.Frontend(q.GetFrontend())))
		return !known || shut
	case q.GetSubject() == "" && q.GetIssuer() != "":
		return !now.Names(q.GetTenant(), q.GetIssuer())
	}
	return false
}

func keyOf(q *credentialsv1.EndGrantsRequest) string {
	return strings.Join([]string{q.GetTenant(), q.GetIssuer(), q.GetSubject(), q.GetFrontend()}, "\x00")
}

// endLater ends grants once more, unless the tenant, user, frontend or issuer was let in again by then: credentials
// ends every grant that was issued until now, also those issued after a suspension was lifted. However often that is asked for the same grants, one waits: users may
// ask, and credentials may be away for long.
func (s *service) endLater(q *credentialsv1.EndGrantsRequest) {
	key := keyOf(q)
	if !s.unended.begin(key) {
		return
	}
	s.later(endAgain, func(ctx context.Context) error {
		if !s.shutOut(q) {
			return nil
		}
		_, err := bus.Invoke[*credentialsv1.EndGrantsReply](ctx, s.conn, "credentials", "end_grants", q)
		return err
	}, func() {
		if s.unended.done(key) && s.follow.Err() == nil {
			s.endLater(q)
		}
	})
}

// underWay are things of which each is under way once. The zero value has none; safe for concurrent use.
type underWay struct {
	mu sync.Mutex
	of map[string]bool // true: it was asked for again
}

// begin reports whether it is to be begun; else it is under way, and is noted to be asked for again.
func (u *underWay) begin(key string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.of == nil {
		u.of = map[string]bool{}
	}
	_, is := u.of[key]
	u.of[key] = is
	return !is
}

// done ends it, and reports whether it was asked for again.
func (u *underWay) done(key string) (again bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	again = u.of[key]
	delete(u.of, key)
	return again
}

// later does something after a while, and again until it works, the service ends or it is too late; then
// over is called.
func (s *service) later(wait time.Duration, do func(context.Context) error, over func()) {
	s.ending.Go(func() {
		defer over()
		until := time.Now().Add(endWithin)
		for ; time.Now().Before(until); wait = min(max(2*wait, time.Second), 30*time.Second) {
			select {
			case <-s.follow.Done():
				return
			case <-time.After(wait):
			}
			err := do(s.follow)
			if err == nil || s.follow.Err() != nil {
				return
			}
			s.log.Warn("grants of whoever was shut out cannot be ended yet", "error", err)
		}
	})
}

// healWithin is longer than any grant lives: a suspension older than that has none left to end.
const healWithin = 24 * time.Hour

// heal ends grants again that an identity may have died before ending.
func (s *service) heal() {
	all := s.registry.Current().List("").GetSuspended()
	s.later(0, func(ctx context.Context) error {
		for _, what := range all {
			if time.Since(what.GetAt().AsTime()) > healWithin || !s.shutOut(endOf(what)) {
				continue
			}
			if _, err := bus.Invoke[*credentialsv1.EndGrantsReply](ctx, s.conn, "credentials", "end_grants", endOf(what)); err != nil {
				return err
			}
		}
		return nil
	}, func() {})
}

// changed records under audit what an operator did to the registry, or was refused.
func (s *service) changed(ctx context.Context, r bus.Request, about *corev1.Actor, why string, err error) {
	rec := &identityv1.Audit{Verb: r.Method, Door: "operator", Actor: &corev1.Actor{Tenant: tokenOrNone(about.GetTenant()), Role: "operator"},
		About: about, Reason: why, Admitted: err == nil, At: timestamppb.Now()}
	if err != nil {
		rec.Failure = &corev1.Failure{Kind: errs.Kind(err).String(), Reason: reasonOf(err)}
	}
	s.record(ctx, rec)
}

// tokenOrNone keeps what is no tenant out of a subject.
func tokenOrNone(t string) string {
	if _, err := ids.ParseTenant(t); err != nil {
		return ids.None
	}
	return t
}
