package driver

import (
	"path/filepath"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// The smallest limits that a sandbox can run with, and the longest host name.
const (
	MinMemory   = 32 << 20
	MinPIDs     = 16
	MinCPU      = 10
	maxHostname = 63
)

// Check refuses a spec that no driver with these tiers can honour; it is never weakened.
func (s Spec) Check(tiers map[Tier]Capabilities) error {
	const op = "create sandbox"
	bad := func(why string) error { return errs.E(op, errkind.Invalid, s.ID().String(), why) }
	if _, err := ids.ParseSessionKey(string(s.Session)); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	if s.Generation.IsZero() || s.Epoch.IsZero() {
		return bad("generation and epoch must be given")
	}
	c, known := tiers[s.Tier]
	if !known || c.Absent != "" {
		return errs.Errorf(op, errkind.Unimplemented, "this host has no tier %.32q%s", s.Tier, because(c.Absent))
	}
	if s.Limits.MemoryBytes < MinMemory || s.Limits.PIDs < MinPIDs || s.Limits.CPUMillis < MinCPU {
		return errs.Errorf(op, errkind.Invalid, "limits are too small: at least %d bytes of memory, %d processes and %d/1000 of a core are needed",
			uint64(MinMemory), MinPIDs, MinCPU)
	}
	if len(s.Hostname) > maxHostname || strings.ContainsFunc(s.Hostname, notHost) {
		return errs.Errorf(op, errkind.Invalid, "%.64q is no host name", s.Hostname)
	}
	for _, e := range s.Env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || strings.ContainsRune(e, 0) {
			return errs.Errorf(op, errkind.Invalid, "%.64q is no environment variable", e)
		}
	}
	if !c.Disk {
		return nil
	}
	disk, image := s.Disk, s.Image.Lower
	if c.RawDisk {
		disk, image = s.DiskImage, s.Image.Block
	}
	for _, p := range []string{disk, s.RunDir, image} {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return errs.Errorf(op, errkind.Invalid, "%.256q is no absolute path", p)
		}
	}
	if s.Guest == "" && len(s.Init) == 0 {
		return bad("neither a guest agent nor a program is given")
	}
	return nil
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

func notHost(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-')
}
