package hostagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// place is the content of /run/berth/session.json: what this sandbox is right now. The field names
// are stable. Text is for the prompt of an agent.
type place struct {
	Version  int         `json:"version"`
	Session  string      `json:"session"`
	Name     string      `json:"session_name"`
	Tier     string      `json:"tier"`
	Why      string      `json:"tier_reason,omitempty"`
	Template string      `json:"template,omitempty"`
	Image    string      `json:"image,omitempty"`
	Limits   placeLimits `json:"limits"`
	Network  string      `json:"network"`
	Persists string      `json:"persists"`
	Idle     float64     `json:"idle_seconds"`
	Retained float64     `json:"retention_seconds,omitempty"`
	Origin   string      `json:"origin"`
	AsOf     *time.Time  `json:"restored_as_of,omitempty"`
	Since    time.Time   `json:"awake_since"`
	Text     []string    `json:"text"`
}

type placeLimits struct {
	CPUs   float64 `json:"cpus"`
	Memory uint64  `json:"memory_bytes"`
	PIDs   uint32  `json:"processes"`
	Disk   uint64  `json:"disk_bytes"`
}

func tierName(t corev1.Tier) string {
	return strings.ToLower(strings.TrimPrefix(t.String(), "TIER_"))
}

func tierOf(name string) corev1.Tier {
	return corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(name)])
}

func originName(o corev1.Origin) string {
	return strings.ToLower(strings.TrimPrefix(o.String(), "ORIGIN_"))
}

// describe states what a sandbox is.
func describe(session, name string, t *corev1.Terms, image string, o corev1.Origin, asOf, now time.Time) place {
	l := t.GetLimits()
	p := place{
		Version: 1, Session: session, Name: name, Tier: tierName(t.GetTier()), Why: t.GetTierReason(),
		Template: t.GetTemplate(), Image: image, Network: "none", Origin: originName(o), Since: now.UTC(),
		Limits:   placeLimits{float64(l.GetCpuMillis()) / 1000, l.GetMemoryBytes(), l.GetPids(), l.GetDiskBytes()},
		Idle:     t.GetIdle().AsDuration().Seconds(),
		Retained: t.GetRetention().AsDuration().Seconds(),
	}
	if !asOf.IsZero() {
		at := asOf.UTC()
		p.AsOf = &at
	}
	p.Persists = "every file outside /tmp, /run, /proc, /sys and /dev"
	if t.GetPersistence() == corev1.Persistence_PERSISTENCE_EPHEMERAL {
		p.Persists, p.Retained = "nothing", 0
	}
	p.Text = p.sentences(t.GetPersistence())
	return p
}

// What is said of the network.
const (
	noNetwork    = "It has no network: nothing outside can be reached, and packages cannot be downloaded from here."
	namedNetwork = "Only what its egress policy names can be reached; /run/berth/egress.json says what that is and what was last refused."
)

// reaches says that the sandbox has a network: what its policy names.
func (p place) reaches() place {
	p.Network, p.Text = "named", slices.Clone(p.Text)
	for i, s := range p.Text {
		if s == noNetwork {
			p.Text[i] = namedNetwork
		}
	}
	return p
}

func (p place) sentences(persistence corev1.Persistence) []string {
	out := []string{
		fmt.Sprintf("This is a private Linux sandbox of isolation tier %s.", p.Tier),
		fmt.Sprintf("It has %g CPU cores, %s of memory, at most %d processes and a disk of %s.",
			p.Limits.CPUs, size(p.Limits.Memory), p.Limits.PIDs, size(p.Limits.Disk)),
		noNetwork,
	}
	if persistence == corev1.Persistence_PERSISTENCE_EPHEMERAL {
		out = append(out, "Nothing persists: when the session is closed or idle, all its files are gone.")
	} else {
		out = append(out, "Files persist while the session sleeps, also installed packages, except below /tmp and /run; processes do not.")
	}
	if p.Idle > 0 {
		out = append(out, fmt.Sprintf("It sleeps after %s without a running command, and wakes at the next request.",
			time.Duration(p.Idle*float64(time.Second)).Round(time.Second)))
	}
	switch p.Origin {
	case "created":
		out = append(out, "It is new: its home is empty.")
	case "resumed":
		out = append(out, "It was used before: the files of the last time are here.")
	case "restored":
		out = append(out, fmt.Sprintf("It was used before: the files are as they were at %s; what was written later is not here.", p.AsOf.Format(time.RFC3339)))
	}
	return out
}

func size(n uint64) string {
	switch {
	case n >= gib:
		return fmt.Sprintf("%.3g GiB", float64(n)/gib)
	default:
		return fmt.Sprintf("%.3g MiB", float64(n)/(1<<20))
	}
}

func (p place) json() []byte {
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return []byte("{}") // cannot happen: the type holds nothing that JSON lacks
	}
	return append(b, '\n')
}

const placeFile = "session.json"

// makeRunFolder makes the folder that appears as /run/berth. Modes are as given whatever the umask is:
// another user inside must be able to read it.
func makeRunFolder(dir string) error {
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o755)); err != nil {
		return fmt.Errorf("make the sandbox's run folder: %w", err)
	}
	return nil
}

// writePlace puts the text into a run folder in one step, so that a reader inside sees the old or the
// new one whole.
func writePlace(dir string, text []byte) error {
	if err := makeRunFolder(dir); err != nil {
		return err
	}
	return writeInto(dir, placeFile, text)
}

// writeInto replaces a file of a run folder that is there, in one step.
func writeInto(dir, name string, text []byte) error {
	tmp := filepath.Join(dir, "."+name+".new")
	err := os.WriteFile(tmp, text, 0o644)
	if err == nil {
		err = os.Chmod(tmp, 0o644)
	}
	if err == nil {
		err = os.Rename(tmp, filepath.Join(dir, name))
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// placeText is the text for a sandbox that was taken over without one. mu is held.
func (s *session) placeText() []byte {
	var t corev1.Terms
	if err := fromJSON(s.rec.Terms, &t); err != nil {
		s.h.log.Warn("the terms of a session are not known", "session", s.key, "error", err)
	}
	p := describe(string(s.key), s.rec.Name, &t, "", corev1.Origin_ORIGIN_RESUMED, time.Time{}, time.Now())
	if s.h.net.has(driver.Tier(p.Tier)) {
		p = p.reaches()
	}
	return p.json()
}
