package scheduler

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func stamp(incarnation uint32, index uint64) *corev1.Stamp {
	if index == 0 {
		return nil
	}
	return &corev1.Stamp{Incarnation: incarnation, Index: index}
}

func epochOf(s *corev1.Stamp) ids.Epoch {
	return ids.Epoch{Incarnation: s.GetIncarnation(), Index: s.GetIndex()}
}

func generationOf(s *corev1.Stamp) ids.Generation { return ids.Generation(epochOf(s)) }

func protoRef(t ids.Tenant, r core.Ref) *corev1.SessionRef {
	return &corev1.SessionRef{Tenant: t.String(), Session: r.Session.String(),
		Generation: stamp(r.Generation.Incarnation, r.Generation.Index), Epoch: stamp(r.Epoch.Incarnation, r.Epoch.Index)}
}

func refOf(s *core.Session) core.Ref {
	return core.Ref{Session: s.Key, Generation: s.Generation, Epoch: s.Epoch}
}

func sessionRef(s *core.Session) *corev1.SessionRef { return protoRef(s.Tenant, refOf(s)) }

// parseRef reads a reference from the wire.
func parseRef(r *corev1.SessionRef) (ids.Tenant, core.Ref, error) {
	if r == nil {
		return "", core.Ref{}, errs.E("read request", errkind.Invalid, "", "it names no session")
	}
	t, err := ids.ParseTenant(r.GetTenant())
	if err != nil {
		return "", core.Ref{}, err
	}
	k, err := ids.ParseSessionKey(r.GetSession())
	return t, core.Ref{Session: k, Generation: generationOf(r.GetGeneration()), Epoch: epochOf(r.GetEpoch())}, err
}

const maxKeys = 8

func parseKeys(session string, keys []string) ([]ids.SessionKey, error) {
	if len(keys) == 0 && session != "" {
		keys = []string{session}
	}
	if len(keys) == 0 || len(keys) > maxKeys {
		return nil, errs.Errorf("read request", errkind.Invalid, "it names %d session keys, 1 to %d are allowed", len(keys), maxKeys)
	}
	out := make([]ids.SessionKey, 0, len(keys))
	for _, s := range keys {
		k, err := ids.ParseSessionKey(s)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	return out, nil
}

func timeOf(t *timestamppb.Timestamp) core.Time {
	if t == nil {
		return 0
	}
	return core.At(t.AsTime())
}

func protoTime(t core.Time) *timestamppb.Timestamp {
	if t == 0 {
		return nil
	}
	return timestamppb.New(t.Std())
}

func protoDuration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func limitsOf(l *corev1.Limits) core.Limits {
	return core.Limits{CPUMillis: l.GetCpuMillis(), MemoryBytes: l.GetMemoryBytes(), PIDs: l.GetPids(), DiskBytes: l.GetDiskBytes(),
		DiskBytesPerSecond: l.GetDiskBytesPerSecond(), DiskOpsPerSecond: l.GetDiskOpsPerSecond(), OpenFiles: l.GetOpenFiles()}
}

func protoLimits(l core.Limits) *corev1.Limits {
	return &corev1.Limits{CpuMillis: l.CPUMillis, MemoryBytes: l.MemoryBytes, Pids: l.PIDs, DiskBytes: l.DiskBytes,
		DiskBytesPerSecond: l.DiskBytesPerSecond, DiskOpsPerSecond: l.DiskOpsPerSecond, OpenFiles: l.OpenFiles}
}

func termsOf(t *corev1.Terms) core.Terms {
	return core.Terms{Plan: t.GetPlan(), Template: t.GetTemplate(), Tier: t.GetTier(), Limits: limitsOf(t.GetLimits()),
		Ephemeral: t.GetPersistence() == corev1.Persistence_PERSISTENCE_EPHEMERAL,
		Idle:      t.GetIdle().AsDuration(), Retention: t.GetRetention().AsDuration(), Image: t.GetImage(), TierReason: t.GetTierReason(),
		Snapshots: snapshotsOf(t.GetSnapshots()), Priority: min(t.GetPriority(), maxPriority), Zones: zonesOf(t.GetZones()),
		MaxAwake: t.GetMaxAwake()}
}

// Bounds of what terms may say of placement.
const (
	maxPriority = 100
	maxZones    = 16
)

// zonesOf keeps what can be the name of a zone; one that cannot matches no host.
func zonesOf(zones []string) (out []string) {
	for _, z := range zones[:min(len(zones), maxZones)] {
		out = append(out, z[:min(len(z), 63)])
	}
	return out
}

func snapshotsOf(s *corev1.Snapshots) core.Snapshots {
	return core.Snapshots{Every: s.GetEvery().AsDuration(), KeepAll: s.GetKeepAll().AsDuration(),
		KeepHourly: s.GetKeepHourly().AsDuration(), KeepDaily: s.GetKeepDaily().AsDuration()}
}

// protoSnapshots is nil for terms of a time when they said nothing of it.
func protoSnapshots(s core.Snapshots) *corev1.Snapshots {
	if s == (core.Snapshots{}) {
		return nil
	}
	return &corev1.Snapshots{Every: protoDuration(s.Every), KeepAll: protoDuration(s.KeepAll),
		KeepHourly: protoDuration(s.KeepHourly), KeepDaily: protoDuration(s.KeepDaily)}
}

func protoTerms(t core.Terms) *corev1.Terms {
	p := corev1.Persistence_PERSISTENCE_DURABLE
	if t.Ephemeral {
		p = corev1.Persistence_PERSISTENCE_EPHEMERAL
	}
	return &corev1.Terms{Plan: t.Plan, Template: t.Template, Tier: t.Tier, Limits: protoLimits(t.Limits), Persistence: p,
		Idle: protoDuration(t.Idle), Retention: protoDuration(t.Retention), Image: t.Image, TierReason: t.TierReason,
		Snapshots: protoSnapshots(t.Snapshots), Priority: t.Priority, Zones: t.Zones, MaxAwake: t.MaxAwake}
}

func actorOf(a *corev1.Actor) (core.Actor, error) {
	t, err := ids.ParseTenant(a.GetTenant())
	if err != nil {
		return core.Actor{}, err
	}
	for _, s := range []string{a.GetIssuer(), a.GetSubject(), a.GetFrontend(), a.GetActing()} {
		if len(s) > 1024 {
			return core.Actor{}, errs.E("read request", errkind.TooLarge, "", "issuer, subject, frontend and who acts may have 1024 bytes each")
		}
	}
	return core.Actor{Tenant: t, Issuer: a.GetIssuer(), Subject: a.GetSubject(), Frontend: a.GetFrontend(), Acting: a.GetActing()}, nil
}

func protoActor(a core.Actor) *corev1.Actor {
	return &corev1.Actor{Tenant: a.Tenant.String(), Issuer: a.Issuer, Subject: a.Subject, Frontend: a.Frontend, Acting: a.Acting}
}

func protoFailure(f *core.Failure) *corev1.Failure {
	if f == nil {
		return nil
	}
	return &corev1.Failure{Kind: f.Kind.String(), Reason: f.Reason}
}

func failureOf(err error) core.Failure {
	return core.Failure{Kind: errs.Kind(err), Reason: err.Error()}
}

func refused(op, id string, f *core.Failure) error { return errs.E(op, f.Kind, id, f.Reason) }

// Bounds of the steps of a timing, and of the name of one.
const (
	maxSteps = 64
	maxStep  = 80
)

func timingOf(t *corev1.Timing) core.Timing {
	out := core.Timing{Total: t.GetTotal().AsDuration()}
	for i, s := range t.GetSteps() {
		if i == maxSteps || len(s.GetName()) > maxStep {
			break
		}
		out.Steps = append(out.Steps, core.Step{Name: s.GetName(), Start: s.GetStart().AsDuration(), Took: s.GetTook().AsDuration()})
	}
	return out
}

func protoTiming(t core.Timing) *corev1.Timing {
	if t.Total == 0 && len(t.Steps) == 0 {
		return nil
	}
	out := &corev1.Timing{Total: durationpb.New(t.Total)}
	for _, s := range t.Steps {
		out.Steps = append(out.Steps, &corev1.Step{Name: s.Name, Start: durationpb.New(s.Start), Took: durationpb.New(s.Took)})
	}
	return out
}

// wakeTiming nests the host's steps in the scheduler's. Why no warm sandbox was
// taken is kept as a step of no time.
func wakeTiming(b begin, placed, total time.Duration, woke *hostv1.WakeReply) core.Timing {
	out := core.Timing{Total: total}
	var apply time.Duration
	if asked := b.asked.Sub(b.at); !b.asked.IsZero() && asked >= 0 && b.answered.Sub(b.at) <= placed {
		apply = b.answered.Sub(b.at)
		out.Steps = append(out.Steps, core.Step{Name: "scheduler.reserve", Start: asked, Took: apply - asked})
	}
	out.Steps = append(out.Steps, core.Step{Name: "scheduler.apply_placed", Start: apply, Took: placed - apply},
		core.Step{Name: "scheduler.host_wake", Start: placed, Took: total - placed})
	if why := woke.GetColdReason(); why != "" && woke.GetWarm() == "" {
		out.Steps = append(out.Steps, core.Step{Name: cut("host.cold ("+why+")", maxStep), Start: placed})
	}
	for _, s := range timingOf(woke.GetTiming()).Steps {
		if len(s.Name) < 5 || s.Name[:5] != "host." {
			s.Name = "host." + s.Name
		}
		s.Start += placed
		out.Steps = append(out.Steps, s)
	}
	return out
}

// answered adds the commit of active, which the stored timing cannot hold.
func answered(t core.Timing, total time.Duration) core.Timing {
	out := core.Timing{Total: total, Steps: append([]core.Step(nil), t.Steps...)}
	out.Steps = append(out.Steps, core.Step{Name: "scheduler.apply_active", Start: t.Total, Took: max(total-t.Total, 0)})
	return out
}

func manifestOf(m *corev1.Manifest) core.ManifestInfo {
	return core.ManifestInfo{ID: m.GetId(), Parent: m.GetParent(), ImageDigest: m.GetImageDigest(), RestoredFrom: m.GetRestoredFrom(),
		TakenAt: timeOf(m.GetTakenAt()), VMWritten: m.GetVmWritten()}
}

func wakeRequest(ctx context.Context, s *core.Session) *hostv1.WakeRequest {
	req := &hostv1.WakeRequest{Session: sessionRef(s), Terms: protoTerms(*s.Terms), Manifest: s.Manifest,
		ImageDigest: s.ImageDigest, LastActiveEpoch: stamp(s.LastActive.Incarnation, s.LastActive.Index),
		SessionName: s.Name, Fresh: s.Fresh(), Unsaved: s.TellRestored(), Restore: snapshotWanted(s),
		VmWritten: vmWritten(s), Actor: protoActor(s.Actor)}
	if s.Wake != nil {
		req.Reservation, req.Cold = s.Wake.Reservation, s.Wake.Cold
	}
	if d, ok := ctx.Deadline(); ok {
		req.Deadline = timestamppb.New(d)
	}
	return req
}

func vmWritten(s *core.Session) bool { return s.VM != corev1.Tier_TIER_UNSPECIFIED }

func snapshotWanted(s *core.Session) string {
	if s.Restore == nil {
		return ""
	}
	return s.Restore.Snapshot
}

func sleepRequest(s *core.Session) *hostv1.SleepRequest {
	sl := core.Sleep{}
	if s.Sleep != nil {
		sl = *s.Sleep
	}
	return &hostv1.SleepRequest{Session: sessionRef(s), IdleSince: protoTime(sl.IdleSince), Parent: s.Manifest,
		Reason: sl.Reason, Force: sl.Force || sl.IdleSince == 0, LastActiveEpoch: stamp(s.LastActive.Incarnation, s.LastActive.Index)}
}

func ownedSession(s *core.Session) *schedulerv1.OwnedSession {
	return &schedulerv1.OwnedSession{Session: sessionRef(s), State: s.State, Manifest: s.Manifest, Terms: protoTerms(*s.Terms),
		LastActiveEpoch: stamp(s.LastActive.Incarnation, s.LastActive.Index), SessionName: s.Name}
}

func record(s *core.Session, whole bool) *schedulerv1.SessionRecord {
	out := &schedulerv1.SessionRecord{Session: sessionRef(s), State: s.State, Revision: s.Revision, Host: s.Host.String(),
		Manifest: s.Manifest, Terms: protoTerms(*s.Terms), Actor: protoActor(s.Actor), SessionName: s.Name,
		CreatedAt: protoTime(s.CreatedAt), ChangedAt: protoTime(s.ChangedAt), Failure: protoFailure(s.Failure), Origin: s.Origin,
		Restore: snapshotWanted(s), Unsaved: s.Dirty, RestoredAsOf: protoTime(s.RestoredAsOf), NewestHost: s.Newest.String(),
		VmWritten: vmWritten(s)}
	if s.Wake != nil {
		out.Waiting = s.Wake.Unplaced
		if isHandoff(s) {
			if out.Waiting == "" && waits(s) {
				out.Waiting = "its turn to wake on another host has not come yet"
			}
			out.HandoffFrom, out.HandoffUntil = s.From.String(), protoTime(s.Wake.Deadline)
		}
	}
	if whole {
		out.LastWake = protoTiming(lastWake(s))
	}
	return out
}

func deletedRecord(t *core.Tombstone) *schedulerv1.SessionRecord {
	return &schedulerv1.SessionRecord{
		Session: protoRef(t.Tenant, core.Ref{Session: t.Key, Generation: t.Generation, Epoch: t.Epoch}),
		State:   core.Deleted, Revision: t.Revision, Actor: protoActor(t.Actor), SessionName: t.Name, ChangedAt: protoTime(t.At),
	}
}

// lastWake is the timing of the wake that made a session active.
func lastWake(s *core.Session) core.Timing {
	if s.LastWake == nil {
		return core.Timing{}
	}
	return *s.LastWake
}

func protoPlan(p *core.Plan) *schedulerv1.Placement {
	if p == nil {
		return nil
	}
	out := &schedulerv1.Placement{Host: p.Host.String(), Reason: p.Reason, More: uint32(max(p.More, 0))}
	for _, r := range p.Rows {
		out.Rows = append(out.Rows, &schedulerv1.PlacementRow{Host: r.Host.String(), Refused: r.Refused, Ranks: r.Ranks})
	}
	return out
}
