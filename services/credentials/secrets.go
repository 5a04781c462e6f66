package credentials

import (
	"context"
	"crypto/rand"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/credentials/internal/core"
)

// secretPut stores a secret, which crosses the bus sealed. No error repeats what was sealed.
func (s *service) secretPut(ctx context.Context, _ bus.Request, req *credentialsv1.SecretPutRequest) (*credentialsv1.SecretPutReply, error) {
	const op = "credentials.secret_put"
	raw, err := s.box.Open(req.GetSender(), req.GetSealed())
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	defer clear(raw)
	var in credentialsv1.SecretValue
	if proto.Unmarshal(raw, &in) != nil {
		return nil, errs.E(op, errkind.Invalid, "", "the sealed secret is malformed")
	}
	defer clear(in.GetValue())
	tenant, err := ids.ParseTenant(in.GetTenant())
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, "", "the tenant is no proper name")
	}
	cmds, err := s.decide(core.PutSecret{Tenant: tenant, Name: in.GetName(), Value: in.GetValue(), Hosts: in.GetHosts()})
	if err != nil {
		return nil, refused(op, err)
	}
	reply := &credentialsv1.SecretPutReply{}
	for _, c := range cmds {
		if c, ok := c.(core.StoreSecret); ok {
			if reply.Version, err = s.tenantSecrets.put(ctx, c, in.GetValue(), time.Now()); err != nil {
				return nil, errs.Wrap(op, "", err)
			}
		}
	}
	s.record(ctx, cmds)
	return reply, nil
}

func (s *service) secretList(ctx context.Context, _ bus.Request, req *credentialsv1.SecretsRequest) (*credentialsv1.SecretsReply, error) {
	const op = "credentials.secrets"
	tenant, err := ids.ParseTenant(req.GetTenant())
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	all, err := s.tenantSecrets.list(ctx, tenant)
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	reply := &credentialsv1.SecretsReply{}
	for _, v := range all {
		reply.Secrets = append(reply.Secrets, &credentialsv1.Secret{Tenant: string(tenant), Name: v.name, Hosts: v.Hosts,
			Version: v.version, ChangedAt: timestamppb.New(v.Changed)})
	}
	return reply, nil
}

func (s *service) secretRemove(ctx context.Context, _ bus.Request, req *credentialsv1.SecretRemoveRequest) (*credentialsv1.SecretRemoveReply, error) {
	const op = "credentials.secret_remove"
	tenant, err := ids.ParseTenant(req.GetTenant())
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	cmds, err := s.decide(core.RemoveSecret{Tenant: tenant, Name: req.GetName()})
	if err != nil {
		return nil, refused(op, err)
	}
	for _, c := range cmds {
		if c, ok := c.(core.DestroySecret); ok {
			if err := s.tenantSecrets.remove(ctx, c.Tenant, c.Name); err != nil {
				return nil, errs.Wrap(op, "", err)
			}
		}
	}
	s.record(ctx, cmds)
	return &credentialsv1.SecretRemoveReply{}, nil
}

// reveal gives a secret to the gate of the host that owns the session's epoch now.
func (s *service) reveal(ctx context.Context, r bus.Request, req *credentialsv1.RevealRequest) (*credentialsv1.RevealReply, error) {
	const op = "credentials.reveal"
	on, err := sessionOf(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	if _, err := seal.ParsePublic(req.GetGateKey()); err != nil {
		return nil, errs.E(op, errkind.Invalid, string(on.Session), err)
	}
	record, err := s.ask(ctx, on.Generation)
	if err != nil {
		return nil, errs.Wrap(op, string(on.Session), err)
	}
	ev := core.Reveal{Host: r.Caller.Host, Session: on, Record: record, Name: req.GetName()}
	cmds, err := s.decide(ev)
	if err != nil {
		s.recordOnce(ctx, ev, cmds)
		return nil, refused(op, err)
	}
	for _, c := range cmds {
		if give, ok := c.(core.GiveSecret); ok {
			reply, err := s.give(ctx, op, give, seal.Public(req.GetGateKey()))
			if errs.Is(err, errkind.NotFound) {
				cmds = []core.Command{core.RefusedSecret(ev, "there is none")}
			}
			if err == nil || errs.Is(err, errkind.NotFound) {
				s.recordOnce(ctx, ev, cmds)
			}
			return reply, err
		}
	}
	return nil, errs.E(op, errkind.Internal, "", "nothing was decided")
}

func (s *service) give(ctx context.Context, op string, c core.GiveSecret, to seal.Public) (*credentialsv1.RevealReply, error) {
	rec, version, err := s.tenantSecrets.read(ctx, c.Tenant, c.Name)
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	defer clear(rec.Value)
	sealed, err := seal.SealTo(to, rec.Value, rand.Reader)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	return &credentialsv1.RevealReply{Sealed: sealed, Hosts: rec.Hosts, Version: version}, nil
}

// told remembers what was recorded, so that a gate which asks again in the same epoch adds nothing. The memory is
// bounded and of this run: what was forgotten is recorded again.
type told struct {
	mu        sync.Mutex
	now, last map[tellable]bool
}

type tellable struct {
	session core.Session
	host    ids.Host
	name    string
	what    string
	reason  string
}

const mostTold = 16 << 10 // in each of two generations

func (t *told) first(k tellable) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now[k] {
		return false
	}
	if t.now == nil || len(t.now) >= mostTold {
		t.last, t.now = t.now, map[tellable]bool{}
	}
	seen := t.last[k]
	t.now[k] = true
	return !seen
}

// recordOnce queues the audit records among cmds that were not yet recorded for this session, epoch and
// secret.
func (s *service) recordOnce(ctx context.Context, ev core.Reveal, cmds []core.Command) {
	for _, c := range cmds {
		a, ok := c.(core.Audit)
		if ok && s.toldOnce.first(tellable{ev.Session, ev.Host, ev.Name, a.What, a.Reason}) {
			s.record(ctx, []core.Command{a})
		}
	}
}
