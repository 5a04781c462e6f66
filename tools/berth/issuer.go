package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/sdk"
)

type issuerCmd struct {
	Add    issuerAddCmd    `cmd:"" help:"Register an issuer and an audience for a tenant, or change that (--revision)."`
	Test   issuerTestCmd   `cmd:"" help:"Fetch an issuer's keys, and verify a token of it step by step."`
	Remove issuerRemoveCmd `cmd:"" help:"Remove an issuer and audience: its users' grants end."`
}

type issuerAddCmd struct {
	Issuer         string            `arg:"" help:"The iss claim, byte for byte; OIDC discovery begins there." placeholder:"URL"`
	Audience       string            `required:"" help:"Must be among the token's aud." placeholder:"AUD"`
	Tenant         string            `required:"" help:"Tenant that such users are of." placeholder:"TENANT"`
	Algorithm      []string          `help:"Signature algorithm that is allowed; default: RS256, ES256 and EdDSA." placeholder:"ALG"`
	ClockTolerance *time.Duration    `help:"How far the issuer's clock may differ, 0 to 5m; default: 30s." placeholder:"TIME"`
	Plan           string            `help:"Plan of users whose token names none; default: the tenant's." placeholder:"PLAN"`
	PlanClaim      string            `help:"Claim that chooses the plan." placeholder:"CLAIM"`
	PlanFor        map[string]string `help:"Plan for a value of that claim; a value without one is refused." placeholder:"VALUE=PLAN"`
	GroupsClaim    string            `help:"Claim that lists groups." placeholder:"CLAIM"`
	AdminGroup     []string          `help:"Group of administrators of the tenant." sep:"none" placeholder:"GROUP"`
	TierFloor      string            `help:"Weakest isolation tier." placeholder:"TIER"`
	Frontend       []string          `help:"Frontend that may carry such tokens; default: every one of the tenant." placeholder:"NAME"`
	JWKS           string            `name:"jwks" help:"File of the issuer's keys (RFC 7517) instead of discovery." placeholder:"FILE" type:"path"`
	revisionFlag
}

func (c *issuerAddCmd) Run(a *app) error {
	i := &identityv1.Issuer{Issuer: c.Issuer, Audience: c.Audience, Tenant: c.Tenant, Algorithms: c.Algorithm, Plan: c.Plan, PlanClaim: c.PlanClaim,
		Plans: c.PlanFor, GroupsClaim: c.GroupsClaim, AdminGroups: c.AdminGroup, TierFloor: c.TierFloor, Frontends: c.Frontend, Revision: c.Revision}
	if c.ClockTolerance != nil {
		i.ClockTolerance = durationpb.New(*c.ClockTolerance)
	}
	if c.JWKS != "" {
		raw, err := os.ReadFile(c.JWKS)
		if err != nil {
			return fmt.Errorf("read the issuer's keys: %w", err)
		}
		i.Jwks = raw
	}
	reply := &identityv1.IssuerPutReply{}
	if err := a.registry("issuer_put", &identityv1.IssuerPutRequest{Issuer: i}, reply); err != nil {
		return err
	}
	out := issuerOutOf(reply.GetIssuer())
	return a.print(out, func() {
		fmt.Fprintf(a.stdout, "issuer %s with audience %s is of tenant %s, at revision %d\n", plain(out.Issuer), plain(out.Audience), out.Tenant, out.Revision)
	})
}

type issuerTestCmd struct {
	Issuer   string `arg:"" help:"The iss claim, byte for byte." placeholder:"URL"`
	Audience string `help:"Which audience, where the issuer has several." placeholder:"AUD"`
	Token    string `help:"A token of it: FILE or @FILE with it, - for standard input, or the JWT itself. It crosses the bus sealed." placeholder:"FILE"`
}

func (c *issuerTestCmd) Run(a *app) error {
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	ask := &identityv1.IssuerTestRequest{Issuer: c.Issuer, Audience: c.Audience}
	if c.Token != "" {
		if ask.SealedToken, err = c.sealed(a, op); err != nil {
			return err
		}
	}
	reply := &identityv1.IssuerTestReply{}
	if err := op.Call(a.ctx, "identity", "issuer_test", ask, reply); err != nil {
		return oneSentence(err)
	}
	out := issuerTestOutOf(c.Issuer, reply)
	if err := a.print(out, func() { a.renderIssuerTest(out) }); err != nil {
		return err
	}
	if !out.Good {
		return exitCode{code: 1}
	}
	return nil
}

// sealed is the token, sealed to identity's key.
func (c *issuerTestCmd) sealed(a *app, op *sdk.Client) ([]byte, error) {
	token := c.Token
	if !isJWT(token) {
		var err error
		if token, err = a.readToken(strings.TrimPrefix(token, "@")); err != nil {
			return nil, err
		}
	}
	keys := &identityv1.KeysReply{}
	if err := op.Call(a.ctx, "identity", "keys", &identityv1.KeysRequest{}, keys); err != nil {
		return nil, err
	}
	key, err := seal.ParsePublic(keys.GetCurveKey())
	if err != nil {
		return nil, fmt.Errorf("identity's key: %w", err)
	}
	return seal.SealTo(key, []byte(token), rand.Reader)
}

type issuerRemoveCmd struct {
	Issuer   string `arg:"" help:"The iss claim, byte for byte." placeholder:"URL"`
	Audience string `required:"" help:"The audience." placeholder:"AUD"`
}

func (c *issuerRemoveCmd) Run(a *app) error {
	all, err := a.tenants("")
	if err != nil {
		return err
	}
	for _, i := range all.GetIssuers() {
		if i.GetIssuer() != c.Issuer || i.GetAudience() != c.Audience {
			continue
		}
		if err := a.registry("issuer_put", &identityv1.IssuerPutRequest{Issuer: i, Remove: true}, &identityv1.IssuerPutReply{}); err != nil {
			return err
		}
		out := issuerRemovedOut{Issuer: c.Issuer, Audience: c.Audience, Removed: true}
		return a.print(out, func() {
			fmt.Fprintf(a.stdout, "issuer %s with audience %s is removed\n", plain(out.Issuer), plain(out.Audience))
		})
	}
	return fmt.Errorf("issuer %s with audience %s is not registered", plain(c.Issuer), plain(c.Audience))
}

// registry calls a method of the registry as operator.
func (a *app) registry(method string, ask, reply proto.Message) error {
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	return oneSentence(op.Call(a.ctx, "identity", method, ask, reply))
}

// oneSentence leaves the reason that identity gave; a wrong value is wrong usage.
func oneSentence(err error) error {
	var e *sdk.Error
	if !errors.As(err, &e) || e.Reason == "" || errors.Is(err, sdk.ErrUnavailable) {
		return err
	}
	if errors.Is(err, sdk.ErrInvalid) {
		return exitCode{2, e.Reason}
	}
	return sentence{e}
}

// sentence is an error of which only the reason is said.
type sentence struct{ err *sdk.Error }

func (s sentence) Error() string { return s.err.Reason }

func (s sentence) Unwrap() error { return s.err }
