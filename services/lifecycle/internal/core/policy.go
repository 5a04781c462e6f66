// Package core decides when a session may be awake and under what terms. It
// guarantees that a decision depends on its arguments alone: the same policy,
// event and time give the same commands, so a crash between two of them heals
// by asking again. It has no clock, no randomness and no I/O.
package core

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Bounds of what a request may ask for.
const (
	DefaultWait = 60 * time.Second
	MaxWait     = 10 * time.Minute
	// Warning is how long before its end a session's retention is announced.
	Warning = 72 * time.Hour
	// ExpireMargin after the announced end scheduler is asked for it: its own time may lag a minute.
	ExpireMargin = 2 * time.Minute
	// ExpireRetry is when an end is asked for again that scheduler finds too early, or one too many.
	ExpireRetry = time.Hour
)

// Bounds of what a plan says of placement.
const (
	MaxPriority = 100
	// MaxZones of one plan: every session's record carries them.
	MaxZones = 16
)

// Bounds of the limits that may be left out: with less a sandbox does not start in a time that anybody waits.
const (
	minDiskRate  = 1 << 20
	minDiskOps   = 50
	minOpenFiles = 256
	maxOpenFiles = 1 << 20
)

// Sizes of disks in bytes, as hosts make them.
const (
	minDisk  = 16 << 20
	maxDisk  = 16 << 40
	diskUnit = 4096
)

// Limits of one sandbox; see berth.core.v1.Limits for the units.
type Limits struct {
	CPUMillis   uint32 `yaml:"cpu_millis"`
	MemoryBytes uint64 `yaml:"memory_bytes"`
	Pids        uint32 `yaml:"pids"`
	DiskBytes   uint64 `yaml:"disk_bytes"`
	// DiskBytesPerSecond and DiskOpsPerSecond count reads and writes together; zero: no limit of its own.
	DiskBytesPerSecond uint64 `yaml:"disk_bytes_per_second"`
	DiskOpsPerSecond   uint64 `yaml:"disk_ops_per_second"`
	// OpenFiles of one process; zero: the host's default.
	OpenFiles uint64 `yaml:"open_files"`
}

// Template is what a session is made of.
type Template struct {
	// Image is a reference that the host resolves: an OCI layout or archive, or a registry's name.
	Image string `yaml:"image"`
	// Tier is the template's isolation tier; a stronger one may be chosen, never a weaker one.
	Tier string `yaml:"tier"`
	// Limits are capped by the plan's.
	Limits Limits `yaml:"limits"`
}

// Plan is what a tenant or a user may have.
type Plan struct {
	// Template is used when the request names none.
	Template string `yaml:"template"`
	// Templates that may be named; empty means all.
	Templates []string `yaml:"templates"`
	// Idle is how long a session stays awake without activity.
	Idle time.Duration `yaml:"idle"`
	// Retention is how long a sleeping session is kept.
	Retention time.Duration `yaml:"retention"`
	// Limits are the most that one sandbox may have; zero means no cap.
	Limits Limits `yaml:"limits"`
	// Snapshots of the disk; nil means DefaultSnapshots.
	Snapshots *Snapshots `yaml:"snapshots"`
	// Priority says who comes first when there is not room for all at once: 0 to MaxPriority, higher is sooner.
	Priority uint32 `yaml:"priority"`
	// Zones in which sessions may run; empty means any.
	Zones []string `yaml:"zones"`
	// MaxAwake sessions of one tenant may be awake on this plan at once; zero means as many as there is room for.
	MaxAwake uint32 `yaml:"max_awake"`
	// Paused, when not empty, refuses every open with this reason.
	Paused string `yaml:"paused"`
}

// Policy is all that opens are judged by.
type Policy struct {
	Plans     map[string]Plan     `yaml:"plans"`
	Templates map[string]Template `yaml:"templates"`
	// Tiers that this installation allows, for example [container, gvisor]; which of them there are is
	// known from the hosts.
	Tiers []string `yaml:"tiers"`
	// Rules choose among them by risk; nil: everything counts as risky as can be.
	Rules TierRules `yaml:"-"`
}

// Validate reports the first thing that makes the policy unusable.
func (p Policy) Validate() error {
	if len(p.Tiers) == 0 {
		return fmt.Errorf("tiers names no isolation tier")
	}
	for _, name := range p.Tiers {
		if _, err := ParseTier(name); err != nil {
			return err
		}
	}
	for name, t := range p.Templates {
		if t.Image == "" {
			return fmt.Errorf("template %q names no image", name)
		}
		if _, err := ParseTier(t.Tier); err != nil {
			return fmt.Errorf("template %q: %w", name, err)
		}
		if l := t.Limits; l.CPUMillis == 0 || l.MemoryBytes == 0 || l.Pids == 0 || l.DiskBytes == 0 {
			return fmt.Errorf("template %q must set every limit", name)
		}
		if d := t.Limits.DiskBytes; d < minDisk || d > maxDisk || d%diskUnit != 0 {
			return fmt.Errorf("template %q: disk_bytes is %d; a disk has 16 MiB to 16 TiB, in steps of 4 KiB", name, d)
		}
		if err := t.Limits.optional(); err != nil {
			return fmt.Errorf("template %q: %w", name, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.Plans)) {
		if err := p.validatePlan(p.Plans[name]); err != nil {
			return fmt.Errorf("plan %q: %w", name, err)
		}
	}
	return nil
}

func (p Policy) validatePlan(plan Plan) error {
	if plan.Idle < time.Second {
		return fmt.Errorf("idle is %s; it must be at least 1 s", plan.Idle)
	}
	if plan.Retention < time.Hour {
		return fmt.Errorf("retention is %s; it must be at least 1 h", plan.Retention)
	}
	for _, t := range append([]string{plan.Template}, plan.Templates...) {
		if _, ok := p.Templates[t]; !ok {
			return fmt.Errorf("template %q is not declared", t)
		}
	}
	if err := plan.placement(); err != nil {
		return err
	}
	if err := plan.Limits.optional(); err != nil {
		return fmt.Errorf("limits: %w", err)
	}
	return plan.snapshots().validate()
}

// optional reports the first limit of those that may be left out that nothing could run with.
func (l Limits) optional() error {
	switch {
	case l.DiskBytesPerSecond != 0 && l.DiskBytesPerSecond < minDiskRate:
		return fmt.Errorf("disk_bytes_per_second is %d; it must be 0 (none) or at least %d", l.DiskBytesPerSecond, minDiskRate)
	case l.DiskOpsPerSecond != 0 && l.DiskOpsPerSecond < minDiskOps:
		return fmt.Errorf("disk_ops_per_second is %d; it must be 0 (none) or at least %d", l.DiskOpsPerSecond, minDiskOps)
	case l.OpenFiles != 0 && (l.OpenFiles < minOpenFiles || l.OpenFiles > maxOpenFiles):
		return fmt.Errorf("open_files is %d; it must be 0 (the host's default) or %d to %d", l.OpenFiles, minOpenFiles, maxOpenFiles)
	}
	return nil
}

// placement reports the first thing that placement cannot use.
func (p Plan) placement() error {
	if p.Priority > MaxPriority {
		return fmt.Errorf("priority is %d; it must be 0 to %d", p.Priority, MaxPriority)
	}
	if len(p.Zones) > MaxZones {
		return fmt.Errorf("zones lists %d zones; it must be at most %d, or empty for any", len(p.Zones), MaxZones)
	}
	for i, z := range p.Zones {
		if !ids.IsToken(z) {
			return fmt.Errorf("zones: %.80q is no zone; a zone has 1 to 63 characters of a-z, 0-9, _ and -", z)
		}
		if slices.Contains(p.Zones[:i], z) {
			return fmt.Errorf("zones: %s is there twice", z)
		}
	}
	return nil
}

// ParseTier reads a tier's name, for example "gvisor".
func ParseTier(name string) (corev1.Tier, error) {
	v, ok := corev1.Tier_value["TIER_"+strings.ToUpper(name)]
	if !ok || v == 0 {
		return 0, fmt.Errorf("isolation tier %q is not known", name)
	}
	return corev1.Tier(v), nil
}

// TierName is the inverse of ParseTier.
func TierName(t corev1.Tier) string {
	return strings.ToLower(strings.TrimPrefix(t.String(), "TIER_"))
}

// Terms fixes what a request may have, and says why in this isolation tier; or
// says in one sentence why it may not. The decision is there whenever a tier was
// looked for.
func (p Policy) Terms(v *lifecyclev1.Verified, ask *identityv1.OpenRequest, fleet Fleet) (*corev1.Terms, *corev1.TierDecision, error) {
	plan, ok := p.Plans[v.GetPlan()]
	if !ok {
		return nil, nil, fmt.Errorf("plan %q is not declared", v.GetPlan())
	}
	if plan.Paused != "" {
		return nil, nil, fmt.Errorf("new work is paused for this plan: %s", plan.Paused)
	}
	name := ask.GetTemplate()
	if name == "" {
		name = plan.Template
	}
	template, ok := p.Templates[name]
	if !ok {
		return nil, nil, fmt.Errorf("there is no template %q", name)
	}
	if len(plan.Templates) > 0 && name != plan.Template && !slices.Contains(plan.Templates, name) {
		return nil, nil, fmt.Errorf("plan %q does not include template %q", v.GetPlan(), name)
	}
	persistence := ask.GetPersistence()
	if persistence == corev1.Persistence_PERSISTENCE_UNSPECIFIED {
		persistence = corev1.Persistence_PERSISTENCE_DURABLE
	}
	decision, why, err := p.chooseTier(name, template, persistence, v, ask, fleet)
	if err != nil {
		return nil, decision, err
	}
	return &corev1.Terms{
		Plan: v.GetPlan(), Template: name, Tier: decision.GetChosen(), TierReason: why, Image: template.Image,
		Limits: capped(template.Limits, plan.Limits), Persistence: persistence,
		Idle: durationpb.New(plan.Idle), Retention: durationpb.New(plan.Retention),
		Snapshots: plan.snapshots().terms(),
		Priority:  plan.Priority, Zones: slices.Clone(plan.Zones), MaxAwake: plan.MaxAwake,
	}, decision, nil
}

func (p Policy) chooseTier(name string, t Template, persistence corev1.Persistence, v *lifecyclev1.Verified, ask *identityv1.OpenRequest,
	fleet Fleet) (*corev1.TierDecision, string, error) {
	tier, err := ParseTier(t.Tier)
	if err != nil {
		return nil, "", err
	}
	a := TierAsk{Risk: ask.GetRisk(), MinTier: ask.GetMinTier(), Template: name, TemplateTier: tier, TemplateNamed: ask.GetTemplate() != "", Persistence: persistence,
		Tenant: v.GetActor().GetTenant(), Plan: v.GetPlan(), Floor: v.GetTenantFloor(), Fleet: fleet}
	for _, allowed := range p.Tiers {
		if t, err := ParseTier(allowed); err == nil {
			a.Tiers = append(a.Tiers, t)
		}
	}
	return ChooseTier(p.Rules, a)
}

func capped(l, most Limits) *corev1.Limits {
	return &corev1.Limits{
		CpuMillis:   uint32(lower(uint64(l.CPUMillis), uint64(most.CPUMillis))),
		MemoryBytes: lower(l.MemoryBytes, most.MemoryBytes),
		Pids:        uint32(lower(uint64(l.Pids), uint64(most.Pids))),
		DiskBytes:   lower(l.DiskBytes, most.DiskBytes),

		DiskBytesPerSecond: lowerOf(l.DiskBytesPerSecond, most.DiskBytesPerSecond),
		DiskOpsPerSecond:   lowerOf(l.DiskOpsPerSecond, most.DiskOpsPerSecond),
		OpenFiles:          lowerOf(l.OpenFiles, most.OpenFiles),
	}
}

// lowerOf is lower for a limit that may be left out: then the plan's own counts.
func lowerOf(have, most uint64) uint64 {
	if have == 0 {
		return most
	}
	return lower(have, most)
}

func lower(have, most uint64) uint64 {
	if most != 0 && most < have {
		return most
	}
	return have
}
