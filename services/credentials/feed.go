package credentials

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials/internal/core"
)

// changesKeySet reports whether commands come with a change of what jwks answers.
func changesKeySet(cmds []core.Command) bool {
	for _, c := range cmds {
		switch c := c.(type) {
		case core.DropKey, core.EndGeneration, core.DropRevocation, core.StoreEnding, core.DropEnding:
			return true
		case core.Audit:
			if c.What == "rotated" {
				return true
			}
		}
	}
	return false
}

// check returns the verifier of the keys and revocations of now.
func (s *service) check() (*grant.Verifier, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.verifier != nil {
		return s.verifier, nil
	}
	revoked := make([]grant.Revocation, 0, len(s.state.Revoked))
	for g, until := range s.state.Revoked {
		revoked = append(revoked, grant.Revocation{Tenant: g.Tenant, Session: g.Session, Generation: g.Generation, Until: until})
	}
	ended := make([]grant.Ending, 0, len(s.state.Ended))
	for _, e := range s.state.Ended {
		ended = append(ended, e)
	}
	v, err := grant.NewVerifier(s.keySet(), revoked, ended)
	s.verifier = v
	return v, err
}

// keySet is the RFC 7517 key set; the lock is held.
func (s *service) keySet() []byte {
	set := struct {
		Keys []grant.JWK `json:"keys"`
	}{[]grant.JWK{}}
	for _, k := range s.state.Keys {
		secret := s.secrets[k.ID]
		if secret == nil {
			continue
		}
		set.Keys = append(set.Keys, grant.JWK{KeyType: "OKP", Curve: "Ed25519", KeyID: string(k.ID), Use: "sig", Alg: "EdDSA",
			X: base64.RawURLEncoding.EncodeToString(secret.Public().(ed25519.PublicKey))})
	}
	raw, _ := json.Marshal(set) // cannot fail: strings only
	return raw
}

// maxTold is how many deleted generations a host is told of, the latest ones: all of them are told in one
// message, at each change again. A host closes the data plane of a session that is deleted by itself, or
// loses its lease within seconds, and no later generation takes the grants of an earlier one: so the list
// hurries, and nothing hangs on what was deleted before the last maxTold.
const maxTold = 512

// jwks answers with the key set and what was revoked, or with feed and seq alone when the caller has
// just that. A frontend hears of its own tenant's deleted generations only, and of no user's grants that
// were ended: it has no use for the names of others.
func (s *service) jwks(_ context.Context, r bus.Request, req *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if req.GetFeed() == s.feed && req.GetSeq() == s.seq {
		return &credentialsv1.JwksReply{Feed: s.feed, Seq: s.seq}, nil
	}
	if r.Caller.Role == subjects.RoleFrontend {
		return s.all(r.Caller.Tenant), nil
	}
	if s.told == nil { // who asks from the same state is told the same
		s.told = s.all("")
	}
	return s.told, nil
}

// all is the whole answer for a host or a service, or for a frontend of a tenant; the lock is held.
func (s *service) all(frontendOf ids.Tenant) *credentialsv1.JwksReply {
	reply := &credentialsv1.JwksReply{Feed: s.feed, Seq: s.seq, Jwks: s.keySet(), CurveKey: s.box.Public()}
	for _, g := range latest(s.state.Revoked, frontendOf) {
		reply.Revoked = append(reply.Revoked, &credentialsv1.RevokedGeneration{
			Tenant: string(g.Tenant), Session: string(g.Session), Until: timestamppb.New(g.until),
			Generation: &corev1.Stamp{Incarnation: g.Generation.Generation.Incarnation, Index: g.Generation.Generation.Index},
		})
	}
	if frontendOf != "" {
		return reply
	}
	for _, e := range s.state.Ended {
		reply.Ended = append(reply.Ended, &credentialsv1.EndedGrants{
			Tenant: string(e.Tenant), Issuer: e.Issuer, Subject: e.Subject, Frontend: string(e.Frontend),
			At: timestamppb.New(e.At), Until: timestamppb.New(e.Until),
		})
	}
	return reply
}

// deleted is a generation that was deleted.
type deleted struct {
	core.Generation
	until time.Time
}

// latest are the generations that were deleted last, the last one first, at most maxTold. With many
// deletions all hosts ask after each: what is too old to be among them is not sorted.
func latest(revoked map[core.Generation]time.Time, of ids.Tenant) []deleted {
	out := make([]deleted, 0, 2*maxTold)
	var floor time.Time
	cut := func() {
		slices.SortFunc(out, func(a, b deleted) int { return b.until.Compare(a.until) })
		out = out[:min(len(out), maxTold)]
	}
	for g, until := range revoked {
		if of != "" && g.Tenant != of || !until.After(floor) {
			continue
		}
		if out = append(out, deleted{g, until}); len(out) == 2*maxTold {
			cut()
			floor = out[maxTold-1].until
		}
	}
	cut()
	return out
}
