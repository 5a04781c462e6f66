package sdktest

import (
	"encoding/json"
	"strconv"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

// operator answers what only operators may ask.
func (s *Server) operator(m *nats.Msg) {
	call, err := subjects.ParseRPC(m.Subject)
	if err == nil && call.Method == "retry" {
		s.retry(m)
		return
	}
	if err != nil || call.Service != "scheduler" && call.Service != "host" && call.Service != "egress" {
		return
	}
	var out proto.Message
	s.mu.Lock()
	if call.Service == "host" {
		out, err = s.host(call, m)
	} else if call.Service == "egress" {
		out, err = s.egress(call.Method, m)
	} else if err = s.leads(); err == nil {
		out, err = s.scheduler(call.Method, m)
	}
	s.mu.Unlock()
	if err != nil {
		f := wire(err)
		kind := errkind.Internal
		for _, i := range errkind.All() {
			if i.Name == f.Kind {
				kind = i.Kind
			}
		}
		_ = m.RespondMsg(&nats.Msg{Header: nats.Header{"Nats-Service-Error-Code": {strconv.Itoa(int(kind))}, "Nats-Service-Error": {f.Reason}}})
		return
	}
	s.reply(m, out)
}

// retry takes a dead message for handled.
func (s *Server) retry(m *nats.Msg) {
	var req struct {
		Sequence uint64 `json:"sequence"`
	}
	if json.Unmarshal(m.Data, &req) != nil {
		return
	}
	if st, err := s.js.Stream(s.ctx, "BERTH_DEAD"); err == nil && st.DeleteMsg(s.ctx, req.Sequence) == nil {
		_ = m.Respond([]byte(`{"ok":true}`))
	}
}

// Bury puts a message among the dead ones, as if a consumer of the service
// had given it up.
func (s *Server) Bury(service, reason string, body []byte) error {
	_, err := s.js.PublishMsg(s.ctx, &nats.Msg{Subject: subjects.Dead(service), Data: body, Header: nats.Header{
		"Berth-Dead-Reason": {reason}, "Berth-Dead-Consumer": {service + "-sessions"}, "Berth-Dead-Subject": {"berth.v1.session.acme.none.active"},
		"Berth-Dead-Stream": {"BERTH_SESSIONS"}, "Berth-Dead-Seq": {"7"}, "Berth-Dead-Deliveries": {"10"}, "Berth-Dead-Stored": {"2026-01-02T03:04:05Z"},
		"Ce-Id": {"x"}}})
	return err
}

func (s *Server) scheduler(method string, m *nats.Msg) (proto.Message, error) {
	read := func(req proto.Message) error {
		if err := decode(m.Header.Get("Content-Type"), m.Data, req); err != nil {
			return fault{errkind.Invalid, err.Error()}
		}
		return nil
	}
	switch method {
	case "show", "explain":
		req := &schedulerv1.ShowRequest{} // an ExplainRequest has the same fields
		if err := read(req); err != nil {
			return nil, err
		}
		x := s.sessions[req.GetSession()]
		if x == nil {
			return nil, fault{errkind.NotFound, "there is no session " + req.GetSession()}
		}
		if method == "explain" {
			return &schedulerv1.ExplainReply{Record: x.record(), Now: s.plan(x)}, nil
		}
		return &schedulerv1.ShowReply{Record: x.record()}, nil
	case "restore":
		req := &schedulerv1.RestoreRequest{}
		if err := read(req); err != nil {
			return nil, err
		}
		return s.restoreLocked(req)
	case "list":
		req := &schedulerv1.ListRequest{}
		if err := read(req); err != nil {
			return nil, err
		}
		return s.list(req), nil
	case "hosts":
		return s.hostsReply(), nil
	case "drain":
		req := &schedulerv1.DrainRequest{}
		if err := read(req); err != nil {
			return nil, err
		}
		return s.drainLocked(req)
	case "remove_host":
		req := &schedulerv1.RemoveHostRequest{}
		if err := read(req); err != nil {
			return nil, err
		}
		return s.removeHost(req)
	case "peers", "add_peer", "remove_peer", "transfer":
		return s.peersLocked(method, read)
	}
	return nil, fault{errkind.Unimplemented, "the fake does not have scheduler." + method}
}

func (s *Server) list(req *schedulerv1.ListRequest) *schedulerv1.ListReply {
	limit := int(req.GetLimit())
	if limit == 0 {
		limit = 100
	}
	out := &schedulerv1.ListReply{}
	for _, x := range s.sorted() {
		if req.GetTenant() != "" && req.GetTenant() != x.tenant || x.key <= req.GetAfter() || x.state == corev1.State_STATE_DELETED && !req.GetDeleted() {
			continue
		}
		if len(out.Records) == limit {
			out.Next = out.Records[limit-1].GetSession().GetSession()
			break
		}
		out.Records = append(out.Records, x.record())
	}
	return out
}

func (x *session) record() *schedulerv1.SessionRecord {
	waiting := ""
	if x.handoff != "" {
		waiting = "handoff from " + string(x.handoff)
	}
	return &schedulerv1.SessionRecord{Unsaved: x.newest != "", NewestHost: string(x.newest), HandoffFrom: string(x.handoff), Waiting: waiting,
		Session: x.ref(), State: x.state, Revision: x.revision, Host: string(x.host), Manifest: x.manifest,
		Terms: x.terms, Actor: &corev1.Actor{Tenant: x.tenant, Issuer: Issuer, Subject: x.subject, Frontend: Frontend}, SessionName: x.name,
		CreatedAt: timestamppb.New(x.created), ChangedAt: timestamppb.New(x.changed), LastWake: x.timing, Origin: corev1.Origin_ORIGIN_CREATED,
		Restore: x.restore, RestoredAsOf: x.restoredAsOf}
}
