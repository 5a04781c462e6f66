// Package scheduler decides where sessions run and is the truth about them:
// state, owner host and epoch of every session, leases of hosts, the order of
// their events. It guarantees that a session has one owner, that epochs only
// grow, that an answered request is on disk, and that every state that is not
// at rest has a deadline with a next step, also after a crash.
//
// Ordering: events of one session are published in order with stable ids.
// Redelivery: after a crash events may be published again; consumers drop a
// revision that is not newer. Backpressure: when too many events wait for the
// bus, opens are refused; sleeps, fencing and deletes never are.
package scheduler

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/internal/certs/spiffe"
	"github.com/berth-dev/berth/services/scheduler/internal/replica"
)

// Peer is one replica of a group of three or five.
type Peer struct {
	ID   string `json:"id" yaml:"id"`
	Addr string `json:"addr" yaml:"addr"`
}

// Config of the scheduler; NewConfig gives the defaults.
type Config struct {
	// Dir holds the state, in the folder raft below it.
	Dir string `json:"dir" yaml:"dir"`
	// ReplicaID, Bind and Peers are for a group; leave them empty for one replica.
	ReplicaID string `json:"replica_id" yaml:"replica_id"`
	Bind      string `json:"bind" yaml:"bind"`
	Peers     []Peer `json:"peers" yaml:"peers"`
	// Advertise is where the others reach this one, if that is not Bind.
	Advertise string `json:"advertise" yaml:"advertise"`
	// Join: this replica is new in a group that has begun; it waits until it is
	// added with add_peer.
	Join bool `json:"join" yaml:"join"`
	// TLSCert, TLSKey and TLSCA are PEM files for mutual TLS between replicas; needed with Bind. They
	// are read again when they change.
	// SPIFFE is the address of an agent whose certificates are used instead.
	SPIFFE  string `json:"spiffe" yaml:"spiffe"`
	TLSCert string `json:"tls_cert" yaml:"tls_cert"`
	TLSKey  string `json:"tls_key" yaml:"tls_key"`
	TLSCA   string `json:"tls_ca" yaml:"tls_ca"`

	// Lease is how long a host may act without hearing from the scheduler.
	Lease time.Duration `json:"lease" yaml:"lease"`
	// LeaseDrift is added before a lease is taken as run out.
	LeaseDrift time.Duration `json:"lease_drift" yaml:"lease_drift"`
	// WakeTimeout, SleepTimeout and DeleteTimeout bound one try at a host.
	WakeTimeout   time.Duration `json:"wake_timeout" yaml:"wake_timeout"`
	SleepTimeout  time.Duration `json:"sleep_timeout" yaml:"sleep_timeout"`
	DeleteTimeout time.Duration `json:"delete_timeout" yaml:"delete_timeout"`
	// WakeTries is how many epochs one wake may use up.
	WakeTries int `json:"wake_tries" yaml:"wake_tries"`
	// RetryMin and RetryMax bound the back-off between tries.
	RetryMin time.Duration `json:"retry_min" yaml:"retry_min"`
	RetryMax time.Duration `json:"retry_max" yaml:"retry_max"`
	// OpenDeadline holds for an open that names none.
	OpenDeadline time.Duration `json:"open_deadline" yaml:"open_deadline"`
	// CPUPercent, PIDsPercent and DiskPercent are how much of a host's cores, process
	// numbers and disk may be promised; memory never exceeds what there is.
	CPUPercent  uint32 `json:"cpu_percent" yaml:"cpu_percent"`
	PIDsPercent uint32 `json:"pids_percent" yaml:"pids_percent"`
	DiskPercent uint32 `json:"disk_percent" yaml:"disk_percent"`
	// HandoffParallel sessions of lost and drained hosts wake elsewhere at once, at
	// most, and HandoffRate a second begin to; HandoffFor is how long that is tried.
	HandoffParallel int           `json:"handoff_parallel" yaml:"handoff_parallel"`
	HandoffRate     int           `json:"handoff_rate" yaml:"handoff_rate"`
	HandoffFor      time.Duration `json:"handoff_for" yaml:"handoff_for"`
	// ExpireNotice of leader time must lie between the warning and the end of retention.
	ExpireNotice time.Duration `json:"expire_notice" yaml:"expire_notice"`
	// ExpirePerHour ends stop and alarm above this rate.
	ExpirePerHour int `json:"expire_per_hour" yaml:"expire_per_hour"`
	// TrimAfter is how long an event stays in the outbox after its stream took it;
	// at least twice the stream's sync interval.
	TrimAfter time.Duration `json:"trim_after" yaml:"trim_after"`
	// HungAfter ends the process when a write to the log takes longer. Zero: 3 s in a group, where
	// another replica must lead before the leases of hosts run out, and 15 s alone.
	HungAfter time.Duration `json:"hung_after" yaml:"hung_after"`
	// Restored must be set once when Dir comes from a backup: it raises the incarnation.
	Restored bool `json:"restored" yaml:"restored"`

	Log *slog.Logger `json:"-" yaml:"-"`
	// Ready, if set, is called each time this replica leads and serves.
	Ready func() `json:"-" yaml:"-"`
	// Fatal must end the process; the default logs and exits with 70.
	Fatal func(error) `json:"-" yaml:"-"`

	pool   poolTimes
	times  times
	onLead func(*leader) // of tests
}

// NewConfig returns the defaults for a state folder.
func NewConfig(dir string) Config {
	return Config{
		Dir:             dir,
		Lease:           9 * time.Second,
		LeaseDrift:      time.Second,
		WakeTimeout:     60 * time.Second,
		SleepTimeout:    2 * time.Minute,
		DeleteTimeout:   time.Minute,
		WakeTries:       3,
		RetryMin:        100 * time.Millisecond,
		RetryMax:        30 * time.Second,
		OpenDeadline:    60 * time.Second,
		CPUPercent:      400,
		PIDsPercent:     400,
		DiskPercent:     1000,
		HandoffParallel: 8,
		HandoffRate:     20,
		HandoffFor:      10 * time.Minute,
		ExpireNotice:    72 * time.Hour,
		ExpirePerHour:   100,
		TrimAfter:       2 * bus.SyncInterval,
		pool:            newPoolTimes(),
		times: times{answerWithin: 5 * time.Second, drainLook: time.Second, drainIdle: 5 * time.Second,
			deafAfter: 700 * time.Millisecond, newLeadership: 3 * time.Second},
	}
}

// times are intervals that only tests change.
type times struct {
	// answerWithin bounds the wait for one answer of a host. The answer may have been lost with the host's
	// connection, which no error reports: callBoot then sends the request again, and the host joins the
	// work under way or returns its outcome.
	answerWithin time.Duration
	// drainLook is how often the drain loop checks a draining host.
	drainLook time.Duration
	// drainIdle is how long an awake session must be idle before a drain puts it to sleep.
	drainIdle time.Duration
	// deafAfter is longer than a connection needs to reach another node of the bus, and short enough for a
	// host to hear from the next leader within its lease.
	deafAfter time.Duration
	// newLeadership is the age below which a leader takes a transfer without a target as the one that made
	// it leader: callers send again after a leader gave no answer.
	newLeadership time.Duration
}

// Validate says in one sentence what is wrong.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return fmt.Errorf("scheduler: no state folder is configured")
	case c.Lease < time.Second:
		return fmt.Errorf("scheduler: lease is %s, at least 1s is needed", c.Lease)
	case c.WakeTries < 1:
		return fmt.Errorf("scheduler: wake_tries is %d, at least 1 is needed", c.WakeTries)
	case c.RetryMin <= 0 || c.RetryMax < c.RetryMin:
		return fmt.Errorf("scheduler: retry_min %s and retry_max %s are no back-off", c.RetryMin, c.RetryMax)
	case c.WakeTimeout <= 0 || c.SleepTimeout <= 0 || c.DeleteTimeout <= 0 || c.OpenDeadline <= 0:
		return fmt.Errorf("scheduler: time-outs must be above zero")
	case c.HandoffParallel < 1 || c.HandoffRate < 1 || c.HandoffFor <= 0:
		return fmt.Errorf("scheduler: handoff_parallel %d, handoff_rate %d and handoff_for %s must be above zero", c.HandoffParallel, c.HandoffRate, c.HandoffFor)
	case c.Join && c.Bind == "":
		return fmt.Errorf("scheduler: join is set, but without bind there is no group to join")
	case c.Bind != "" && c.SPIFFE == "" && (c.TLSCert == "" || c.TLSKey == "" || c.TLSCA == ""):
		return fmt.Errorf("scheduler: bind is set, but replicas talk over mutual TLS only; tls_cert, tls_key and tls_ca are needed, or spiffe")
	}
	return nil
}

func (c Config) replica() (replica.Config, error) {
	out := replica.Config{Dir: filepath.Join(c.Dir, "raft"), Log: c.Log, Bind: c.Bind, Advertise: c.Advertise, ID: c.ReplicaID, Join: c.Join,
		HungAfter: c.HungAfter, Fatal: c.Fatal}
	if c.Bind != "" {
		var err error
		if out.TLS, err = c.tls(); err != nil {
			return out, err
		}
	}
	for _, p := range c.Peers {
		out.Peers = append(out.Peers, replica.Peer{ID: p.ID, Addr: p.Addr})
	}
	return out, nil
}

// tls has both sides of a connection between replicas show a certificate. The
// files are read again when they change; who a certificate names is judged by
// the replica.
func (c Config) tls() (*tls.Config, error) {
	if c.SPIFFE != "" {
		src, err := spiffe.Open(context.Background(), c.SPIFFE)
		if err != nil {
			return nil, err
		}
		return certs.Mutual(src), nil // as long as the process lives
	}
	src, err := certs.OpenFiles(c.TLSCert, c.TLSKey, c.TLSCA, c.Log)
	if err != nil {
		return nil, fmt.Errorf("read the replica's certificates: %w", err)
	}
	return certs.Mutual(src), nil
}
