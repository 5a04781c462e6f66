package sdktest

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/subjects"
)

// acting is which frontends acted for users, and who is an administrator.
type acting struct {
	users  map[user]map[string]*identityv1.ActedFor
	admins map[user]bool
}

// Administrator makes a token for an administrator of a tenant.
func (s *Server) Administrator(tenant, subject string) string {
	s.mu.Lock()
	if s.acting.admins == nil {
		s.acting.admins = map[user]bool{}
	}
	s.acting.admins[user{tenant, subject}] = true
	s.mu.Unlock()
	return s.Token(tenant, subject)
}

// acted notes that a frontend acts for a user, unless the user took the right away.
func (s *Server) acted(who subjects.Caller, u user) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.pair(u, string(who.Frontend))
	if f.RevokedAt != nil {
		return fault{errkind.Denied, "the user has taken from this frontend the right to act for them"}
	}
	now := time.Now()
	if f.FirstAt == nil {
		f.FirstAt = timestamppb.New(now)
	}
	f.LastAt = timestamppb.New(now.Truncate(time.Hour))
	return nil
}

func (s *Server) pair(u user, frontend string) *identityv1.ActedFor {
	if s.acting.users == nil {
		s.acting.users = map[user]map[string]*identityv1.ActedFor{}
	}
	if s.acting.users[u] == nil {
		s.acting.users[u] = map[string]*identityv1.ActedFor{}
	}
	if s.acting.users[u][frontend] == nil {
		s.acting.users[u][frontend] = &identityv1.ActedFor{Frontend: frontend}
	}
	return s.acting.users[u][frontend]
}

// about answers the verbs about frontends and other users' sessions; nil, nil for others.
func (s *Server) about(who subjects.Caller, u user, env *identityv1.Envelope) (*identityv1.Reply, error) {
	body := map[string]proto.Message{"frontends": &identityv1.FrontendsRequest{}, "revoke_frontend": &identityv1.RevokeFrontendRequest{},
		"admin_sessions": &identityv1.AdminSessionsRequest{}, "admin_attach": &identityv1.AdminAttachRequest{}}[env.GetVerb()]
	if body == nil {
		return nil, nil
	}
	if err := decode(env.GetContentType(), env.GetBody(), body); err != nil {
		return nil, fault{errkind.Invalid, "the body is not a request of that verb"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch b := body.(type) {
	case *identityv1.FrontendsRequest:
		out := &identityv1.FrontendsReply{}
		for _, f := range s.acting.users[u] {
			out.Frontends = append(out.Frontends, proto.CloneOf(f))
		}
		return &identityv1.Reply{Outcome: &identityv1.Reply_Frontends{Frontends: out}}, nil
	case *identityv1.RevokeFrontendRequest:
		f := s.pair(u, b.GetFrontend())
		if f.RevokedAt = nil; !b.GetAllow() {
			f.RevokedAt = timestamppb.Now()
		}
		return &identityv1.Reply{Outcome: &identityv1.Reply_RevokeFrontend{RevokeFrontend: &identityv1.RevokeFrontendReply{Frontend: proto.CloneOf(f)}}}, nil
	}
	if !s.acting.admins[u] {
		return nil, fault{errkind.Denied, "this needs a token of an administrator of the tenant"}
	}
	if b, ok := body.(*identityv1.AdminAttachRequest); ok {
		return s.attach(who, u, env, b)
	}
	out := &identityv1.AdminSessionsReply{}
	for _, x := range s.sorted() {
		if x.tenant == u.tenant {
			out.Sessions = append(out.Sessions, &identityv1.AdminSession{Handle: handleOf(x), State: x.state, Generation: x.ref().GetGeneration()})
		}
	}
	return &identityv1.Reply{Outcome: &identityv1.Reply_AdminSessions{AdminSessions: out}}, nil
}

// handleOf is opaque enough for a fake.
func handleOf(x *session) string {
	b := []byte(x.key)
	slices.Reverse(b)
	return "h" + string(b)
}

func (s *Server) attach(who subjects.Caller, u user, env *identityv1.Envelope, b *identityv1.AdminAttachRequest) (*identityv1.Reply, error) {
	for _, x := range s.sorted() {
		if x.tenant != u.tenant || handleOf(x) != b.GetHandle() || x.subject != b.GetSubject() || b.GetIssuer() != Issuer {
			continue
		}
		if x.state != corev1.State_STATE_ACTIVE || !proto.Equal(x.ref().GetGeneration(), b.GetGeneration()) {
			return nil, fault{errkind.Conflict, "the session has another generation than the one named, or is not active"}
		}
		words := b.GetVerbs()
		if len(words) == 0 {
			words = []string{string(grant.VerbRead)}
		}
		verbs, err := grant.ParseVerbs(words)
		if err != nil {
			return nil, err
		}
		o := &identityv1.OpenReply{Session: x.ref()}
		if err := s.mint(o, who, u, holder{env.GetProofKey(), verbs}); err != nil {
			return nil, err
		}
		return &identityv1.Reply{Outcome: &identityv1.Reply_AdminAttach{AdminAttach: &identityv1.AdminAttachReply{Session: o.GetSession(),
			Grant: o.GetGrant(), GrantExpires: o.GetGrantExpires(), Endpoint: s.endpoint(x)}}}, nil
	}
	return nil, fault{errkind.NotFound, "there is no such session of this user"}
}
