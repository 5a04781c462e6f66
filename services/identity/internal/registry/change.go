package registry

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Who may suspend.
const (
	ByOperator      = "operator"
	ByAdministrator = "administrator"
)

func refused(kind errkind.Kind, format string, args ...any) error {
	return errs.Errorf("change the registry", kind, format, args...)
}

// configured refuses to change what a file says.
func configured(what string) error {
	return refused(errkind.Refused, "%s comes from identity's own configuration; change it there", what)
}

// PutTenant adds a tenant (revision 0) or changes the one whose revision was seen. Kinds: Invalid, Refused
// (configured), Exists, Conflict, NotFound, Unavailable. Whether it is suspended is not changed by it.
func (s *Store) PutTenant(ctx context.Context, t *identityv1.Tenant) (*identityv1.Tenant, error) {
	t = proto.CloneOf(t)
	what := "tenant " + t.GetTenant()
	if err := CheckTenant(t); err != nil {
		return nil, err
	}
	had, _ := s.Current().Tenant(ids.Tenant(t.GetTenant()))
	if had.GetConfigured() {
		return nil, configured(what)
	}
	if t.GetSuspended() && !had.GetSuspended() {
		return nil, refused(errkind.Invalid, "%s is suspended by a command of its own", what)
	}
	t.Suspended, t.SuspendedWhy, t.Configured, t.ChangedAt = false, "", false, timestamppb.Now()
	if err := s.write(ctx, what, t, t.GetRevision()); err != nil {
		return nil, err
	}
	now, _ := s.Current().Tenant(ids.Tenant(t.GetTenant()))
	return now, nil
}

// PutIssuer adds, changes or removes an issuer. An issuer keeps its tenant: with another one its users
// would be others, whose sessions nobody has.
func (s *Store) PutIssuer(ctx context.Context, i *identityv1.Issuer, remove bool) (*identityv1.Issuer, error) {
	now := s.Current()
	what := "issuer " + i.GetIssuer()
	had, there := now.issuer(i.GetIssuer(), i.GetAudience())
	switch {
	case had.GetConfigured():
		return nil, configured(what)
	case remove && !there:
		return nil, refused(errkind.NotFound, "%s is not registered with this audience", what)
	case remove:
		return had, s.remove(ctx, what, had, i.GetRevision(), had.GetRevision())
	}
	i = proto.CloneOf(i)
	i.Configured, i.ChangedAt = false, timestamppb.Now()
	if err := CheckIssuer(i); err != nil {
		return nil, err
	}
	if there && had.GetTenant() != i.GetTenant() {
		return nil, refused(errkind.Refused, "%s belongs to tenant %s; to give it to another, remove it first", what, had.GetTenant())
	}
	if _, ok := now.Tenant(ids.Tenant(i.GetTenant())); !ok {
		return nil, refused(errkind.NotFound, "tenant %s is not registered", i.GetTenant())
	}
	if faults := s.would(i); len(faults) > 0 {
		return nil, refused(errkind.Refused, "%s", faults[0])
	}
	if err := s.write(ctx, what, i, i.GetRevision()); err != nil {
		return nil, err
	}
	i, _ = s.Current().issuer(i.GetIssuer(), i.GetAudience())
	return i, nil
}

// would tells what the registry would contradict itself in, with a record that it does not have yet.
func (s *Store) would(msg proto.Message) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	key, _ := check(msg) // it was checked
	with := maps.Clone(s.entries)
	with[key] = entry{rev: math.MaxUint64, msg: stamped(proto.Clone(msg), math.MaxUint64)}
	_, faults := build(s.static, recordsOf(with))
	return slices.DeleteFunc(faults, func(f string) bool { return slices.Contains(s.faults, f) })
}

// PutLogin adds, changes or removes a login.
func (s *Store) PutLogin(ctx context.Context, l *identityv1.Login, remove bool) (*identityv1.Login, error) {
	what := "login " + l.GetName()
	c, err := subjects.ParseName(l.GetName())
	if err != nil {
		return nil, errs.E("change the registry", errkind.Invalid, "", err)
	}
	had := s.Current().logins[c]
	switch {
	case had.GetConfigured():
		return nil, configured(what)
	case remove && had == nil:
		return nil, refused(errkind.NotFound, "%s is not registered", what)
	case remove:
		return had, s.remove(ctx, what, had, l.GetRevision(), had.GetRevision())
	}
	l = proto.CloneOf(l)
	l.Configured, l.ChangedAt = false, timestamppb.Now()
	if !l.GetSuspended() {
		l.SuspendedWhy = ""
	}
	if err := CheckLogin(l); err != nil {
		return nil, err
	}
	if c.Role == subjects.RoleFrontend {
		if _, ok := s.Current().Tenant(c.Tenant); !ok {
			return nil, refused(errkind.NotFound, "tenant %s is not registered", c.Tenant)
		}
	}
	if faults := s.would(l); len(faults) > 0 {
		return nil, refused(errkind.Refused, "%s", faults[0])
	}
	if err := s.write(ctx, what, l, l.GetRevision()); err != nil {
		return nil, err
	}
	return s.Current().logins[c], nil
}

// Suspend shuts out a tenant, a user or a frontend, or lets it in again. It is done when it returns, also
// when it was so before. by says who asks: an administrator does not lift what an operator set (Denied).
func (s *Store) Suspend(ctx context.Context, what *identityv1.Suspension, by string, on bool) error {
	what = proto.CloneOf(what)
	what.By, what.At = by, timestamppb.Now()
	if err := CheckSuspension(what); err != nil {
		return err
	}
	if on {
		if err := s.suspendable(what); err != nil {
			return err
		}
		if err := s.roomFor(what); by == ByAdministrator && err != nil {
			return err
		}
	}
	var err error
	for range 5 {
		if err = s.suspendOnce(ctx, what, on); !lostRace(err) {
			return err
		}
	}
	return err
}

// suspendable refuses to suspend what is not there, so that a slip of the pen is not taken for done.
func (s *Store) suspendable(what *identityv1.Suspension) error {
	now, tenant := s.Current(), ids.Tenant(what.GetTenant())
	if _, ok := now.Tenant(tenant); !ok {
		return refused(errkind.NotFound, "tenant %s is not registered", tenant)
	}
	if f := what.GetFrontend(); f != "" && now.logins[subjects.Frontend(tenant, ids.Frontend(f))] == nil {
		return refused(errkind.NotFound, "frontend %s of tenant %s is not registered", f, tenant)
	}
	if what.GetSubject() != "" && !now.Names(what.GetTenant(), what.GetIssuer()) {
		return refused(errkind.NotFound, "the issuer is not registered for tenant %s", tenant)
	}
	return nil
}

// mostByAdministrators is of how many users a tenant's bucket has suspensions, lifted ones included, before
// only operators add to them: the bucket is everybody's, and a lifted one leaves its key there.
const mostByAdministrators = 2000

// roomFor bounds what one tenant's administrators can put into the bucket.
func (s *Store) roomFor(what *identityv1.Suspension) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, had := s.entries[keyOfSuspension(what)]; had {
		return nil
	}
	n, users := 0, suspendedKey+what.GetTenant()+".user."
	for key := range s.entries {
		if strings.HasPrefix(key, users) {
			n++
		}
	}
	if n >= mostByAdministrators {
		return refused(errkind.Refused, "tenant %s has had %d users suspended; an operator of the platform must suspend more", what.GetTenant(), n)
	}
	return nil
}

// suspendOnce goes by what the bucket's leader says, not by what the watch has brought.
func (s *Store) suspendOnce(ctx context.Context, what *identityv1.Suspension, on bool) error {
	key := keyOfSuspension(what)
	raw, rev, err := s.bucket.Get(ctx, key)
	if err != nil && !errs.Is(err, errkind.NotFound) {
		return err
	}
	there := err == nil
	var had *identityv1.Suspension // nil also when it cannot be read: then an operator has to look
	if there {
		if msg, err := decode(key, raw); err == nil {
			had, _ = msg.(*identityv1.Suspension)
		}
	}
	switch {
	case there && had.GetBy() == ByOperator && what.GetBy() != ByOperator && on:
		return nil
	case there && what.GetBy() != ByOperator && had.GetBy() != ByAdministrator:
		return refused(errkind.Denied, "an operator of the platform set this suspension, and alone can lift it")
	case !on && !there:
		return nil
	case !on:
		return s.remove(ctx, "the suspension", what, rev, rev)
	}
	return s.write(ctx, "the suspension", what, rev)
}

// write stores a record over the revision that was seen, and has this replica judge by it.
func (s *Store) write(ctx context.Context, what string, msg proto.Message, seen uint64) error {
	key, err := check(msg)
	if err != nil {
		return err
	}
	raw, err := protojson.Marshal(stamped(proto.Clone(msg), 0))
	if err != nil {
		return errs.E("change the registry", errkind.Internal, "", err)
	}
	var rev uint64
	if seen == 0 {
		rev, err = s.bucket.Create(ctx, key, raw)
	} else {
		rev, err = s.bucket.Update(ctx, key, raw, seen)
	}
	if lostRace(err) {
		return s.lost(what, key, seen)
	}
	if err != nil {
		return err
	}
	if msg, err = decode(key, raw); err != nil {
		return errs.E("change the registry", errkind.Internal, "", err)
	}
	s.take(batch{entries: map[string]entry{key: {rev: rev, msg: stamped(msg, rev)}}})
	return nil
}

// remove deletes a record whose revision was seen.
func (s *Store) remove(ctx context.Context, what string, msg proto.Message, seen, rev uint64) error {
	key, err := check(msg)
	if err != nil {
		return err
	}
	if seen != rev {
		return s.lost(what, key, seen)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := s.bucket.KV().Delete(ctx, key, jetstream.LastRevision(rev)); lostDelete(err) {
		return s.lost(what, key, seen)
	} else if err != nil {
		return errs.E("change the registry", errkind.Unavailable, "", err)
	}
	// Which revision the deletion has is not told; the watch brings it, and it is at least this.
	s.take(batch{entries: map[string]entry{key: {rev: rev + 1}}})
	return nil
}

func lostRace(err error) bool {
	return errs.Is(err, errkind.Conflict) || errs.Is(err, errkind.Exists)
}

// lostDelete reads what nats.go says of a deletion; a replicated stream says it in another way.
func lostDelete(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == 10164)
}

// lost says why a change was not made.
func (s *Store) lost(what, key string, seen uint64) error {
	s.mu.Lock()
	e, there := s.entries[key]
	s.mu.Unlock()
	there = there && e.msg != nil
	switch {
	case seen == 0:
		return refused(errkind.Exists, "%s is registered already; a change of it names the revision that it has", what)
	case !there:
		return refused(errkind.Conflict, "%s was removed meanwhile, or has never been there", what)
	}
	return refused(errkind.Conflict, "%s was changed meanwhile: it is at revision %d, and the change is of revision %d", what, e.rev, seen)
}
