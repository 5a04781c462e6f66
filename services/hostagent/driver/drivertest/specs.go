package drivertest

import (
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// wrong is one way in which a spec is wrong.
type wrong struct {
	name   string
	change func(*driver.Spec)
	kind   errkind.Kind
}

// refused checks that each of them is refused with its kind in one sentence, and that nothing is made.
func (s *suite) refused(t *testing.T, all []wrong) {
	t.Helper()
	d := s.open(t)
	before := s.host.Left(t)
	for _, w := range all {
		spec := s.spec(t, 1, 1)
		w.change(&spec)
		if _, err := d.Create(ctx(t), spec); !errs.Is(err, w.kind) {
			t.Errorf("%s: got %v (%v)", w.name, err, errs.Kind(err))
		} else if strings.Contains(err.Error(), "\n") || len(err.Error()) > 1000 {
			t.Errorf("%s: not one sentence: %v", w.name, err)
		}
	}
	s.nothing(t, d, before)
}

// badIdentity: a request without a name, or with one that becomes a path on the host.
func (s *suite) badIdentity(t *testing.T) {
	s.refused(t, []wrong{
		{"no session", func(x *driver.Spec) { x.Session = "" }, errkind.Invalid},
		{"path", func(x *driver.Spec) { x.Session = "../../../etc" }, errkind.Invalid},
		{"NUL", func(x *driver.Spec) { x.Session += "\x00" }, errkind.Invalid},
		{"long", func(x *driver.Spec) { x.Session = ids.SessionKey(strings.Repeat("a", 4096)) }, errkind.Invalid},
		{"no epoch", func(x *driver.Spec) { x.Epoch = ids.Epoch{} }, errkind.Invalid},
		{"no generation", func(x *driver.Spec) { x.Generation = ids.Generation{} }, errkind.Invalid},
	})
}

// badTier: a wall that this host has not, in whose place a weaker one is given.
func (s *suite) badTier(t *testing.T) {
	s.refused(t, []wrong{
		{"unknown", func(x *driver.Spec) { x.Tier = "strongest" }, errkind.Unimplemented},
		{"none", func(x *driver.Spec) { x.Tier = "" }, errkind.Unimplemented},
		{"another case", func(x *driver.Spec) { x.Tier = driver.Tier(strings.ToUpper(string(x.Tier))) }, errkind.Unimplemented},
		{"long", func(x *driver.Spec) { x.Tier = driver.Tier(strings.Repeat("x", 100_000)) }, errkind.Unimplemented},
	})
}

// badLimits: a limit that is none: too small to live with, or so large that it overflows into nothing.
func (s *suite) badLimits(t *testing.T) {
	s.refused(t, []wrong{
		{"no memory", func(x *driver.Spec) { x.Limits.MemoryBytes = 0 }, errkind.Invalid},
		{"little memory", func(x *driver.Spec) { x.Limits.MemoryBytes = driver.MinMemory - 1 }, errkind.Invalid},
		{"absurd memory", func(x *driver.Spec) { x.Limits.MemoryBytes = 1<<64 - 1 }, errkind.Invalid},
		{"no processes", func(x *driver.Spec) { x.Limits.PIDs = 0 }, errkind.Invalid},
		{"absurd processes", func(x *driver.Spec) { x.Limits.PIDs = 1<<32 - 1 }, errkind.Invalid},
		{"no cpu", func(x *driver.Spec) { x.Limits.CPUMillis = 0 }, errkind.Invalid},
		{"absurd cpu", func(x *driver.Spec) { x.Limits.CPUMillis = 1<<32 - 1 }, errkind.Invalid},
		{"few files", func(x *driver.Spec) { x.Limits.OpenFiles = 1 }, errkind.Invalid},
		{"absurd files", func(x *driver.Spec) { x.Limits.OpenFiles = 1<<64 - 1 }, errkind.Invalid},
	})
}

// badWords: a host name or a variable with which a request breaks out of where it is written.
func (s *suite) badWords(t *testing.T) {
	s.refused(t, []wrong{
		{"host name", func(x *driver.Spec) { x.Hostname = "a b/c" }, errkind.Invalid},
		{"long host name", func(x *driver.Spec) { x.Hostname = strings.Repeat("a", 64) }, errkind.Invalid},
		{"host name with a line", func(x *driver.Spec) { x.Hostname = "a\nb" }, errkind.Invalid},
		{"no variable", func(x *driver.Spec) { x.Env = []string{"no equals sign"} }, errkind.Invalid},
		{"variable without a name", func(x *driver.Spec) { x.Env = []string{"=x"} }, errkind.Invalid},
		{"variable with NUL", func(x *driver.Spec) { x.Env = []string{"A=\x00"} }, errkind.Invalid},
		{"long variable", func(x *driver.Spec) { x.Env = []string{"A=" + strings.Repeat("x", 200<<10)} }, errkind.Invalid},
		{"image's variable", func(x *driver.Spec) { x.Image.Env = []string{"\x00"} }, errkind.Invalid},
		{"program with NUL", func(x *driver.Spec) { x.Init = []string{"/bin/\x00"} }, errkind.Invalid},
		{"program without a name", func(x *driver.Spec) { x.Init = []string{"", "x"} }, errkind.Invalid},
	})
}

// badPaths: a path that leads to another place than the one that was checked.
func (s *suite) badPaths(t *testing.T) {
	paths := func(what string, set func(*driver.Spec, string)) (out []wrong) {
		for name, p := range map[string]string{
			"relative": "some/where", "dot-dot": "/tmp/../etc", "empty": "", "NUL": "/tmp/\x00x", "option": "/tmp/a,lowerdir=/etc", "line": "/tmp/a\nb",
			"long": "/" + strings.Repeat("x/", 2500) + "x",
		} {
			out = append(out, wrong{what + ": " + name, func(x *driver.Spec) { set(x, p) }, errkind.Invalid})
		}
		return out
	}
	disk := func(x *driver.Spec, p string) { x.Disk = p }
	image := func(x *driver.Spec, p string) { x.Image.Lower = p }
	if s.caps.RawDisk {
		disk = func(x *driver.Spec, p string) { x.DiskImage = p }
		image = func(x *driver.Spec, p string) { x.Image.Block = p }
	}
	all := append(paths("disk", disk), paths("image", image)...)
	s.refused(t, append(all, paths("run folder", func(x *driver.Spec, p string) { x.RunDir = p })...))
}

// absent: an image or a disk that is not there, in whose place an empty one is given.
func (s *suite) absent(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	for name, change := range map[string]func(*driver.Spec){
		"disk":    func(x *driver.Spec) { x.Disk, x.DiskImage = x.RunDir+"/none", x.RunDir+"/none.img" },
		"image":   func(x *driver.Spec) { x.Image.Lower, x.Image.Block = x.RunDir+"/none", x.RunDir+"/none.erofs" },
		"program": func(x *driver.Spec) { x.Guest, x.Init = "", []string{"/no/such/program"} },
	} {
		spec := s.spec(t, 1, 1)
		change(&spec)
		if _, err := d.Create(ctx(t), spec); err == nil {
			t.Errorf("%s: a sandbox runs without it", name)
		}
		s.nothing(t, d, before)
	}
	s.start(t, d, 1, 1)
}
