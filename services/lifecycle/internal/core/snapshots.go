package core

import (
	"fmt"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Bounds of a plan's snapshots.
const (
	// LeastEvery: a disk that is saved more often does nothing else.
	LeastEvery = 5 * time.Second
	// MostEvery: a longer interval than a day is meant as none, which is written 0.
	MostEvery = 24 * time.Hour
	// MostKept is how long any snapshot may be kept.
	MostKept = 10 * 365 * 24 * time.Hour
	// MostSnapshots may be kept of one session at once: every manifest lists
	// them all, and takes 1024.
	MostSnapshots = 1000
)

// Snapshots says how often the disk of an awake session is saved and which of
// its snapshots are kept; see berth.core.v1.Snapshots. In a file a key that is
// left out has the value of DefaultSnapshots.
type Snapshots struct {
	Every      time.Duration `yaml:"every"`
	KeepAll    time.Duration `yaml:"keep_all"`
	KeepHourly time.Duration `yaml:"keep_hourly"`
	KeepDaily  time.Duration `yaml:"keep_daily"`
}

// DefaultSnapshots are those of a plan that says nothing.
func DefaultSnapshots() Snapshots {
	return Snapshots{Every: time.Minute, KeepAll: time.Hour, KeepHourly: 24 * time.Hour, KeepDaily: 30 * 24 * time.Hour}
}

// UnmarshalYAML reads the keys that are there over the defaults.
func (s *Snapshots) UnmarshalYAML(read func(any) error) error {
	type plain Snapshots
	p := plain(DefaultSnapshots())
	if err := read(&p); err != nil {
		return err
	}
	*s = Snapshots(p)
	return nil
}

func (p Plan) snapshots() Snapshots {
	if p.Snapshots == nil {
		return DefaultSnapshots()
	}
	return *p.Snapshots
}

// validate reports the first field that makes no sense.
func (s Snapshots) validate() error {
	switch {
	case s.Every != 0 && s.Every < LeastEvery:
		return fmt.Errorf("snapshots.every is %s; it must be 0 (only checkpoints and sleep) or at least %s", s.Every, LeastEvery)
	case s.Every > MostEvery:
		return fmt.Errorf("snapshots.every is %s; it must be at most %s, or 0 for only checkpoints and sleep", s.Every, MostEvery)
	}
	for _, k := range []struct {
		name string
		keep time.Duration
	}{{"keep_all", s.KeepAll}, {"keep_hourly", s.KeepHourly}, {"keep_daily", s.KeepDaily}} {
		switch {
		case k.keep < 0:
			return fmt.Errorf("snapshots.%s is %s; it must not be negative", k.name, k.keep)
		case k.keep > MostKept:
			return fmt.Errorf("snapshots.%s is %s; it must be at most %s (ten years)", k.name, k.keep, MostKept)
		}
	}
	return s.few()
}

// few refuses rules that keep too many snapshots, and names the one that keeps most.
func (s Snapshots) few() error {
	rules := []struct {
		name string
		n    int64
	}{{"keep_all", 0}, {"keep_hourly", int64(s.KeepHourly / time.Hour)}, {"keep_daily", int64(s.KeepDaily / (24 * time.Hour))}}
	if s.Every > 0 {
		rules[0].n = int64(s.KeepAll / s.Every)
	}
	most, total := rules[0], int64(0)
	for _, r := range rules {
		if total += r.n; r.n > most.n {
			most = r
		}
	}
	if total > MostSnapshots {
		return fmt.Errorf("snapshots.%s keeps %d snapshots of one session; in all at most %d are kept", most.name, most.n, MostSnapshots)
	}
	return nil
}

func (s Snapshots) terms() *corev1.Snapshots {
	return &corev1.Snapshots{Every: durationpb.New(s.Every), KeepAll: durationpb.New(s.KeepAll),
		KeepHourly: durationpb.New(s.KeepHourly), KeepDaily: durationpb.New(s.KeepDaily)}
}
