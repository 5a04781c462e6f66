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
	// MostAll bounds how many snapshots keep_all may keep at once: a manifest
	// lists them all.
	MostAll = 10_000
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
	if s.Every > 0 && s.KeepAll/s.Every > MostAll {
		return fmt.Errorf("snapshots.keep_all is %s, which keeps more than %d snapshots when one is taken every %s", s.KeepAll, MostAll, s.Every)
	}
	return nil
}

func (s Snapshots) terms() *corev1.Snapshots {
	return &corev1.Snapshots{Every: durationpb.New(s.Every), KeepAll: durationpb.New(s.KeepAll),
		KeepHourly: durationpb.New(s.KeepHourly), KeepDaily: durationpb.New(s.KeepDaily)}
}
