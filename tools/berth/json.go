package main

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
)

// The shapes below are what --json prints. They are documented in
// docs/howto/cli-json.md and held by goldens: fields are added, never changed
// or removed. Times are RFC 3339, durations milliseconds, sizes bytes.

type openOut struct {
	Session      string     `json:"session"`
	Name         string     `json:"name"`
	Generation   string     `json:"generation"`
	Epoch        string     `json:"epoch"`
	Host         string     `json:"host"`
	Origin       string     `json:"origin"`
	RestoredAsOf *time.Time `json:"restored_as_of,omitempty"`
	Place        placeOut   `json:"place"`
	Timing       timingOut  `json:"timing"`
}

type placeOut struct {
	Tier        string    `json:"tier"`
	Template    string    `json:"template"`
	Limits      limitsOut `json:"limits"`
	Persists    string    `json:"persists"`
	IdleMS      float64   `json:"idle_ms"`
	Network     string    `json:"network"`
	ImageDigest string    `json:"image_digest"`
}

type limitsOut struct {
	CPUMillis   uint32 `json:"cpu_millis"`
	MemoryBytes uint64 `json:"memory_bytes"`
	PIDs        uint32 `json:"pids"`
	DiskBytes   uint64 `json:"disk_bytes"`
}

type timingOut struct {
	TotalMS float64   `json:"total_ms"`
	Steps   []stepOut `json:"steps"`
}

type stepOut struct {
	Name    string  `json:"name"`
	StartMS float64 `json:"start_ms"`
	TookMS  float64 `json:"took_ms"`
}

type sessionOut struct {
	Session     string    `json:"session"`
	Name        string    `json:"name"`
	Tenant      string    `json:"tenant"`
	User        string    `json:"user,omitempty"`
	State       string    `json:"state"`
	Host        string    `json:"host,omitempty"`
	Template    string    `json:"template"`
	Tier        string    `json:"tier"`
	Persistence string    `json:"persistence"`
	Generation  string    `json:"generation"`
	Epoch       string    `json:"epoch,omitempty"`
	ChangedAt   time.Time `json:"changed_at"`
	Unsaved     bool      `json:"unsaved,omitempty"`
	NewestHost  string    `json:"newest_host,omitempty"`
	Waiting     string    `json:"waiting,omitempty"`
	HandoffFrom string    `json:"handoff_from,omitempty"`
}

type listOut struct {
	Sessions []sessionOut `json:"sessions"`
}

type showOut struct {
	sessionOut
	Issuer      string    `json:"issuer"`
	Frontend    string    `json:"frontend"`
	Plan        string    `json:"plan"`
	TierReason  string    `json:"tier_reason"`
	Limits      limitsOut `json:"limits"`
	IdleMS      float64   `json:"idle_ms"`
	RetentionMS float64   `json:"retention_ms"`
	Revision    uint64    `json:"revision"`
	Manifest    string    `json:"manifest,omitempty"`
	Restore     string    `json:"restore,omitempty"`
	Origin      string    `json:"origin,omitempty"`
	// RestoredAsOf if the last wake restored an older disk.
	RestoredAsOf *time.Time         `json:"restored_as_of,omitempty"`
	Snapshots    *termsSnapshotsOut `json:"snapshots,omitempty"`
	CreatedAt    time.Time          `json:"created_at"`
	Failure      *failureOut        `json:"failure,omitempty"`
	LastWake     timingOut          `json:"last_wake"`
	HandoffUntil *time.Time         `json:"handoff_until,omitempty"`
	Priority     uint32             `json:"priority"`
	Zones        []string           `json:"zones"`
	MaxAwake     uint32             `json:"max_awake"`
}

type failureOut struct {
	Kind   string `json:"kind"`
	Reason string `json:"reason"`
}

type eventOut struct {
	Time      time.Time       `json:"time"`
	Host      string          `json:"host,omitempty"`
	Pool      string          `json:"pool,omitempty"`
	Tenant    string          `json:"tenant"`
	Session   string          `json:"session"`
	Event     string          `json:"event"`
	Revision  uint64          `json:"revision,omitempty"`
	State     string          `json:"state,omitempty"`
	RequestID string          `json:"request_id,omitempty"`
	Body      json.RawMessage `json:"body,omitempty"`
}

type deadListOut struct {
	Messages []deadOut `json:"messages"`
}

type deadOut struct {
	Sequence   uint64              `json:"sequence"`
	Service    string              `json:"service"`
	Consumer   string              `json:"consumer"`
	Reason     string              `json:"reason"`
	Subject    string              `json:"subject"`
	Deliveries int                 `json:"deliveries"`
	Stored     time.Time           `json:"stored"`
	Died       time.Time           `json:"died"`
	Header     map[string][]string `json:"header,omitempty"`
	Body       []byte              `json:"body,omitempty"` // base64
}

type copyOut struct {
	Files   int      `json:"files"`
	Dirs    int      `json:"dirs"`
	Bytes   int64    `json:"bytes"`
	Skipped []string `json:"skipped"`
}

type tokenOut struct {
	Token   string    `json:"token"`
	Tenant  string    `json:"tenant"`
	User    string    `json:"user"`
	Expires time.Time `json:"expires"`
}

type submittedOut struct {
	RequestID string `json:"request_id"`
}

type doneOut struct {
	Name string `json:"name"`
	Done string `json:"done"`
}

type retriedOut struct {
	Sequence uint64 `json:"sequence"`
	Retried  bool   `json:"retried"`
}

type sealOut struct {
	Subject   string          `json:"subject"`
	Queue     string          `json:"queue,omitempty"`
	Body      json.RawMessage `json:"body"`
	RequestID string          `json:"request_id"`
}

type keysOut struct {
	RequestID string `json:"request_id"`
	ReplySeed string `json:"reply_seed"`
	ProofSeed string `json:"proof_seed"`
}

type versionOut struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
}

// print writes v as JSON, or calls human.
func (a *app) print(v any, human func()) error {
	if !a.json {
		human()
		return nil
	}
	enc := json.NewEncoder(a.stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func openOutOf(s *sdk.Session) openOut {
	p := s.Place()
	out := openOut{Session: s.Key(), Name: s.Name(), Generation: s.Generation(), Epoch: s.Epoch(), Host: s.Host(), Origin: string(s.Origin()),
		Place: placeOut{Tier: string(p.Tier), Template: p.Template, Limits: limitsOut(p.Limits), Persists: p.Persists,
			IdleMS: ms(p.Idle), Network: p.Network, ImageDigest: p.ImageDigest},
		Timing: timingOut{TotalMS: ms(s.Timing().Total), Steps: []stepOut{}}}
	if at := s.RestoredAsOf(); !at.IsZero() {
		out.RestoredAsOf = &at
	}
	for _, st := range s.Timing().Steps {
		out.Timing.Steps = append(out.Timing.Steps, stepOut{st.Name, ms(st.Start), ms(st.Took)})
	}
	return out
}

func statusOut(tenant string, s sdk.Status) sessionOut {
	return sessionOut{Session: s.Key, Name: s.Name, Tenant: tenant, State: string(s.State), Template: s.Template, Tier: string(s.Tier),
		Persistence: string(s.Persistence), Generation: s.Generation, Epoch: s.Epoch, ChangedAt: s.ChangedAt}
}

func recordOut(r *schedulerv1.SessionRecord) sessionOut {
	t := r.GetTerms()
	return sessionOut{Session: r.GetSession().GetSession(), Name: r.GetSessionName(), Tenant: r.GetSession().GetTenant(), User: r.GetActor().GetSubject(),
		State: stateWord(r.GetState()), Host: r.GetHost(), Template: t.GetTemplate(), Tier: word(t.GetTier(), "TIER_"),
		Persistence: word(t.GetPersistence(), "PERSISTENCE_"), Generation: stamp(r.GetSession().GetGeneration()),
		Epoch: stamp(r.GetSession().GetEpoch()), ChangedAt: r.GetChangedAt().AsTime(), Unsaved: r.GetUnsaved(),
		NewestHost: r.GetNewestHost(), Waiting: r.GetWaiting(), HandoffFrom: r.GetHandoffFrom()}
}

func showOutOf(r *schedulerv1.SessionRecord) showOut {
	t := r.GetTerms()
	out := showOut{sessionOut: recordOut(r), Issuer: r.GetActor().GetIssuer(), Frontend: r.GetActor().GetFrontend(), Plan: t.GetPlan(),
		TierReason: t.GetTierReason(), Limits: limitsOutOf(t.GetLimits()), IdleMS: ms(t.GetIdle().AsDuration()),
		RetentionMS: ms(t.GetRetention().AsDuration()), Revision: r.GetRevision(), Manifest: r.GetManifest(),
		Restore: r.GetRestore(), Priority: t.GetPriority(), Zones: append([]string{}, t.GetZones()...), MaxAwake: t.GetMaxAwake(),
		Origin: word(r.GetOrigin(), "ORIGIN_"), CreatedAt: r.GetCreatedAt().AsTime(), LastWake: timingOutOf(r.GetLastWake())}
	if at := r.GetRestoredAsOf(); at != nil {
		asOf := at.AsTime()
		out.RestoredAsOf = &asOf
	}
	if until := r.GetHandoffUntil(); until.GetSeconds() > 0 {
		at := until.AsTime()
		out.HandoffUntil = &at
	}
	if s := t.GetSnapshots(); s != nil {
		out.Snapshots = &termsSnapshotsOut{ms(s.GetEvery().AsDuration()), ms(s.GetKeepAll().AsDuration()), ms(s.GetKeepHourly().AsDuration()), ms(s.GetKeepDaily().AsDuration())}
	}
	if f := r.GetFailure(); f != nil {
		out.Failure = &failureOut{f.GetKind(), f.GetReason()}
	}
	return out
}

func timingOutOf(t *corev1.Timing) timingOut {
	out := timingOut{TotalMS: ms(t.GetTotal().AsDuration()), Steps: []stepOut{}}
	for _, s := range t.GetSteps() {
		out.Steps = append(out.Steps, stepOut{s.GetName(), ms(s.GetStart().AsDuration()), ms(s.GetTook().AsDuration())})
	}
	return out
}

func limitsOutOf(l *corev1.Limits) limitsOut {
	return limitsOut{l.GetCpuMillis(), l.GetMemoryBytes(), l.GetPids(), l.GetDiskBytes()}
}

func deadOutOf(d bus.DeadLetter) deadOut {
	return deadOut{Sequence: d.Sequence, Service: d.Service, Consumer: d.Consumer, Reason: d.Reason, Subject: d.Subject,
		Deliveries: d.Deliveries, Stored: d.Stored, Died: d.Died}
}

func stamp(s *corev1.Stamp) string {
	if s == nil {
		return ""
	}
	return strconv.FormatUint(uint64(s.GetIncarnation()), 10) + "-" + strconv.FormatUint(s.GetIndex(), 10)
}

// lowerWord turns the name of an enum of the wire into its word.
func lowerWord(name, prefix string) string {
	w := strings.ToLower(strings.TrimPrefix(name, prefix))
	if w == "unspecified" {
		return ""
	}
	return w
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}
