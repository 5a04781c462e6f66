package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/tools/runtimes/cache"
	"github.com/berth-dev/berth/tools/runtimes/debian"
	"github.com/berth-dev/berth/tools/runtimes/kernel"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// builder builds components into the cache.
type builder struct {
	home   string // the cache's runtimes directory
	source string // tools/runtimes in the source tree
	jobs   int
	log    io.Writer
}

// all builds what is missing and returns the directory of the complete set.
func (b *builder) all(ctx context.Context, list []recipe) (string, error) {
	var have []recipe
	var entries []string
	for _, r := range list {
		entry, err := cache.Fill(b.home, r.key(), func(dir string) error { return b.timed(ctx, r, dir) })
		if err != nil && r.Deb != "" && ctx.Err() == nil {
			fmt.Fprintf(b.log, "no virtual machines on this host: %v\n", err)
			continue
		}
		if err != nil {
			return "", err
		}
		have, entries = append(have, r), append(entries, entry)
	}
	set, err := cache.Fill(b.home, setKey(have), func(dir string) error {
		for i, entry := range entries {
			folder := locate.Bin
			if have[i].Deb != "" {
				folder = locate.VM
			}
			if err := linkAll(folder(entry), folder(dir)); err != nil {
				return err
			}
		}
		return locate.WriteSet(dir)
	})
	if err != nil {
		return "", err
	}
	return set, locate.Select(set)
}

// timed builds one component and says so, in whole lines: other builds run at the same time.
func (b *builder) timed(ctx context.Context, r recipe, dir string) error {
	what := r.Name + " " + r.Pin.Version
	fmt.Fprintf(b.log, "building %s (about %d s) ...\n", what, r.Seconds)
	start := time.Now()
	if err := b.one(ctx, r, dir); err != nil {
		return fmt.Errorf("build %s: %w", r.Name, err)
	}
	fmt.Fprintf(b.log, "building %s: done %.0f s\n", what, time.Since(start).Seconds())
	return nil
}

func (b *builder) one(ctx context.Context, r recipe, dir string) error {
	if r.Deb != "" {
		if err := os.Mkdir(locate.VM(dir), 0o755); err != nil {
			return err
		}
		return kernel.Fetch(ctx, b.log, locate.VM(dir), kernel.Pin{Meta: r.Deb, Package: r.Pin.Module, Version: r.Pin.Version,
			SHA256: strings.TrimPrefix(r.Pin.Sum, "sha256:")})
	}
	if r.CGO {
		if err := needCompiler(ctx, b.log); err != nil {
			return err
		}
	}
	source := filepath.Join(b.source, r.Source)
	if r.Source == "" || len(r.Patches) > 0 {
		module, err := download(ctx, r.Pin)
		if err != nil {
			return err
		}
		if r.Source == "" {
			source = module
		} else {
			tmp, err := os.MkdirTemp("", "berth-source-")
			if err != nil {
				return err
			}
			defer func() { _ = os.RemoveAll(tmp) }()
			if source, err = patchedModules(source, module, tmp, r); err != nil {
				return err
			}
		}
	}
	for name, pkg := range r.Binaries {
		args := []string{"build", "-p", strconv.Itoa(b.jobs), "-trimpath", "-buildvcs=false", "-mod=readonly",
			"-tags", r.Tags, "-ldflags", r.LDFlags, "-o", filepath.Join(locate.Bin(dir), name), pkg}
		if _, err := goCommand(ctx, source, r.CGO, args...); err != nil {
			return err
		}
	}
	return nil
}

// download fetches the module and checks it against its pin. The module is later
// built in place, as the main module, so that its own go.sum pins all it needs.
func download(ctx context.Context, p pin) (string, error) {
	out, err := goCommand(ctx, os.TempDir(), false, "mod", "download", "-json", p.Module+"@"+p.Version)
	if err != nil {
		return "", err
	}
	var module struct{ Dir, Sum string }
	if err := json.Unmarshal(out, &module); err != nil {
		return "", fmt.Errorf("read what go mod download says of %s: %w", p.Module, err)
	}
	if module.Sum != p.Sum {
		return "", fmt.Errorf("%s %s has sum %s, but versions.txt pins %s", p.Module, p.Version, module.Sum, p.Sum)
	}
	return module.Dir, nil
}

// goCommand runs go outside any workspace and returns what it prints.
func goCommand(ctx context.Context, dir string, cgo bool, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	enabled := "0"
	if cgo {
		enabled = "1"
	}
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=", "CGO_ENABLED="+enabled)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it stops its compilers
	cmd.WaitDelay = 20 * time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return nil, errors.New("interrupted")
	}
	if err != nil {
		return nil, fmt.Errorf("go %s: %w\n%s", args[0], err, tail(stderr.String()+string(out), 30))
	}
	return out, nil
}

func tail(text string, lines int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// linkAll gives every file in from a second name in to. Hard links, because
// containerd looks for shims beside its own binary and resolves symbolic links.
func linkAll(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	files, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := os.Link(filepath.Join(from, f.Name()), filepath.Join(to, f.Name())); err != nil {
			return fmt.Errorf("link %s into the set: %w", f.Name(), err)
		}
	}
	return nil
}

// needCompiler makes sure that runc can be built: a C compiler, pkg-config and a
// static libseccomp. It installs them where it may.
func needCompiler(ctx context.Context, log io.Writer) error {
	return debian.Install(ctx, log, "building runc", missingPackages()...)
}

func missingPackages() []string {
	var missing []string
	if _, err := exec.LookPath("gcc"); err != nil {
		missing = append(missing, "gcc", "libc6-dev")
	}
	if _, err := exec.LookPath("pkg-config"); err != nil {
		missing = append(missing, "pkg-config")
	}
	if exec.Command("pkg-config", "--exists", "libseccomp").Run() != nil {
		missing = append(missing, "libseccomp-dev")
	}
	return missing
}
