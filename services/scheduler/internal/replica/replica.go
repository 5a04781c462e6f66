// Package replica keeps the scheduler's state machine on raft. It guarantees
// that an entry whose Apply returned without error is on the disks of a
// majority, synced, and applied; that entries proposed together share a sync;
// that a request answered after Verify is linearizable; that a replica which
// lost its folder is not taken for what it was; and that a disk that hangs ends
// the process instead of wedging the group. An error of Apply is ambiguous: the
// entry may be applied later.
package replica

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/hashicorp/raft"
)

const (
	askAgain  = 200 * time.Millisecond
	askNotice = 5 * time.Second
)

// Peer is one replica of the group.
type Peer struct {
	ID     string
	Addr   string
	Voter  bool
	Leader bool
}

// Config of one replica.
type Config struct {
	Dir string
	Log *slog.Logger
	// Bind, TLS and Peers make a group of 3 or 5; without them it is one replica.
	// Advertise is where the others reach this one, if that is not Bind.
	Bind      string
	Advertise string
	TLS       *tls.Config
	Peers     []Peer
	// Join starts an empty folder without a group: it waits to be added to one.
	Join bool
	ID   string // own id in the group; made and kept in Dir when empty
	// HungAfter is how long a write to the log may take before Fatal is called.
	HungAfter time.Duration
	// Fatal must end the process.
	Fatal func(error)
	// Election timing; short, since replicas are near each other.
	Heartbeat time.Duration
	// Snapshot after this many entries; TrailingLogs of them stay for followers that are behind.
	SnapshotThreshold uint64
	TrailingLogs      uint64

	// reads limits the formats of entries to those of an earlier version, for tests.
	reads int
	// Faults, for tests.
	wrapLog  func(raft.LogStore) raft.LogStore
	wrapConn func(c net.Conn, dialed bool) net.Conn
}

// Replica is one running member of the group.
type Replica struct {
	cfg    Config
	raft   *raft.Raft
	fsm    *machine
	log    *logStore
	dog    *watchdog
	leader chan bool
	done   chan struct{}
	close  sync.Once

	contacts *contacts
	settled  atomic.Uint64 // term whose barrier is done
	change   chan struct{} // held during a change of the group
	raising  raising
	pins     *pins
	link     *link // nil alone
	started  atomic.Pointer[raft.Raft]
}

// Open is OpenContext without an end.
func Open(cfg Config) (*Replica, error) { return OpenContext(context.Background(), cfg) }

// OpenContext starts the replica. An empty folder begins a new group, alone or
// with its peers; with peers it waits, until ctx ends, for all of them to
// answer that they do not know this replica from before.
func OpenContext(ctx context.Context, cfg Config) (*Replica, error) {
	const op = "open scheduler state"
	cfg = defaults(cfg)
	if err := cfg.validate(); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, errs.E(op, errkind.Invalid, cfg.Dir, err)
	}
	id, err := serverID(cfg)
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, cfg.Dir, err)
	}
	cfg.ID = id
	r := &Replica{cfg: cfg, fsm: newMachine(), leader: make(chan bool, 1), done: make(chan struct{}),
		contacts: newContacts(), change: make(chan struct{}, 1)}
	r.fsm.fatal, r.fsm.done, r.fsm.reads = cfg.Fatal, r.done, cfg.reads
	if err := r.start(ctx); err != nil {
		r.release()
		return nil, errs.E(op, errkind.Unavailable, cfg.Dir, err)
	}
	return r, nil
}

func (cfg Config) validate() error {
	host, _, err := net.SplitHostPort(cfg.Bind)
	switch {
	case cfg.Dir == "":
		return errors.New("no folder is given")
	case cfg.Bind == "" && (len(cfg.Peers) > 0 || cfg.Join):
		return errors.New("a replica of a group needs an address to bind")
	case cfg.Bind == "":
		return nil
	case err != nil:
		return fmt.Errorf("%q is no address to bind: host:port is", cfg.Bind)
	case cfg.TLS == nil || cfg.TLS.ClientAuth != tls.RequireAndVerifyClientCert || !certs.Reloads(cfg.TLS) && (cfg.TLS.RootCAs == nil || cfg.TLS.ClientCAs == nil):
		return errors.New("replicas talk over mutual TLS only; none is configured")
	case !ids.IsToken(cfg.ID):
		return fmt.Errorf("%.40q is no id of a replica: one token of a-z, 0-9, _ and - is, which its certificate names", cfg.ID)
	case cfg.Advertise == "" && len(cfg.Peers) == 0 && (host == "" || host == "0.0.0.0" || host == "::"):
		return fmt.Errorf("bind %s is no address that others can reach; advertise one", cfg.Bind)
	case len(cfg.Peers) > maxPeers:
		return fmt.Errorf("%d peers are configured, at most %d make sense", len(cfg.Peers), maxPeers)
	case len(cfg.Peers) > 0 && !cfg.Join && !slices.ContainsFunc(cfg.Peers, func(p Peer) bool { return p.ID == cfg.ID }):
		return fmt.Errorf("replica %s is not among its own peers; list it, or set join", cfg.ID)
	}
	return nil
}

func defaults(cfg Config) Config {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.HungAfter == 0 {
		// Hosts cannot renew at a leader that hangs: another has to lead before
		// their leases of 9 s run out. Alone, nobody would take over.
		cfg.HungAfter = 3 * time.Second
		if cfg.Bind == "" {
			cfg.HungAfter = 15 * time.Second
		}
	}
	if cfg.Heartbeat == 0 {
		// A leader that is gone is replaced after one to two of these and a vote.
		// Leaders send every tenth to fifth of it, so five heartbeats in a row
		// must be lost, or the leader stand still for as long, before a follower
		// stands for election: a LAN's retransmissions and a busy machine's
		// scheduling stay well below.
		cfg.Heartbeat = 400 * time.Millisecond
		if cfg.Bind == "" { // alone: nobody to wait for
			cfg.Heartbeat = 20 * time.Millisecond
		}
	}
	if cfg.SnapshotThreshold == 0 {
		cfg.SnapshotThreshold = 100_000
	}
	if cfg.TrailingLogs == 0 {
		cfg.TrailingLogs = 20_000
	}
	if cfg.reads == 0 {
		cfg.reads = core.EntryVersion
	}
	if cfg.Fatal == nil {
		cfg.Fatal = func(err error) {
			cfg.Log.Error("scheduler ends itself", "error", err)
			os.Exit(70)
		}
	}
	return cfg
}

func (r *Replica) start(ctx context.Context) (err error) {
	logger := newLogger(r.cfg.Log)
	if r.log, err = openLog(r.cfg.Dir, logger); err != nil {
		return err
	}
	entries, stable := raft.LogStore(r.log.entries), raft.StableStore(r.log.stable)
	if r.cfg.wrapLog != nil {
		entries = r.cfg.wrapLog(entries)
	}
	r.dog = newWatchdog(entries, stable, r.cfg.HungAfter, r.cfg.Fatal)
	if r.pins, err = openPins(r.dog); err != nil {
		return err
	}
	// Two are enough to survive a broken one (consul 3362); three leave time to notice.
	snaps, err := raft.NewFileSnapshotStoreWithLogger(r.cfg.Dir, 3, logger)
	if err != nil {
		return fmt.Errorf("open snapshots: %w", err)
	}
	conf := r.raftConfig()
	conf.Logger = logger
	trans, peers, err := r.transport(logger)
	if err != nil {
		return err
	}
	cache, err := raft.NewLogCache(1024, r.dog)
	if err != nil {
		return err
	}
	had, err := raft.HasExistingState(cache, r.dog, snaps)
	if err != nil {
		return fmt.Errorf("read log: %w", err)
	}
	if !had && !r.cfg.Join {
		if err := r.mayBegin(ctx); err != nil {
			return fmt.Errorf("begin a new group: %w", err)
		}
		if err := raft.BootstrapCluster(conf, cache, r.dog, snaps, trans, raft.Configuration{Servers: peers}); err != nil {
			return fmt.Errorf("begin a new group: %w", err)
		}
	}
	notify := make(chan bool, 16)
	conf.NotifyCh = notify
	r.fsm.members = r.membersAre
	r.raft, err = raft.NewRaft(conf, r.fsm, cache, r.dog, snaps, trans)
	if err == nil {
		r.fsm.started.Store(true)
	}
	if broken := r.fsm.failure(); broken != nil { // raft says only that no snapshot could be loaded
		if err == nil {
			close(r.done) // the state machine may wait for it
			_ = r.raft.Shutdown().Error()
		}
		return broken
	}
	if err != nil {
		return fmt.Errorf("start raft: %w", err)
	}
	r.started.Store(r.raft)
	go r.drain(notify)
	return nil
}

// mayBegin waits for every peer to say that it does not know this replica from
// before. All, since only the absent one may remember what is forgotten here.
func (r *Replica) mayBegin(ctx context.Context) error {
	told := time.Now()
	for _, p := range r.cfg.Peers {
		for p.ID != r.cfg.ID {
			err := r.link.ask(ctx, p)
			if err == nil {
				break
			}
			if _, no := errors.AsType[refused](err); no {
				return err
			}
			if time.Since(told) > askNotice {
				told = time.Now()
				r.cfg.Log.Info("a new group begins when all of its replicas answer", "waiting for", p.ID, "addr", p.Addr, "error", err)
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("replica %s did not answer at %s: %w", p.ID, p.Addr, ctx.Err())
			case <-time.After(askAgain):
			}
		}
	}
	return nil
}

// membersAre is called for each committed change of the group.
func (r *Replica) membersAre(members []raft.Server) {
	if err := r.pins.keep(members); err != nil {
		r.cfg.Log.Error("cannot forget replicas that were removed", "error", err)
	}
}

func (r *Replica) raftConfig() *raft.Config {
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(r.cfg.ID)
	conf.HeartbeatTimeout = r.cfg.Heartbeat
	conf.ElectionTimeout = r.cfg.Heartbeat
	conf.LeaderLeaseTimeout = r.cfg.Heartbeat
	conf.CommitTimeout = 10 * time.Millisecond
	conf.MaxAppendEntries = 256
	conf.BatchApplyCh = true
	conf.SnapshotThreshold = r.cfg.SnapshotThreshold
	conf.SnapshotInterval = time.Minute
	conf.TrailingLogs = r.cfg.TrailingLogs
	conf.NoLegacyTelemetry = true
	return conf
}

// drain never blocks raft and keeps only the newest word on leadership.
func (r *Replica) drain(notify <-chan bool) {
	for {
		select {
		case <-r.done:
			return
		case is := <-notify:
			select {
			case <-r.leader:
			default:
			}
			r.leader <- is
			if is && r.link != nil {
				r.correctAddr()
				go r.raiseWhileLeading()
			}
		}
	}
}

// correctAddr has the group know this replica, which leads, by the address
// under which it is reached now.
func (r *Replica) correctAddr() {
	for _, s := range r.members() {
		if string(s.ID) == r.cfg.ID && string(s.Address) != r.link.addr {
			r.raft.AddVoter(s.ID, raft.ServerAddress(r.link.addr), 0, changeTime)
		}
	}
}

// Leadership tells when this replica becomes and stops being the leader.
func (r *Replica) Leadership() <-chan bool { return r.leader }

// IsLeader reports whether this replica believes that it leads.
func (r *Replica) IsLeader() bool { return r.raft.State() == raft.Leader }

// Barrier waits until everything committed before is applied here; a new
// leader calls it before it acts.
func (r *Replica) Barrier(d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return r.barrier(ctx)
}

// Apply commits an entry. Concurrent calls share a sync of the log.
//
// An error is ambiguous: when leadership is lost (NotLeader), when ctx ends
// (Deadline, Canceled) or when the replica stops (Unavailable), the entry may
// still be committed, now or by the next leader, and applied once. So entries
// carry a request id, an exact epoch or a parent, and a caller repeats the
// same entry. Only Exhausted says that it was not proposed.
func (r *Replica) Apply(ctx context.Context, e core.Entry) (core.Outcome, error) {
	if err := ctx.Err(); err != nil {
		return core.Outcome{}, errs.Wrap("apply", "", err)
	}
	e.V = r.Format()
	f, err := r.propose(ctx, e)
	if err != nil {
		return core.Outcome{}, err
	}
	switch v := f.Response().(type) {
	case core.Outcome:
		return v, nil
	case error:
		return core.Outcome{}, errs.E("apply", errkind.Internal, "", v)
	}
	return core.Outcome{}, errs.E("apply", errkind.Internal, "", "the state machine gave no answer")
}

// propose commits an entry in the format that it names.
func (r *Replica) propose(ctx context.Context, e core.Entry) (raft.ApplyFuture, error) {
	raw, err := e.Encode()
	if err != nil {
		return nil, errs.E("apply", errkind.Internal, "", err)
	}
	f := r.raft.Apply(raw, 5*time.Second)
	if err := await(ctx, f.Error); err != nil {
		return nil, r.failed("apply", err)
	}
	return f, nil
}

func (r *Replica) failed(op string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipLost),
		errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return errs.E(op, errkind.NotLeader, "", err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return errs.Wrap(op, "", err)
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return errs.E(op, errkind.Exhausted, "", err)
	}
	return errs.E(op, errkind.Unavailable, "", err)
}

// View calls f with the state as it is; f must not keep it or change it.
func (r *Replica) View(f func(*core.State)) { r.fsm.view(f) }

// Changed returns a channel that is closed when the session changes next.
func (r *Replica) Changed(key fmt.Stringer) (<-chan struct{}, func()) {
	return r.fsm.hub.wait(key.String())
}

// OnApply has f called with every outcome, in order, on the goroutine that
// applies; f must not block. Set it before the first entry.
func (r *Replica) OnApply(f func(core.Outcome)) { r.fsm.onApply.Store(&f) }

// Close hands leadership to another replica, if there is one, and stops.
func (r *Replica) Close() error {
	var err error
	r.close.Do(func() {
		if len(r.voters()) > 1 && r.IsLeader() {
			ctx, cancel := context.WithTimeout(context.Background(), changeTime)
			defer cancel()
			if terr := r.transfer(ctx, ""); terr != nil {
				r.cfg.Log.Warn("cannot hand leadership over", "error", terr)
			}
		}
		close(r.done)
		err = r.raft.Shutdown().Error()
		r.release()
	})
	return errs.Wrap("close scheduler state", "", err)
}

func (r *Replica) release() {
	if r.link != nil {
		_ = r.link.Close()
	}
	if r.dog != nil {
		r.dog.stop()
	}
	if r.log != nil {
		_ = r.log.close()
	}
}

// serverID is this replica's own id: given, or random; the folder keeps it.
func serverID(cfg Config) (string, error) {
	path := filepath.Join(cfg.Dir, "server-id")
	raw, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("read own server id: %w", err)
	}
	switch id := strings.TrimSpace(string(raw)); {
	case id == "" && cfg.ID != "":
		return cfg.ID, writeSynced(path, []byte(cfg.ID+"\n"))
	case id != "" && cfg.ID != "" && cfg.ID != id:
		return "", fmt.Errorf("the folder is that of replica %s, not of %s: name it so, or give %s a folder of its own", id, cfg.ID, cfg.ID)
	case id != "":
		return id, nil
	}
	var b [10]byte
	_, _ = rand.Read(b[:])
	id := "r" + strings.ToLower(base32.StdEncoding.EncodeToString(b[:]))
	if err := writeSynced(path, []byte(id+"\n")); err != nil {
		return "", fmt.Errorf("write own server id: %w", err)
	}
	return id, nil
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
