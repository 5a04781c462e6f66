package hostagent

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// verifyBudget is how much one part of a verification reads, so that it is answered in time.
const verifyBudget = 256 << 20

// stored names the saved disk of a request. It need not be on this host.
func (h *host) stored(op string, ref *corev1.SessionRef, head string) (archive.Disk, error) {
	t, err := ids.ParseTenant(ref.GetTenant())
	if err != nil {
		return archive.Disk{}, errs.E(op, errkind.Invalid, "", err)
	}
	k, err := ids.ParseSessionKey(ref.GetSession())
	if err != nil {
		return archive.Disk{}, errs.E(op, errkind.Invalid, "", err)
	}
	d := archive.Disk{Tenant: t, Session: k, Generation: grant.GenerationOf(ref.GetGeneration())}
	switch {
	case d.Generation.IsZero():
		return d, errs.E(op, errkind.Invalid, k.String(), "the generation is missing")
	case h.vault == nil:
		return d, errs.E(op, errkind.Unimplemented, k.String(), "this host keeps disks in memory and saves none")
	case head == "":
		return d, errs.E(op, errkind.NotFound, k.String(), "the session has not been saved yet")
	}
	return d, nil
}

func (h *host) rpcSnapshots(ctx context.Context, _ bus.Request, req *hostv1.SnapshotsRequest) (*hostv1.SnapshotsReply, error) {
	const op = "host.snapshots"
	d, err := h.stored(op, req.GetSession(), req.GetManifest())
	if err != nil {
		return nil, err
	}
	list, err := h.vault.Snapshots(ctx, d, req.GetManifest())
	if err != nil {
		return nil, errs.Wrap(op, d.Session.String(), err)
	}
	out := &hostv1.SnapshotsReply{}
	for _, i := range list {
		out.Snapshots = append(out.Snapshots, &hostv1.Snapshot{
			Id: i.ID, TakenAt: timestamppb.New(i.TakenAt), Epoch: stamp(i.Epoch), SizeBytes: i.Size, AllocatedBytes: i.Allocated,
			AddedBytes: i.Added, ImageDigest: i.Image, CrashConsistent: i.CrashConsistent, RestoredFrom: i.RestoredFrom,
		})
	}
	return out, nil
}

func (h *host) rpcVerify(ctx context.Context, _ bus.Request, req *hostv1.VerifyRequest) (*hostv1.VerifyReply, error) {
	const op = "host.verify"
	d, err := h.stored(op, req.GetSession(), req.GetManifest())
	if err != nil {
		return nil, err
	}
	v, err := h.vault.Verify(ctx, d, req.GetManifest(), req.GetAfter(), verifyBudget)
	if err != nil {
		return nil, errs.Wrap(op, d.Session.String(), err)
	}
	out := &hostv1.VerifyReply{
		Objects: uint32(v.Objects), Bytes: v.Bytes, Next: v.Next, Snapshots: uint32(v.Snapshots), TotalObjects: uint32(v.Total),
	}
	if len(v.Damaged) > 0 {
		if err := h.disks.Doubt(disk.Key{Session: d.Session, Generation: d.Generation}); err != nil && !errs.Is(err, errkind.NotFound) {
			return nil, errs.Wrap(op, d.Session.String(), err)
		}
	}
	for _, d := range v.Damaged {
		out.Damaged = append(out.Damaged, &hostv1.Damage{Object: d.Object, Reason: d.Reason, Snapshots: d.Snapshots})
	}
	return out, nil
}

// rpcGrow makes the disk of an awake session larger. It is not asked for an exact epoch's work: a
// disk that grew is never wrong.
func (h *host) rpcGrow(ctx context.Context, _ bus.Request, req *hostv1.GrowRequest) (*hostv1.GrowReply, error) {
	const op = "host.grow"
	s, err := h.target(ctx, op, req.GetSession())
	if err != nil {
		return nil, err
	}
	if err := h.may("grow"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	err = s.awakeIn(op, req.GetSession())
	sb := s.sb
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	k := disk.Key{Session: s.key, Generation: grant.GenerationOf(req.GetSession().GetGeneration())}
	was, err := h.disks.Get(k)
	if err != nil {
		return nil, errs.Wrap(op, s.key.String(), err)
	}
	n, err := h.disks.Grow(ctx, k, req.GetSizeBytes())
	if err != nil {
		return nil, errs.Wrap(op, s.key.String(), err)
	}
	if sb != nil && h.raw(string(sb.Tier)) {
		n, err = h.growInside(ctx, sb, n)
		if errs.Is(err, errkind.Unimplemented) {
			h.log.Warn("a machine cannot be told that its disk grew; it grows with the next wake", "session", s.key, "reason", err)
			n, err = was.Size, nil
		}
		if err != nil {
			return nil, errs.Wrap(op, s.key.String(), err)
		}
	}
	h.log.Info("a disk grew", "session", s.key, "bytes", n)
	return &hostv1.GrowReply{SizeBytes: n}, nil
}
