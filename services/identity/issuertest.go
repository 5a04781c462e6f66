package identity

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/identity/internal/registry"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// trial is one test of an issuer, step by step.
type trial struct {
	reply *identityv1.IssuerTestReply
	err   error // of the first step that failed
}

func (t *trial) step(name, good string, err error) bool {
	if t.err != nil {
		return false
	}
	if t.err = err; err != nil {
		good = reasonOf(err)
	}
	t.reply.Checks = append(t.reply.Checks, &identityv1.Check{Name: name, Good: err == nil, Detail: good})
	return err == nil
}

// testIssuer does what a request's token goes through, with keys fetched anew. A step that fails is the
// last one, and no error of the call. Nothing is cached of it, and nothing but the principal is told of the
// token.
func (s *service) testIssuer(ctx context.Context, r bus.Request, q *identityv1.IssuerTestRequest) (*identityv1.IssuerTestReply, error) {
	t := &trial{reply: &identityv1.IssuerTestReply{}}
	s.tested(ctx, q, t)
	s.changed(ctx, r, &corev1.Actor{Tenant: t.reply.GetTenant(), Issuer: q.GetIssuer(), Subject: t.reply.GetSubject()}, "", t.err)
	return t.reply, nil
}

func (s *service) tested(ctx context.Context, q *identityv1.IssuerTestRequest, t *trial) {
	v := s.view()
	i, ok := v.snapshot.Issuer(q.GetIssuer(), q.GetAudience())
	if !ok {
		t.step("registered", "", errs.E("test issuer", errkind.NotFound, "", unregistered(v.snapshot, q)))
		return
	}
	t.reply.Tenant = i.GetTenant()
	t.step("registered", fmt.Sprintf("tenant %s, audience %s", i.GetTenant(), i.GetAudience()), nil)
	if found, ok := v.snapshot.Tenant(ids.Tenant(i.GetTenant())); ok && found.GetSuspended() {
		t.step("tenant", "", errs.E("test issuer", errkind.Refused, "", "the tenant is suspended"))
	}
	probed, err := tokens.Probe(ctx, v.snapshot.Trust(i.GetIssuer()))
	if err != nil {
		t.step("keys", "", err)
		return
	}
	if !t.step("keys", fmt.Sprintf("%d: %s", len(probed.Keys), strings.Join(probed.Keys, ", ")), nil) || len(q.GetSealedToken()) == 0 {
		return
	}
	raw, err := s.openSealed(q.GetSealedToken())
	if t.step("sealed token", "opened", err) {
		s.examined(ctx, v, probed, string(raw), t)
	}
}

// examined takes a token through the steps after its keys were fetched.
func (s *service) examined(ctx context.Context, v *view, probed *tokens.Probed, raw string, t *trial) {
	tok, failed, err := probed.Examine(ctx, raw)
	if err != nil {
		t.step(failed, "", err)
		return
	}
	t.step(tokens.StepSignature, "good", nil)
	who, err := v.snapshot.Policy.Vouch(coreToken(tok), time.Now())
	audiences := v.snapshot.Audiences(tok.Issuer)
	if err != nil && !slices.ContainsFunc(audiences, func(a string) bool { return slices.Contains(tok.Audience, a) }) {
		err = errs.Errorf("test issuer", errkind.Unauthenticated, "the token is for an audience that is not registered; registered for its issuer: %s", strings.Join(audiences, ", "))
	}
	if t.step("policy", "times, audience and plan are good", err) {
		t.reply.Tenant, t.reply.Subject, t.reply.Plan, t.reply.Administrator = string(who.Principal.Tenant), who.Principal.Subject, who.Plan, who.Administrator
	}
}

// unregistered says what of an issuer and an audience is not registered.
func unregistered(now *registry.Snapshot, q *identityv1.IssuerTestRequest) string {
	audiences := strings.Join(now.Audiences(q.GetIssuer()), ", ")
	switch {
	case audiences == "":
		return "this issuer is not registered"
	case q.GetAudience() == "":
		return "the issuer is registered with several audiences, and one must be named: " + audiences
	}
	return "the issuer is not registered with this audience; registered: " + audiences
}

// openSealed opens what was sealed to a curve key that identity has.
func (s *service) openSealed(sealed []byte) (plain []byte, err error) {
	for _, k := range s.curve {
		if plain, err = k.OpenEnvelope(sealed); err == nil {
			return plain, nil
		}
	}
	return nil, errs.E("open", errkind.Invalid, "", "it cannot be opened; it must be sealed to the key that identity.keys returns")
}
