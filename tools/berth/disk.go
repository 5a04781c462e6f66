package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type diskCmd struct {
	Snapshots diskSnapshotsCmd `cmd:"" help:"List the snapshots of a session's disk, newest first."`
	Restore   diskRestoreCmd   `cmd:"" help:"Have the next open of a sleeping session bring back an earlier snapshot."`
	Verify    diskVerifyCmd    `cmd:"" help:"Read all that is stored of a disk and compare it with its hashes."`
	Grow      diskGrowCmd      `cmd:"" help:"Make the disk of an awake session larger while it runs."`
	Export    diskExportCmd    `cmd:"" help:"Write a session's own files as a tar archive."`
	Import    diskImportCmd    `cmd:"" help:"Take the files of a tar archive into a session."`
}

// target is a session that an operator looks at: by its key, or by a name of the user's.
type target struct {
	userFlags
	selector
	attempt time.Duration // that a request may take; 0: the usual
}

// find logs in as operator and gets scheduler's record of the session.
func (t *target) find(a *app) (*sdk.Client, *schedulerv1.SessionRecord, error) {
	key := t.Session
	if _, err := ids.ParseSessionKey(key); err != nil {
		if key, err = t.key(a); err != nil {
			return nil, nil, err
		}
	}
	op, err := a.operatorWith(t.attempt)
	if err != nil {
		return nil, nil, err
	}
	reply := &schedulerv1.ShowReply{}
	err = op.Call(a.ctx, "scheduler", "show", &schedulerv1.ShowRequest{Tenant: t.Tenant, Session: key}, reply)
	if err == nil && reply.GetRecord() == nil {
		err = fmt.Errorf("there is no session %s", key)
	}
	if err != nil {
		op.Close()
		return nil, nil, err
	}
	return op, reply.GetRecord(), nil
}

// key asks identity for the key of a name of the user's.
func (t *target) key(a *app) (string, error) {
	if _, err := ids.ParseSessionName(t.Session); err != nil {
		return "", exitCode{2, err.Error()}
	}
	cl, err := t.connect(a)
	if err != nil {
		return "", err
	}
	defer cl.Close()
	s, ok, err := owned(a.ctx, cl, t.Session)
	if err != nil {
		return "", err
	}
	if !ok {
		return "", fmt.Errorf("this user has no session %s", t.Session)
	}
	t.Tenant = string(cl.Identity().Tenant)
	return s.Key, nil
}

// reader is the host that reads the store for a session: its own, or any that is alive.
func reader(ctx context.Context, op *sdk.Client, own string) (string, error) {
	reply := &schedulerv1.HostsReply{}
	if err := op.Call(ctx, "scheduler", "hosts", &schedulerv1.HostsRequest{}, reply); err != nil {
		return "", err
	}
	any := ""
	for _, h := range reply.GetHosts() {
		switch {
		case !h.GetAlive():
		case h.GetHost() == own:
			return own, nil
		case any == "":
			any = h.GetHost()
		}
	}
	if any == "" {
		return "", fmt.Errorf("no host is alive that could read the store of disks")
	}
	return any, nil
}

// snapshotsOf lists the snapshots of a session, newest first; none of one that was never saved.
func snapshotsOf(ctx context.Context, op *sdk.Client, r *schedulerv1.SessionRecord) ([]*hostv1.Snapshot, error) {
	if r.GetManifest() == "" {
		return nil, nil
	}
	host, err := reader(ctx, op, r.GetHost())
	if err != nil {
		return nil, err
	}
	reply := &hostv1.SnapshotsReply{}
	err = op.CallHost(ctx, host, "snapshots", &hostv1.SnapshotsRequest{Session: r.GetSession(), Manifest: r.GetManifest()}, reply)
	return reply.GetSnapshots(), err
}

type diskSnapshotsCmd struct{ target }

func (c *diskSnapshotsCmd) Run(a *app) error {
	op, rec, err := c.find(a)
	if err != nil {
		return err
	}
	defer op.Close()
	list, err := snapshotsOf(a.ctx, op, rec)
	if err != nil {
		return err
	}
	out := snapshotsOutOf(rec, list)
	return a.print(out, func() { a.renderSnapshots(out) })
}

type diskRestoreCmd struct {
	target
	At       string `help:"The newest snapshot that is not later: a time (RFC 3339, or 2026-11-29 14:05 of this machine's zone), or how long ago (10m)." placeholder:"TIME"`
	Snapshot string `help:"This snapshot: its id or the beginning of it; head takes a pending restore back." placeholder:"ID"`
}

func (c *diskRestoreCmd) Run(a *app) error {
	if (c.At == "") == (c.Snapshot == "") {
		return usage("say what to restore: --at TIME or --snapshot ID, one of them")
	}
	var at time.Time
	if c.At != "" {
		var err error
		if at, err = parseWhen(c.At, a.time()); err != nil {
			return err
		}
	} else if !isSnapshot(c.Snapshot) {
		return usage("%.60q is not the id of a snapshot, nor head", c.Snapshot)
	}
	op, rec, err := c.find(a)
	if err != nil {
		return err
	}
	defer op.Close()
	if err := restorable(rec); err != nil {
		return err
	}
	list, err := snapshotsOf(a.ctx, op, rec)
	if err != nil {
		return err
	}
	want, err := c.choose(list, at)
	if err != nil {
		return err
	}
	reply := &schedulerv1.RestoreReply{}
	err = op.Call(a.ctx, "scheduler", "restore", &schedulerv1.RestoreRequest{Tenant: rec.GetSession().GetTenant(), Session: rec.GetSession().GetSession(),
		Generation: rec.GetSession().GetGeneration(), Head: rec.GetManifest(), Snapshot: want.GetId(), AsOf: timestamppb.New(want.GetTakenAt().AsTime())}, reply)
	if err != nil {
		return err
	}
	out := restoreOutOf(rec, list[0], want)
	return a.print(out, func() { a.renderRestore(out) })
}

// restorable says in one sentence why a session cannot be restored now.
func restorable(r *schedulerv1.SessionRecord) error {
	name := r.GetSession().GetSession()
	switch r.GetState() {
	case corev1.State_STATE_ASLEEP, corev1.State_STATE_PAUSED, corev1.State_STATE_FAILED:
	case corev1.State_STATE_ACTIVE, corev1.State_STATE_WAKING:
		return fmt.Errorf("session %s is awake; close it first (berth session close), then restore it", name)
	default:
		return fmt.Errorf("session %s is %s; it can be restored once it sleeps", name, stateWord(r.GetState()))
	}
	if r.GetManifest() == "" {
		return fmt.Errorf("session %s was never saved: it has no snapshots", name)
	}
	return nil
}

// choose finds the snapshot that is meant.
func (c *diskRestoreCmd) choose(list []*hostv1.Snapshot, at time.Time) (*hostv1.Snapshot, error) {
	if len(list) == 0 {
		return nil, fmt.Errorf("the session has no snapshots")
	}
	if c.Snapshot == "head" || c.Snapshot == "current" {
		return list[0], nil
	}
	if c.Snapshot == "" {
		var best *hostv1.Snapshot
		for _, s := range list {
			if t := s.GetTakenAt().AsTime(); !t.After(at) && (best == nil || t.After(best.GetTakenAt().AsTime())) {
				best = s
			}
		}
		if best == nil {
			return nil, fmt.Errorf("no snapshot is as old as %s; the oldest is of %s", when(at), when(list[len(list)-1].GetTakenAt().AsTime()))
		}
		return best, nil
	}
	var found *hostv1.Snapshot
	for _, s := range list {
		switch {
		case s.GetId() == c.Snapshot:
			return s, nil
		case !strings.HasPrefix(s.GetId(), c.Snapshot):
		case found != nil:
			return nil, usage("%s is the beginning of several snapshots; write more of it", c.Snapshot)
		default:
			found = s
		}
	}
	if found == nil {
		return nil, fmt.Errorf("the session has no snapshot %s; berth disk snapshots lists them", c.Snapshot)
	}
	return found, nil
}

type diskVerifyCmd struct{ target }

// verifyPart is how long a host may read for one part: a slow store has time.
const verifyPart = 4 * time.Minute

func (c *diskVerifyCmd) Run(a *app) error {
	c.attempt = verifyPart
	op, rec, err := c.find(a)
	if err != nil {
		return err
	}
	defer op.Close()
	out := verifyOutOf(rec)
	if rec.GetManifest() != "" {
		if err := c.verify(a, op, rec, &out); err != nil {
			return err
		}
	}
	if err := a.print(out, func() { a.renderVerify(out) }); err != nil || len(out.Damaged) == 0 {
		return err
	}
	return exitCode{1, fmt.Sprintf("%s of session %s %s bad; snapshots that need %s cannot be restored whole", count(len(out.Damaged), "object", "objects"),
		rec.GetSession().GetSession(), verb(len(out.Damaged), "is", "are"), verb(len(out.Damaged), "it", "them"))}
}

// verify asks for one part after the other.
func (c *diskVerifyCmd) verify(a *app, op *sdk.Client, rec *schedulerv1.SessionRecord, out *verifyOut) error {
	host, err := reader(a.ctx, op, rec.GetHost())
	if err != nil {
		return err
	}
	say := isTerminal(a.stderr) && !a.json
	for after := ""; ; {
		reply := &hostv1.VerifyReply{}
		if err := op.CallHost(a.ctx, host, "verify", &hostv1.VerifyRequest{Session: rec.GetSession(), Manifest: rec.GetManifest(), After: after}, reply); err != nil {
			return err
		}
		out.add(reply)
		if say {
			fmt.Fprintf(a.stderr, "\r\x1b[Kread %d of %d objects, %s", out.Objects, out.TotalObjects, bytesWord(out.Bytes))
		}
		if reply.GetNext() == "" || reply.GetNext() == after {
			if say {
				fmt.Fprint(a.stderr, "\r\x1b[K")
			}
			if reply.GetNext() != "" {
				return fmt.Errorf("host %s does not go on after object %s", host, plain(after))
			}
			return nil
		}
		after = reply.GetNext()
	}
}

type diskGrowCmd struct {
	userFlags
	Session string `arg:"" help:"Name or key of the session." placeholder:"SESSION"`
	Size    string `arg:"" help:"Its new size, for example 8GiB." placeholder:"SIZE"`
}

// growTime is how long a file system may take to grow.
const growTime = 2 * time.Minute

func (c *diskGrowCmd) Run(a *app) error {
	size, err := parseSize(c.Size)
	if err != nil {
		return err
	}
	if size < 16<<20 || size > 16<<40 || size%4096 != 0 {
		return usage("a disk has 16MiB to 16TiB, in steps of 4KiB; %s is not of these", c.Size)
	}
	t := target{userFlags: c.userFlags, selector: selector{c.Session}, attempt: growTime}
	op, rec, err := t.find(a)
	if err != nil {
		return err
	}
	defer op.Close()
	if rec.GetState() != corev1.State_STATE_ACTIVE {
		return fmt.Errorf("session %s is %s; a disk grows while its session is awake: open it first", rec.GetSession().GetSession(), stateWord(rec.GetState()))
	}
	reply := &hostv1.GrowReply{}
	if err := op.CallHost(a.ctx, rec.GetHost(), "grow", &hostv1.GrowRequest{Session: rec.GetSession(), SizeBytes: size}, reply); err != nil {
		return err
	}
	out := growOut{Session: rec.GetSession().GetSession(), Name: rec.GetSessionName(), AskedBytes: size, SizeBytes: reply.GetSizeBytes(),
		Pending: reply.GetSizeBytes() < size}
	return a.print(out, func() { a.renderGrow(out) })
}
