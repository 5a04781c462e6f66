package sdktest

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

// snapshot is a committed state of a session's files. All are kept.
type snapshot struct {
	*hostv1.Snapshot
	files map[string]file
}

// commit makes the files of now the head, if they differ from it; Server.mu is held.
func (s *Server) commit(x *session, restoredFrom string) *hostv1.Snapshot {
	all, digest := x.files.copy()
	if len(x.snapshots) > 0 && restoredFrom == "" {
		if _, old := copyOf(x.snapshots[0].files); old == digest {
			return x.snapshots[0].Snapshot
		}
	}
	sum := sha256.Sum256([]byte(x.manifest + digest + strconv.FormatUint(s.next(), 10)))
	n := x.files.size()
	snap := &hostv1.Snapshot{Id: fmt.Sprintf("m%x", sum[:16]), TakenAt: timestamppb.Now(), Epoch: x.ref().GetEpoch(),
		SizeBytes: x.terms.GetLimits().GetDiskBytes(), AllocatedBytes: n, AddedBytes: n, ImageDigest: "sha256:0", RestoredFrom: restoredFrom}
	x.snapshots = append([]snapshot{{snap, all}}, x.snapshots...)
	x.manifest = snap.GetId()
	return snap
}

// copy returns the files as they are, and a digest of them.
func (f *files) copy() (map[string]file, string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]file{}
	for p, x := range f.all {
		out[p] = *x
	}
	return copyOf(out)
}

func copyOf(all map[string]file) (map[string]file, string) {
	h := sha256.New()
	for _, p := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(h, "%q %t %o %x\n", p, all[p].dir, all[p].mode, sha256.Sum256(all[p].data))
	}
	return all, fmt.Sprintf("%x", h.Sum(nil))
}

func (x *session) snapshot(id string) *snapshot {
	for i := range x.snapshots {
		if x.snapshots[i].GetId() == id {
			return &x.snapshots[i]
		}
	}
	return nil
}

// rewind brings back the snapshot that a restore asked for, or the last one where the host was lost,
// at a wake.
func (s *Server) rewind(x *session) (asOf *timestamppb.Timestamp) {
	snap, wanted := x.snapshot(x.restore), true
	if snap == nil && x.newest != "" { // its newest files are lost
		snap, wanted = x.snapshot(x.manifest), false
	}
	x.restore, x.newest = "", ""
	if snap == nil {
		return nil
	}
	x.files.mu.Lock()
	x.files.all = map[string]*file{}
	for p, f := range snap.files {
		x.files.all[p] = &f
	}
	x.files.mu.Unlock()
	if wanted {
		s.commit(x, snap.GetId())
	}
	x.restoredAsOf = snap.GetTakenAt()
	return snap.GetTakenAt()
}

// restoreLocked is scheduler's restore.
func (s *Server) restoreLocked(req *schedulerv1.RestoreRequest) (*schedulerv1.RestoreReply, error) {
	x := s.sessions[req.GetSession()]
	switch {
	case x == nil:
		return nil, fault{errkind.NotFound, "there is no session " + req.GetSession()}
	case x.tenant != req.GetTenant():
		return nil, fault{errkind.Denied, "the session belongs to another tenant"}
	case !proto.Equal(x.ref().GetGeneration(), req.GetGeneration()):
		return nil, fault{errkind.StaleEpoch, "the session is of another generation"}
	case x.state != corev1.State_STATE_ASLEEP:
		return nil, fault{errkind.Conflict, "the session is awake; put it to sleep first"}
	case x.manifest != req.GetHead():
		return nil, fault{errkind.Conflict, "the head of the session has moved: it is " + x.manifest}
	}
	want := req.GetSnapshot()
	if want == x.manifest {
		want = ""
	}
	if want != x.restore {
		x.restore = want
		s.event(x, "rewound", &schedulerv1.Event{Detail: &schedulerv1.Event_Rewound{Rewound: &schedulerv1.Rewound{
			Snapshot: want, AsOf: req.GetAsOf(), Head: x.manifest}}})
	}
	return &schedulerv1.RestoreReply{Record: x.record()}, nil
}

// host answers what operators ask of a host; Server.mu is held.
func (s *Server) host(call subjects.Call, m *nats.Msg) (proto.Message, error) {
	if s.hostState(call.Host) == nil {
		return nil, fault{errkind.NotFound, "there is no such host"}
	}
	ct := m.Header.Get("Content-Type")
	switch call.Method {
	case "snapshots":
		req, out := &hostv1.SnapshotsRequest{}, &hostv1.SnapshotsReply{}
		x, err := s.disk(ct, m.Data, req, req.GetSession)
		if err != nil {
			return nil, err
		}
		for _, snap := range x.snapshots {
			out.Snapshots = append(out.Snapshots, snap.Snapshot)
		}
		return out, nil
	case "verify":
		req := &hostv1.VerifyRequest{}
		x, err := s.disk(ct, m.Data, req, req.GetSession)
		if err != nil {
			return nil, err
		}
		return x.verify(req.GetAfter()), nil
	case "grow":
		req := &hostv1.GrowRequest{}
		x, err := s.disk(ct, m.Data, req, req.GetSession)
		switch {
		case err != nil:
			return nil, err
		case x.state != corev1.State_STATE_ACTIVE:
			return nil, fault{errkind.Conflict, "the session is not awake here"}
		}
		x.terms.Limits.DiskBytes = max(x.terms.Limits.DiskBytes, req.GetSizeBytes())
		return &hostv1.GrowReply{SizeBytes: x.terms.Limits.DiskBytes}, nil
	}
	return nil, fault{errkind.Unimplemented, "the fake does not have host." + call.Method}
}

// disk reads a request about a session's disk and finds the session.
func (s *Server) disk(contentType string, raw []byte, req proto.Message, of func() *corev1.SessionRef) (*session, error) {
	if err := decode(contentType, raw, req); err != nil {
		return nil, fault{errkind.Invalid, err.Error()}
	}
	x := s.sessions[of().GetSession()]
	if x == nil || !proto.Equal(x.ref().GetGeneration(), of().GetGeneration()) {
		return nil, fault{errkind.NotFound, "there is no such session"}
	}
	return x, nil
}

// verify takes every snapshot for one object, and reads one in each part.
func (x *session) verify(after string) *hostv1.VerifyReply {
	all := map[string]*hostv1.Snapshot{}
	for _, snap := range x.snapshots {
		all["packs/"+snap.GetId()] = snap.Snapshot
	}
	out := &hostv1.VerifyReply{Snapshots: uint32(len(all)), TotalObjects: uint32(len(all))}
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(n string) bool { return n <= after })
	if len(names) == 0 {
		return out
	}
	name := names[0]
	out.Objects, out.Bytes = 1, all[name].GetAddedBytes()
	if why := x.damaged[all[name].GetId()]; why != "" {
		out.Damaged = []*hostv1.Damage{{Object: name, Reason: why, Snapshots: []string{all[name].GetId()}}}
	}
	if len(names) > 1 {
		out.Next = name
	}
	return out
}

// Damage makes what is stored of a snapshot bad: verify finds it, for this reason.
func (s *Server) Damage(key, snapshot, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.sessions[key]; x != nil {
		if x.damaged == nil {
			x.damaged = map[string]string{}
		}
		x.damaged[snapshot] = reason
	}
}

// Age makes every snapshot of a session so much older.
func (s *Server) Age(key string, by time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x := s.sessions[key]; x != nil {
		for _, snap := range x.snapshots {
			snap.TakenAt = timestamppb.New(snap.GetTakenAt().AsTime().Add(-by))
		}
	}
}
