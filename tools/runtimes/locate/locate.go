// Package locate finds the container runtimes that tools/runtimes built, and
// knows their names. It never builds or changes anything; what Dir returns was
// complete, and built for the versions that this package was compiled with.
package locate

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/tools/runtimes/cache"
)

// Binaries in the directory that Dir returns.
const (
	Containerd = "containerd"
	Ctr        = "ctr"
	Runc       = "runc"
	Runsc      = "runsc"
	ShimRunc   = "containerd-shim-berthrunc-v1"
	ShimRunsc  = "containerd-shim-berthrunsc-v1"
)

// Runtime handlers, as containerd's client names them. containerd finds their
// shims because they lie beside its own binary.
const (
	HandlerRunc  = "io.containerd.berthrunc.v1"
	HandlerRunsc = "io.containerd.berthrunsc.v1"
)

// Annotations of a container's OCI spec that both shims understand. A sandbox's
// first container carries the type TypeSandbox and its own ID as SandboxID;
// further containers carry TypeContainer and the ID of that first one, and run in
// its shim. Under runsc they are required: without them a Create can hang.
const (
	AnnotationType      = "io.kubernetes.cri.container-type"
	AnnotationSandboxID = "io.kubernetes.cri.sandbox-id"
	TypeSandbox         = "sandbox"
	TypeContainer       = "container"
)

// RunscOptionsType is the TypeUrl in the runtimeoptions.Options of a runsc
// container; its ConfigPath names a file in the format of runsc's shim.
const RunscOptionsType = "io.containerd.runsc.v1.options"

// EnvDir names a directory of binaries to use in place of the cached ones, for
// hosts that install them by other means. Their versions are not checked.
const EnvDir = "BERTH_RUNTIMES"

// Files of a virtual machine, in the directory that MicroVM returns.
const (
	VMLinux       = "vmlinux"      // a kernel with an entry for PVH
	Modules       = "modules.cpio" // of that kernel, for guest/vm/initramfs
	KernelVersion = "version"      // package=version that both are of, for people
)

// Names inside the cache's runtimes directory.
const (
	cacheFolder  = "runtimes"
	currentLink  = "current"
	versionsFile = "versions.txt"
	binFolder    = "bin"
	vmFolder     = "microvm"
)

// Versions is the text that says what is built: see versions.txt.
//
//go:embed versions.txt
var Versions string

// All lists every binary that a complete directory has.
func All() []string {
	return []string{Containerd, Ctr, Runc, Runsc, ShimRunc, ShimRunsc}
}

// Dir returns the absolute directory that holds all binaries. Its error is one
// sentence that says what to do.
func Dir() (string, error) {
	if dir := os.Getenv(EnvDir); dir != "" {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return "", err
		}
		return dir, complete(dir)
	}
	home, err := Home()
	if err != nil {
		return "", err
	}
	set, err := filepath.EvalSymlinks(filepath.Join(home, currentLink))
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("the container runtimes are not built; run: go run ./tools/runtimes")
	}
	if err != nil {
		return "", fmt.Errorf("find the container runtimes: %w", err)
	}
	built, err := os.ReadFile(filepath.Join(set, versionsFile))
	if err != nil || string(built) != Versions {
		return "", fmt.Errorf("the container runtimes in %s are of other versions; run: go run ./tools/runtimes", set)
	}
	return filepath.Join(set, binFolder), complete(filepath.Join(set, binFolder))
}

// MicroVM returns the absolute directory of the files that a virtual machine starts from. They stand
// beside the folder of binaries. Its error is one sentence that says what to do; the other runtimes
// may be there without them.
func MicroVM() (string, error) {
	bin, err := Dir()
	if err != nil {
		return "", err
	}
	dir := VM(filepath.Dir(bin))
	for _, name := range []string{VMLinux, Modules, KernelVersion} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return "", fmt.Errorf("the kernel of virtual machines is not in %s; run: go run ./tools/runtimes", dir)
		}
	}
	return dir, nil
}

// VM returns the folder of a virtual machine's files in a set.
func VM(set string) string { return filepath.Join(set, vmFolder) }

// Home returns the part of the cache that belongs to the runtimes.
func Home() (string, error) {
	root, err := cache.Root()
	if err != nil {
		return "", err
	}
	return filepath.Join(root, cacheFolder), nil
}

// WriteSet lays out the set of binaries in dir, whose bin folder the caller filled.
func WriteSet(dir string) error {
	if err := complete(filepath.Join(dir, binFolder)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, versionsFile), []byte(Versions), 0o644)
}

// Bin returns the folder of binaries in a set.
func Bin(set string) string { return filepath.Join(set, binFolder) }

// Select makes set the one that Dir returns from now on.
func Select(set string) error {
	home, err := Home()
	if err != nil {
		return err
	}
	return cache.Point(filepath.Join(home, currentLink), set)
}

func complete(dir string) error {
	for _, name := range All() {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("the container runtimes in %s lack %s; run: go run ./tools/runtimes", dir, name)
		}
	}
	return nil
}
