package sdk

import (
	"context"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// UserSession names a session of a user for calls that do not wake it.
type UserSession struct {
	User      TokenSource // nil: that of the Config
	Name      string      // empty: "default"; for Status: all
	RequestID string      // makes the call idempotent across processes; empty: random
	ViaQueue  bool        // use the durable door (close and delete)
}

func (s *Session) current() *identityv1.OpenReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reply
}

// Key is the session key: "s" and 52 characters.
func (s *Session) Key() string { return s.current().GetSession().GetSession() }

// Name tells the sessions of one user apart.
func (s *Session) Name() string {
	return or(or(s.current().GetPlace().GetSessionName(), s.opts.Name), string(ids.DefaultSession))
}

// Generation names the life of the session: "<incarnation>-<index>".
func (s *Session) Generation() string { return stamp(s.current().GetSession().GetGeneration()) }

// Epoch names its placement: "<incarnation>-<index>".
func (s *Session) Epoch() string { return stamp(s.current().GetSession().GetEpoch()) }

// Host is the id of the host that runs it.
func (s *Session) Host() string { return s.current().GetEndpoint().GetHost() }

// Origin says what the last open found.
func (s *Session) Origin() Origin { return originOf(s.current().GetOrigin()) }

// RestoredAsOf is the time of the disk's state when Origin is Restored.
func (s *Session) RestoredAsOf() time.Time {
	if t := s.current().GetRestoredAsOf(); t != nil {
		return t.AsTime()
	}
	return time.Time{}
}

// Place states what the sandbox is right now.
func (s *Session) Place() Place { return placeOf(s.current().GetPlace()) }

// Timing is the time of every step of the last open.
func (s *Session) Timing() Timing { return timingOf(s.current().GetTiming()) }

// Detach forgets the handle. The session and its processes go on until the
// plan's idle time has passed.
func (s *Session) Detach() { s.stop() }

// Close puts the session to sleep now, or deletes it if it is ephemeral;
// running processes end. nil means that its manifest is committed and all that
// it names is in the store: the next open finds what was written, also after
// the loss of the host. ErrUnsaved: it sleeps, or is about to, and its files
// are whole on their host, but not saved outside it yet. The handle is done.
func (s *Session) Close(ctx context.Context) error {
	if s.attached {
		return notOurs("close session")
	}
	err := s.c.CloseSession(ctx, UserSession{User: s.opts.User, Name: s.Name(), ViaQueue: s.opts.ViaQueue})
	if err == nil {
		s.stop()
	}
	return err
}

// Delete destroys the session, its disk and its keys. The handle is done.
func (s *Session) Delete(ctx context.Context) error {
	if s.attached {
		return notOurs("delete session")
	}
	err := s.c.DeleteSession(ctx, UserSession{User: s.opts.User, Name: s.Name(), ViaQueue: s.opts.ViaQueue})
	if err == nil {
		s.stop()
	}
	return err
}

// Manifest is a committed description of the session's disk at one time.
type Manifest struct {
	ID          string
	Parent      string // the manifest that it replaced; empty for the first
	TakenAt     time.Time
	SizeBytes   uint64 // the quota
	UsedBytes   uint64 // allocated
	ImageDigest string
}

// Checkpoint commits the state of the disk as a manifest. nil means that what
// was written before, synced by a program or not, is in the store, and that
// the manifest is committed: it survives the loss of the host. Safe to repeat.
//
// The first one of a session may take minutes, since all that it holds goes to
// the store. Checkpoint waits until ctx ends, and then gives it up; it goes on
// over a dropped connection. ErrUnsaved: the store, or what else it takes,
// cannot be reached now; the session goes on, and its files are whole on their
// host. ErrSuperseded: the session went to sleep or was deleted meanwhile.
func (s *Session) Checkpoint(ctx context.Context) (Manifest, error) {
	const op = "checkpoint"
	ask := &boxv1.Operation{Op: &boxv1.Operation_Checkpoint{Checkpoint: &boxv1.Checkpoint{Key: string(ids.NewExecKey())}}}
	var lost time.Time
	for n := 0; ; n++ {
		m, held, err := s.checkpointOnce(ctx, op, ask)
		if err == nil {
			return m, nil
		}
		if held || lost.IsZero() {
			lost = time.Now()
		}
		kind := KindOf(err)
		again := isLost(err) || n > 0 && kind == errkind.Unavailable || kind == errkind.Deadline && !isAnswer(err)
		if ctx.Err() != nil || !again || n >= checkpointTries || time.Since(lost) > s.c.cfg.Reattach || s.alive() != nil {
			return Manifest{}, wrap(op, err)
		}
		if perr := pause(ctx, n); perr != nil {
			return Manifest{}, wrap(op, perr)
		}
	}
}

// checkpointTries bounds how often a checkpoint whose stream was lost is asked for.
const checkpointTries = 20

// checkpointOnce asks once. held: a stream for it was open. A stream that was lost is not cancelled:
// the host goes on, and the next try with the same key joins.
func (s *Session) checkpointOnce(ctx context.Context, name string, op *boxv1.Operation) (_ Manifest, held bool, err error) {
	st, res, err := s.open(ctx, name, op, true)
	if err != nil {
		return Manifest{}, false, err
	}
	for held = st != nil; held && res.GetManifest() == nil && err == nil; {
		var f *boxv1.Frame
		if f, err = st.recv(ctx); err == nil {
			res = f.GetResult()
		}
	}
	switch {
	case st == nil:
	case err == nil || isLost(err):
		st.close(nil)
	default:
		st.close(&boxv1.Cancel{})
	}
	m := res.GetManifest()
	return Manifest{ID: m.GetId(), Parent: m.GetParent(), TakenAt: m.GetTakenAt().AsTime(), SizeBytes: m.GetSizeBytes(),
		UsedBytes: m.GetAllocatedBytes(), ImageDigest: m.GetImageDigest()}, held, err
}

// Info returns the text of /run/berth/session.json: what this place is now.
func (s *Session) Info(ctx context.Context) (string, error) {
	r, err := s.short(ctx, "info", &boxv1.Operation{Op: &boxv1.Operation_Info{Info: &boxv1.Info{}}}, true)
	return r.GetPlaceJson(), err
}

// CloseSession puts a session to sleep, or deletes it if it is ephemeral. A
// session that is not awake is left as it is. See [Session.Close].
func (c *Client) CloseSession(ctx context.Context, u UserSession) error {
	_, err := c.userAsk(ctx, "close session", "close", u, &identityv1.CloseRequest{SessionName: u.Name})
	return err
}

// DeleteSession destroys a session, its disk and its keys, whether it is awake
// or not. nil means that its keys are destroyed and no grant of it is good any
// more.
func (c *Client) DeleteSession(ctx context.Context, u UserSession) error {
	_, err := c.userAsk(ctx, "delete session", "delete", u, &identityv1.DeleteRequest{SessionName: u.Name})
	return err
}

// Status returns the user's sessions, or the named one. It wakes none.
func (c *Client) Status(ctx context.Context, u UserSession) ([]Status, error) {
	u.ViaQueue = false
	r, err := c.userAsk(ctx, "get status", "status", u, &identityv1.StatusRequest{SessionName: u.Name})
	if err != nil {
		return nil, err
	}
	var out []Status
	for _, s := range r.GetStatus().GetSessions() {
		out = append(out, statusOf(s))
	}
	return out, nil
}

func (c *Client) userAsk(ctx context.Context, op, verb string, u UserSession, body proto.Message) (*identityv1.Reply, error) {
	if u.Name != "" {
		if _, err := ids.ParseSessionName(u.Name); err != nil {
			return nil, wrap(op, err)
		}
	}
	id, err := requestIDOr(u.RequestID)
	if err != nil {
		return nil, wrap(op, err)
	}
	return c.do(ctx, ask{op: op, verb: verb, id: id, user: u.User, durable: u.ViaQueue, limit: 90 * time.Second,
		body: func(time.Time) proto.Message { return body }})
}

func stamp(s *corev1.Stamp) string {
	if s == nil {
		return ""
	}
	return strconv.FormatUint(uint64(s.GetIncarnation()), 10) + "-" + strconv.FormatUint(s.GetIndex(), 10)
}

func upper(s string) string { return strings.ToUpper(s) }

// ExecInfo is one process that the sandbox runs or remembers.
type ExecInfo struct {
	Key     string
	Args    []string // empty where the sandbox does not tell
	Running bool
	Started time.Time
	// Exit is how it ended, as Wait would say; nil also while it runs.
	Exit error
}

// Execs lists the processes that run, or ended less than ten minutes ago, by
// whomever they were started.
func (s *Session) Execs(ctx context.Context) ([]ExecInfo, error) {
	r, err := s.short(ctx, "list processes", &boxv1.Operation{Op: &boxv1.Operation_ListExecs{ListExecs: &boxv1.ListExecs{}}}, true)
	if err != nil {
		return nil, err
	}
	var out []ExecInfo
	for _, e := range r.GetExecs() {
		info := ExecInfo{Key: e.GetKey(), Args: e.GetArgv(), Running: e.GetRunning(), Started: e.GetStarted().AsTime()}
		if !info.Running {
			info.Exit = exitError(e.GetExit())
		}
		out = append(out, info)
	}
	return out, nil
}
