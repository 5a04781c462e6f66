package main

import (
	"time"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
)

type snapshotsOut struct {
	Session   string        `json:"session"`
	Name      string        `json:"name"`
	Restore   string        `json:"restore,omitempty"`
	Unsaved   bool          `json:"unsaved,omitempty"`
	Snapshots []snapshotOut `json:"snapshots"`
}

type snapshotOut struct {
	ID              string    `json:"id"`
	TakenAt         time.Time `json:"taken_at"`
	Epoch           string    `json:"epoch"`
	Head            bool      `json:"head"`
	SizeBytes       uint64    `json:"size_bytes"`
	AllocatedBytes  uint64    `json:"allocated_bytes"`
	AddedBytes      uint64    `json:"added_bytes"`
	ImageDigest     string    `json:"image_digest"`
	CrashConsistent bool      `json:"crash_consistent"`
	RestoredFrom    string    `json:"restored_from,omitempty"`
}

type restoreOut struct {
	Session     string    `json:"session"`
	Name        string    `json:"name"`
	Pending     bool      `json:"pending"`
	Snapshot    string    `json:"snapshot"`
	AsOf        time.Time `json:"as_of"`
	Head        string    `json:"head"`
	HeadTakenAt time.Time `json:"head_taken_at"`
	TakenBack   string    `json:"taken_back,omitempty"`
}

type verifyOut struct {
	Session      string      `json:"session"`
	Name         string      `json:"name"`
	Snapshots    uint32      `json:"snapshots"`
	Objects      uint64      `json:"objects"`
	TotalObjects uint64      `json:"total_objects"`
	Bytes        uint64      `json:"bytes"`
	Damaged      []damageOut `json:"damaged"`
}

type damageOut struct {
	Object    string   `json:"object"`
	Reason    string   `json:"reason"`
	Snapshots []string `json:"snapshots"`
}

type growOut struct {
	Session    string `json:"session"`
	Name       string `json:"name"`
	AskedBytes uint64 `json:"asked_bytes"`
	SizeBytes  uint64 `json:"size_bytes"`
	Pending    bool   `json:"pending"`
}

type archiveOut struct {
	Session      string   `json:"session"`
	Name         string   `json:"name"`
	Bytes        int64    `json:"bytes"`
	Entries      int64    `json:"entries"`
	Skipped      int64    `json:"skipped"`
	SkippedNames []string `json:"skipped_names"`
	Attributes   int64    `json:"attributes"`
}

// termsSnapshotsOut is what a plan says of snapshots.
type termsSnapshotsOut struct {
	EveryMS      float64 `json:"every_ms"`
	KeepAllMS    float64 `json:"keep_all_ms"`
	KeepHourlyMS float64 `json:"keep_hourly_ms"`
	KeepDailyMS  float64 `json:"keep_daily_ms"`
}

func snapshotsOutOf(r *schedulerv1.SessionRecord, list []*hostv1.Snapshot) snapshotsOut {
	out := snapshotsOut{Session: r.GetSession().GetSession(), Name: r.GetSessionName(), Restore: r.GetRestore(), Unsaved: r.GetUnsaved(), Snapshots: []snapshotOut{}}
	for i, s := range list {
		out.Snapshots = append(out.Snapshots, snapshotOut{ID: s.GetId(), TakenAt: s.GetTakenAt().AsTime(), Epoch: stamp(s.GetEpoch()), Head: i == 0,
			SizeBytes: s.GetSizeBytes(), AllocatedBytes: s.GetAllocatedBytes(), AddedBytes: s.GetAddedBytes(), ImageDigest: s.GetImageDigest(),
			CrashConsistent: s.GetCrashConsistent(), RestoredFrom: s.GetRestoredFrom()})
	}
	return out
}

func restoreOutOf(r *schedulerv1.SessionRecord, head, want *hostv1.Snapshot) restoreOut {
	out := restoreOut{Session: r.GetSession().GetSession(), Name: r.GetSessionName(), Pending: want.GetId() != head.GetId(), Snapshot: want.GetId(),
		AsOf: want.GetTakenAt().AsTime(), Head: head.GetId(), HeadTakenAt: head.GetTakenAt().AsTime()}
	if r.GetRestore() != want.GetId() {
		out.TakenBack = r.GetRestore()
	}
	return out
}

func verifyOutOf(r *schedulerv1.SessionRecord) verifyOut {
	return verifyOut{Session: r.GetSession().GetSession(), Name: r.GetSessionName(), Damaged: []damageOut{}}
}

// add counts one part.
func (v *verifyOut) add(r *hostv1.VerifyReply) {
	v.Snapshots, v.TotalObjects = r.GetSnapshots(), uint64(r.GetTotalObjects())
	v.Objects += uint64(r.GetObjects())
	v.Bytes += r.GetBytes()
	for _, d := range r.GetDamaged() {
		v.Damaged = append(v.Damaged, damageOut{d.GetObject(), d.GetReason(), append([]string{}, d.GetSnapshots()...)})
	}
}

func archiveOutOf(s *sdk.Session, bytes, entries int64, left sdk.Left) archiveOut {
	return archiveOut{Session: s.Key(), Name: s.Name(), Bytes: bytes, Entries: entries, Skipped: left.Skipped,
		SkippedNames: append([]string{}, left.SkippedNames...), Attributes: left.Attributes}
}
