// Package egress owns the policies that say what may leave a sandbox. It guarantees that a policy which is
// stored can be read and is canonical, that of two who change one policy at a time the second is told and
// changes nothing, and that the generation of every change is larger than that of all before it. The gates,
// one per host, watch what is stored; they do not ask this service, so that traffic goes on without it.
package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/internal/scope"
	"github.com/berth-dev/berth/services/egress/policy"
)

// server is one instance of the service.
type server struct {
	cfg    Config
	bucket *bus.Bucket
	log    *slog.Logger
}

// Run serves until ctx ends. conn is the identity svc-egress. Several instances may serve at once. ready,
// when not nil, is called once this one does its part.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("egress: %w", err)
	}
	bucket, err := conn.OpenBucket(ctx, scope.Bucket)
	if err != nil {
		return err
	}
	s := &server{cfg: cfg, bucket: bucket, log: log}
	svc, err := conn.Serve(ctx, bus.ServiceConfig{Name: "egress", Limit: 32})
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := svc.Stop(end); err != nil {
			log.Warn("requests were under way when the service ended", "error", err)
		}
	}()
	for _, add := range []func() error{
		func() error { return bus.Handle(svc, "apply", s.apply) },
		func() error { return bus.Handle(svc, "policies", s.policies) },
		func() error { return bus.Handle(svc, "remove", s.remove) },
	} {
		if err := add(); err != nil {
			return err
		}
	}
	if err := svc.Announce(); err != nil {
		log.Warn("nobody is told that the service serves", "error", err) // the reconnect says it
	}
	if ready != nil {
		ready()
	}
	<-ctx.Done()
	return nil
}

const maxBy = 200 // bytes of who applied a policy

// refused is a sentence for an operator.
func refused(kind errkind.Kind, format string, args ...any) error {
	return errs.E("", kind, "", fmt.Errorf(format, args...))
}

// apply stores a policy by compare-and-swap. A request that is repeated, because its answer was lost, gets the
// generation that it made.
func (s *server) apply(ctx context.Context, _ bus.Request, req *egressv1.ApplyRequest) (*egressv1.ApplyReply, error) {
	key, err := scope.Key(req.GetScope())
	if err != nil {
		return nil, refused(errkind.Invalid, "%w", err)
	}
	if n := len(req.GetDocument()); n > policy.MaxFile {
		return nil, refused(errkind.TooLarge, "the policy is %d bytes long; it may be %d", n, policy.MaxFile)
	}
	if len(req.GetBy()) > maxBy {
		return nil, refused(errkind.Invalid, "who applies it is told in %d bytes; it may be %d", len(req.GetBy()), maxBy)
	}
	if _, err := policy.Parse(req.GetDocument()); err != nil {
		return nil, refused(errkind.Invalid, "%w", err) // the sentence alone: it has the line
	}
	raw, err := proto.Marshal(&egressv1.Policy{Scope: req.GetScope(), Document: req.GetDocument(), AppliedAt: timestamppb.Now(), AppliedBy: req.GetBy()})
	if err != nil {
		return nil, errs.E("egress.apply", errkind.Internal, key, err)
	}
	var rev uint64
	if req.GetReplaces() == 0 {
		if err := s.room(ctx); err != nil {
			return nil, err
		}
		rev, err = s.bucket.Create(ctx, key, raw)
	} else {
		rev, err = s.bucket.Update(ctx, key, raw, req.GetReplaces())
	}
	switch {
	case err == nil:
		s.log.Info("a policy was applied", "scope", key, "generation", rev, "by", req.GetBy())
		return &egressv1.ApplyReply{Generation: rev}, nil
	case lost(err):
		return s.lost(ctx, key, req)
	}
	return nil, errs.Wrap("egress.apply", key, err)
}

// room says whether one policy more may be stored.
func (s *server) room(ctx context.Context) error {
	st, err := s.bucket.KV().Status(ctx)
	if err != nil {
		return errs.E("egress.apply", errkind.Unavailable, "", err)
	}
	if st.Values() >= uint64(s.cfg.MaxPolicies) {
		return refused(errkind.Exhausted, "there are %d policies, as many as there may be", st.Values())
	}
	return nil
}

// lost reads what the bus says to the second of two writers.
func lost(err error) bool {
	var api *jetstream.APIError
	return errs.Is(err, errkind.Conflict) || errs.Is(err, errkind.Exists) ||
		errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == 10164)
}

// lost tells which policy is in force, or that the request was carried out already.
func (s *server) lost(ctx context.Context, key string, req *egressv1.ApplyRequest) (*egressv1.ApplyReply, error) {
	now, err := s.read(ctx, key)
	switch {
	case errs.Is(err, errkind.NotFound):
		return nil, refused(errkind.Conflict, "the policy was removed meanwhile: replace generation 0 to make it anew")
	case err != nil:
		return nil, err
	case string(now.GetDocument()) == string(req.GetDocument()) && now.GetAppliedBy() == req.GetBy() && now.GetGeneration() > req.GetReplaces():
		return &egressv1.ApplyReply{Generation: now.GetGeneration()}, nil
	case req.GetReplaces() == 0:
		return nil, refused(errkind.Conflict, "there is a policy already, generation %d%s: a change names the generation that it replaces", now.GetGeneration(), by(now))
	}
	return nil, refused(errkind.Conflict, "the policy was changed meanwhile: generation %d%s is in force, and the change is of generation %d", now.GetGeneration(), by(now), req.GetReplaces())
}

func by(p *egressv1.Policy) string {
	if p.GetAppliedBy() == "" {
		return ""
	}
	return " by " + p.GetAppliedBy()
}

// read reads one policy.
func (s *server) read(ctx context.Context, key string) (*egressv1.Policy, error) {
	raw, rev, err := s.bucket.Get(ctx, key)
	if err != nil {
		return nil, errs.Wrap("read policy", key, err)
	}
	var p egressv1.Policy
	if err := proto.Unmarshal(raw, &p); err != nil {
		return nil, errs.E("read policy", errkind.DataLoss, key, err)
	}
	p.Generation = rev
	return &p, nil
}

// maxReply is how many bytes of documents one answer has. Of more, the largest are left out, and are to be
// asked for by their scope.
const maxReply = 900 << 10

// policies answers with one policy, or all.
func (s *server) policies(ctx context.Context, _ bus.Request, req *egressv1.PoliciesRequest) (*egressv1.PoliciesReply, error) {
	if req.GetScope() != nil {
		key, err := scope.Key(req.GetScope())
		if err != nil {
			return nil, refused(errkind.Invalid, "%w", err)
		}
		p, err := s.read(ctx, key)
		if errs.Is(err, errkind.NotFound) {
			return nil, refused(errkind.NotFound, "there is no policy of this scope")
		}
		if err != nil {
			return nil, err
		}
		return &egressv1.PoliciesReply{Policies: []*egressv1.Policy{p}}, nil
	}
	keys, err := s.bucket.Keys(ctx)
	if err != nil {
		return nil, errs.Wrap("egress.policies", "", err)
	}
	out := &egressv1.PoliciesReply{}
	for _, key := range keys {
		p, err := s.read(ctx, key)
		if errs.Is(err, errkind.NotFound) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		out.Policies = append(out.Policies, p)
	}
	slices.SortFunc(out.Policies, func(a, b *egressv1.Policy) int {
		if a.GetScope().GetLayer() != b.GetScope().GetLayer() {
			return int(a.GetScope().GetLayer()) - int(b.GetScope().GetLayer())
		}
		return compare(a.GetScope().GetTenant()+"."+a.GetScope().GetName(), b.GetScope().GetTenant()+"."+b.GetScope().GetName())
	})
	shorten(out.Policies)
	return out, nil
}

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// shorten leaves out the largest documents until the rest fits.
func shorten(list []*egressv1.Policy) {
	total := 0
	for _, p := range list {
		total += proto.Size(p) + 8
	}
	bySize := slices.Clone(list)
	slices.SortStableFunc(bySize, func(a, b *egressv1.Policy) int { return len(b.GetDocument()) - len(a.GetDocument()) })
	for _, p := range bySize {
		if total <= maxReply {
			return
		}
		total -= len(p.GetDocument())
		p.Document = nil
	}
}

// remove ends a policy, if it is the generation that was named.
func (s *server) remove(ctx context.Context, _ bus.Request, req *egressv1.RemovePolicyRequest) (*egressv1.RemovePolicyReply, error) {
	key, err := scope.Key(req.GetScope())
	if err != nil {
		return nil, refused(errkind.Invalid, "%w", err)
	}
	now, err := s.read(ctx, key)
	if errs.Is(err, errkind.NotFound) {
		return nil, refused(errkind.NotFound, "there is no policy of this scope")
	}
	if err != nil {
		return nil, err
	}
	if now.GetGeneration() == req.GetReplaces() {
		err = s.bucket.KV().Purge(ctx, key, jetstream.LastRevision(req.GetReplaces()))
		if err == nil {
			s.log.Info("a policy was removed", "scope", key, "generation", req.GetReplaces())
			return &egressv1.RemovePolicyReply{}, nil
		}
		if !lost(err) {
			return nil, errs.E("egress.remove", errkind.Unavailable, key, err)
		}
		if now, err = s.read(ctx, key); err != nil {
			return nil, refused(errkind.Conflict, "the policy was changed meanwhile")
		}
	}
	return nil, refused(errkind.Conflict, "generation %d%s is in force, not generation %d", now.GetGeneration(), by(now), req.GetReplaces())
}
