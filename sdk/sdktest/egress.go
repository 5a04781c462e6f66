package sdktest

import (
	"cmp"
	"slices"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// egress keeps egress policies as they were applied; it reads none of them, and nothing goes by them.
func (s *Server) egress(method string, m *nats.Msg) (proto.Message, error) {
	read := func(req proto.Message) error {
		if err := decode(m.Header.Get("Content-Type"), m.Data, req); err != nil {
			return fault{errkind.Invalid, err.Error()}
		}
		return nil
	}
	switch method {
	case "apply":
		req := &egressv1.ApplyRequest{}
		if err := read(req); err != nil {
			return nil, err
		}
		return s.applyPolicy(req)
	case "policies":
		req := &egressv1.PoliciesRequest{}
		if err := read(req); err != nil {
			return nil, err
		}
		out := &egressv1.PoliciesReply{}
		for _, p := range s.policies {
			if req.GetScope() == nil || proto.Equal(req.GetScope(), p.GetScope()) {
				out.Policies = append(out.Policies, p)
			}
		}
		slices.SortFunc(out.Policies, func(a, b *egressv1.Policy) int {
			return cmp.Or(cmp.Compare(a.GetScope().GetLayer(), b.GetScope().GetLayer()), cmp.Compare(a.GetScope().GetName(), b.GetScope().GetName()))
		})
		return fitting(out), nil
	case "remove":
		req := &egressv1.RemovePolicyRequest{}
		if err := read(req); err != nil {
			return nil, err
		}
		i := s.policyAt(req.GetScope())
		if i < 0 {
			return nil, fault{errkind.NotFound, "there is no such policy"}
		}
		if s.policies[i].GetGeneration() != req.GetReplaces() {
			return nil, fault{errkind.Conflict, "another generation of the policy is in force"}
		}
		s.policies = slices.Delete(s.policies, i, i+1)
		return &egressv1.RemovePolicyReply{}, nil
	}
	return nil, fault{errkind.Invalid, "there is no method " + method}
}

// fitting leaves out documents that do not fit in one answer.
func fitting(in *egressv1.PoliciesReply) *egressv1.PoliciesReply {
	out := &egressv1.PoliciesReply{}
	for _, p := range in.GetPolicies() {
		if proto.Size(out)+proto.Size(p) > 900<<10 {
			p = proto.CloneOf(p)
			p.Document = nil
		}
		out.Policies = append(out.Policies, p)
	}
	return out
}

func (s *Server) policyAt(scope *egressv1.Scope) int {
	return slices.IndexFunc(s.policies, func(p *egressv1.Policy) bool { return proto.Equal(p.GetScope(), scope) })
}

func (s *Server) applyPolicy(req *egressv1.ApplyRequest) (proto.Message, error) {
	i, now := s.policyAt(req.GetScope()), uint64(0)
	if i >= 0 {
		now = s.policies[i].GetGeneration()
	}
	if now != req.GetReplaces() {
		return nil, fault{errkind.Conflict, "another generation of the policy is in force"}
	}
	s.policyGeneration++
	p := &egressv1.Policy{Scope: req.GetScope(), Document: req.GetDocument(), Generation: s.policyGeneration, AppliedAt: timestamppb.Now(), AppliedBy: req.GetBy()}
	if i >= 0 {
		s.policies[i] = p
	} else {
		s.policies = append(s.policies, p)
	}
	return &egressv1.ApplyReply{Generation: p.GetGeneration()}, nil
}

// Audit stores an egress record, as if a gate had judged something.
func (s *Server) Audit(r *egressv1.Record) error {
	raw, err := proto.Marshal(r)
	if err != nil {
		return err
	}
	ref := r.GetSession()
	_, err = s.js.PublishMsg(s.ctx, &nats.Msg{Subject: subjects.Audit("egress", ids.Tenant(ref.GetTenant()), ids.SessionKey(ref.GetSession())), Data: raw,
		Header: nats.Header{"ce-id": {r.GetId()}, "ce-time": {r.GetBegan().AsTime().Format("2006-01-02T15:04:05.999999999Z07:00")}, "Content-Type": {"application/protobuf"}}})
	return err
}
