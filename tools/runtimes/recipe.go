package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// pin is one line of versions.txt.
type pin struct {
	Version, Module, Sum string
}

// parseVersions reads versions.txt: name, version, module and sum per line.
func parseVersions(text string) (map[string]pin, error) {
	pins := make(map[string]pin)
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 4 {
			return nil, fmt.Errorf("versions.txt line %d has %d fields in place of 4", i+1, len(fields))
		}
		if _, twice := pins[fields[0]]; twice {
			return nil, fmt.Errorf("versions.txt line %d names %s again", i+1, fields[0])
		}
		pins[fields[0]] = pin{Version: fields[1], Module: fields[2], Sum: fields[3]}
	}
	return pins, nil
}

// recipe says how one component is built. Everything that changes the result is
// a field, because the cache key is a hash of all of them.
type recipe struct {
	Name     string
	Pin      pin
	Source   string            // folder below tools/runtimes, for our own modules
	Digest   string            // hash of what Source and the modules beside it contain
	Binaries map[string]string // binary name -> package, relative to the module
	CGO      bool
	Tags     string
	LDFlags  string
	Go       string // Go's version and target
	Seconds  int    `json:"-"` // about how long a first build takes on two cores
	// Deb is the Debian package that always depends on the newest kernel; the pin's module is then the
	// package of its version. It is not built but fetched, and the other runtimes do without it.
	Deb string `json:",omitempty"`
	// Patches mend the pinned module's source before it is built. The module in Source then requires the pinned one.
	Patches []patch `json:",omitempty"`
}

// recipes lists the components in the order in which they are built.
func recipes(pins map[string]pin, goID string) ([]recipe, error) {
	for _, name := range []string{"containerd", "runc", "runsc", "kernel"} {
		if _, ok := pins[name]; !ok {
			return nil, fmt.Errorf("versions.txt has no line for %s", name)
		}
	}
	containerd, runc, gvisor := pins["containerd"], pins["runc"], pins["runsc"]
	list := []recipe{{
		Name: "containerd", Pin: containerd, Seconds: 85,
		Binaries: map[string]string{locate.Containerd: "./cmd/containerd", locate.Ctr: "./cmd/ctr"},
		Tags:     "no_cri,no_btrfs,no_zfs,no_tracing,static_build,osusergo,netgo",
		LDFlags:  "-s -w -X github.com/containerd/containerd/v2/version.Version=" + containerd.Version,
	}, {
		Name: "runc", Pin: runc, Seconds: 30, CGO: true,
		Binaries: map[string]string{locate.Runc: "."},
		Tags:     "seccomp,osusergo,netgo",
		LDFlags:  "-s -w -extldflags -static",
	}, {
		Name: "shim-runc", Pin: pin{Version: containerd.Version}, Seconds: 15,
		Source:   "shims/runc",
		Binaries: map[string]string{locate.ShimRunc: "."},
		LDFlags:  "-s -w",
	}, {
		Name: "gvisor", Pin: gvisor, Seconds: 120,
		Source:   "shims/runsc", // one module builds both, so that gVisor is compiled once
		Binaries: map[string]string{locate.ShimRunsc: ".", locate.Runsc: "gvisor.dev/gvisor/runsc"},
		LDFlags:  "-s -w -X gvisor.dev/gvisor/runsc/version.version=" + gvisor.Version,
		Patches:  []patch{freezePatch},
	}}
	for i := range list {
		list[i].Go = goID
	}
	return append(list, recipe{Name: "kernel", Pin: pins["kernel"], Source: "kernel", Deb: "linux-image-cloud-amd64", Seconds: 5}), nil
}

// key names the component's cache entry.
func (r recipe) key() string {
	text, err := json.Marshal(r) // map keys are sorted, so the text is stable
	if err != nil {
		panic(err) // strings, a bool and a map of strings
	}
	return fmt.Sprintf("%s-%s-%s", r.Name, r.Pin.Version, shortHash(text))
}

// setKey names the set of all components.
func setKey(list []recipe) string {
	var keys []string
	for _, r := range list {
		keys = append(keys, r.key())
	}
	return "set-" + shortHash([]byte(strings.Join(keys, "\n")))
}

func shortHash(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:6])
}

// digestTree hashes the names and contents of all regular files below the
// folders, in their order. Tests do not count.
func digestTree(root string, folders ...string) (string, error) {
	h := sha256.New()
	for _, folder := range folders {
		err := filepath.WalkDir(filepath.Join(root, folder), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() || strings.HasSuffix(path, "_test.go") {
				return err
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(root, path)
			fmt.Fprintf(h, "%s %d\n%s", filepath.ToSlash(rel), len(data), data)
			return err
		})
		if err != nil {
			return "", fmt.Errorf("hash the sources in %s: %w", folder, err)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
