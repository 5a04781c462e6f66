package driver

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// The smallest limits that a sandbox can run with, the largest that mean anything to a kernel, and the
// longest words.
const (
	MinMemory = 32 << 20
	MinPIDs   = 16
	MinCPU    = 10
	MinFiles  = 64
	MaxMemory = 1 << 46
	MaxPIDs   = 1 << 22
	MaxCPU    = 1 << 20
	MaxFiles  = 1 << 20

	maxHostname = 63
	maxVariable = 128<<10 - 1
	maxWords    = 1 << 20
	maxPath     = 4095
	maxName     = 255
	maxOver     = 64
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
	if err := s.Limits.Check(); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	if err := s.words(); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	if err := s.network(c); err != nil {
		return err
	}
	if !c.Disk {
		return nil
	}
	disk, image := s.Disk, s.Image.Lower
	if c.RawDisk {
		disk, image = s.DiskImage, s.Image.Block
	}
	for _, p := range []string{disk, s.RunDir, image} {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || len(p) > maxPath || strings.ContainsFunc(p, notPath) {
			return errs.Errorf(op, errkind.Invalid, "%.256q is no absolute path", p)
		}
	}
	if s.Guest == "" && len(s.Init) == 0 {
		return bad("neither a guest agent nor a program is given")
	}
	return nil
}

// Check refuses a warm spec that no driver with these tiers can honour. Its paths are those of every
// session that it can be claimed for; the disk comes with the claim.
func (w WarmSpec) Check(tiers map[Tier]Capabilities) error {
	const op = "prepare sandbox"
	if _, err := ids.ParseSandboxID(string(w.ID)); err != nil || !w.ID.IsWarm() {
		return errs.Errorf(op, errkind.Invalid, "%.64q is no name of a warm sandbox", w.ID)
	}
	if c, ok := tiers[w.Tier]; ok && c.Absent == "" && !c.Warm {
		return errs.Errorf(op, errkind.Unimplemented, "sandboxes of tier %s cannot be prepared", w.Tier)
	}
	one := ids.Epoch{Incarnation: 1, Index: 1}
	s := w.Spec(ids.DeriveSessionKey(nil, "", "", "", ""), ids.Generation(one), one)
	s.Disk, s.DiskImage = "/", "/"
	return s.Check(tiers)
}

// Check refuses limits that no sandbox can run with, or that are no limits.
func (l Limits) Check() error {
	switch {
	case l.MemoryBytes < MinMemory || l.PIDs < MinPIDs || l.CPUMillis < MinCPU:
		return fmt.Errorf("limits are too small: at least %d bytes of memory, %d processes and %d/1000 of a core are needed",
			uint64(MinMemory), MinPIDs, MinCPU)
	case l.MemoryBytes > MaxMemory || l.PIDs > MaxPIDs || l.CPUMillis > MaxCPU:
		return fmt.Errorf("limits are too large: at most %d bytes of memory, %d processes and %d/1000 of a core mean anything",
			uint64(MaxMemory), MaxPIDs, MaxCPU)
	case l.OpenFiles != 0 && (l.OpenFiles < MinFiles || l.OpenFiles > MaxFiles):
		return fmt.Errorf("a process may have %d to %d open files", MinFiles, MaxFiles)
	}
	return nil
}

// words checks what is written into files and argument lists of the host.
func (s Spec) words() error {
	if len(s.Hostname) > maxHostname || strings.ContainsFunc(s.Hostname, notHost) {
		return fmt.Errorf("%.64q is no host name", s.Hostname)
	}
	total := 0
	for _, e := range append(slices.Clone(s.Image.Env), s.Env...) {
		total += len(e)
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || len(e) > maxVariable || strings.ContainsRune(e, 0) {
			return fmt.Errorf("%.64q is no environment variable", e)
		}
	}
	for i, a := range s.Init {
		total += len(a)
		if i == 0 && a == "" || len(a) > maxVariable || strings.ContainsRune(a, 0) {
			return fmt.Errorf("%.64q is no word of a command", a)
		}
	}
	if total > maxWords {
		return fmt.Errorf("its command and its environment take %d bytes; at most %d", total, maxWords)
	}
	return nil
}

// network checks what the sandbox is to have of a network.
func (s Spec) network(c Capabilities) error {
	const op = "create sandbox"
	bad := func(format string, args ...any) error {
		return errs.Errorf(op, errkind.Invalid, format, args...)
	}
	if l := s.Link; l != nil {
		switch {
		case !c.Network:
			return errs.Errorf(op, errkind.Unimplemented, "a sandbox of tier %.32q cannot be given a network", s.Tier)
		case l.Tap != c.Tap:
			return bad("tier %.32q does not take this kind of link: tap %v, not %v", s.Tier, c.Tap, l.Tap)
		case !l.Address4.IsSingleIP() || !l.Address4.Addr().Is4() || !l.Address6.IsSingleIP() || !l.Address6.Addr().Is6() || l.Address6.Addr().Is4In6():
			return bad("the link has no address of each kind, of one host")
		case l.Router == "" || l.Name == "" || !l.Tap && l.Peer == "":
			return bad("the link is not one that was made")
		}
	}
	if len(s.Over) > maxOver {
		return bad("%d files over those of the root, at most %d", len(s.Over), maxOver)
	}
	for i, o := range s.Over {
		switch {
		case o.From == "" || o.From == "." || o.From == ".." || len(o.From) > maxName || strings.Contains(o.From, "/") || strings.ContainsFunc(o.From, notPath):
			return bad("%.64q is no name of a file of the run folder", o.From)
		case !filepath.IsAbs(o.To) || o.To == "/" || filepath.Clean(o.To) != o.To || len(o.To) > maxPath || strings.ContainsFunc(o.To, notPath):
			return bad("%.256q is no absolute path of a file", o.To)
		case slices.ContainsFunc(s.Over[:i], func(p Over) bool { return p.To == o.To }):
			return bad("two files lie over %.256q", o.To)
		case !c.Native || !c.Disk:
			return errs.Errorf(op, errkind.Unimplemented, "a sandbox of tier %.32q has no root that a file could lie over", s.Tier)
		}
	}
	return nil
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

// notPath finds what is no part of a path here: a line of a file, or an option of a mount, could end in it.
func notPath(r rune) bool { return r < ' ' || r == 0x7f || r == ',' }

func notHost(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-')
}
