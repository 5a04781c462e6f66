package identity

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/acting"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// openDelegation reads, before anybody is let in, from which frontends users
// took the right to act for them.
func (s *service) openDelegation(ctx context.Context) (err error) {
	starting, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	s.acting, err = acting.Open(starting, s.follow, s.conn, s.log)
	return err
}

// closeDelegation returns when nothing of it runs any more.
func (s *service) closeDelegation() {
	if s.acting != nil {
		s.acting.Wait()
	}
}

// tokenGood is what the core is told of a token that was verified.
func (x *exchange) tokenGood(tok tokens.Token) core.TokenGood {
	a := x.state.Asked
	who := &corev1.Actor{Tenant: string(a.Tenant), Issuer: tok.Issuer, Subject: tok.Subject, Frontend: string(a.Frontend)}
	return core.TokenGood{Token: coreToken(tok), Revoked: x.acting.Revoked(who)}
}

// acted notes who acted, for a request that was let in. A user's own login
// acts for nobody.
func (s *service) acted(rec *identityv1.Audit) {
	a := rec.GetActor()
	if !rec.GetAdmitted() || a.GetSubject() == "" || a.GetRole() == core.RoleOperator || subjects.IsUserFrontend(ids.Frontend(a.GetFrontend())) {
		return
	}
	s.acting.Acted(a, rec.GetAt().AsTime())
}

// listFrontends answers with everyone who acted for the user.
func (x *exchange) listFrontends(ctx context.Context, actor *corev1.Actor) error {
	list, err := x.acting.List(ctx, actor)
	if err != nil {
		return err
	}
	x.reply.Outcome = &identityv1.Reply_Frontends{Frontends: &identityv1.FrontendsReply{Frontends: list}}
	return nil
}

// settleFrontend takes the right to act for the user from a frontend, durably,
// and ends the grants that it holds for this user; or gives the right back.
func (x *exchange) settleFrontend(ctx context.Context, c core.CallRevokeFrontend) error {
	if _, registered := x.state.Policy.Frontends[core.FrontendID{Tenant: x.state.Asked.Tenant, Frontend: c.Frontend}]; !registered {
		known, err := x.acting.Known(ctx, c.Actor, c.Frontend)
		if err != nil {
			return err
		}
		if !known {
			return errs.E("revoke frontend", errkind.NotFound, "", "there is no such frontend, and none of this name acted for the user")
		}
	}
	at := time.Now()
	if err := x.acting.Revoke(ctx, c.Actor, c.Frontend, c.Allow, at); err != nil {
		return err
	}
	reply := &identityv1.ActedFor{Frontend: string(c.Frontend)}
	if !c.Allow {
		reply.RevokedAt = timestamppb.New(at)
		if err := x.endGrants(ctx, &credentialsv1.EndGrantsRequest{Tenant: c.Actor.GetTenant(), Issuer: c.Actor.GetIssuer(), Subject: c.Actor.GetSubject(),
			Frontend: string(c.Frontend), Reason: "the user took the right to act for them away"}); err != nil {
			return err
		}
	}
	x.reply.Outcome = &identityv1.Reply_RevokeFrontend{RevokeFrontend: &identityv1.RevokeFrontendReply{Frontend: reply}}
	return nil
}
