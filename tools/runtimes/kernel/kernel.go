// Package kernel gets the kernel of Berth's virtual machines: the one that Debian builds and signs
// for machines in a cloud. Nothing is installed; the package is fetched by apt, which checks it
// against the archive's signature, and unpacked beside the other runtimes.
//
// It guarantees that what Fetch leaves is a kernel and the modules of the same package, in the order
// of loading, and says of which version. The version that is asked for is preferred; Debian keeps
// only the newest in its archive, so where that is gone the newest is taken, and it is said so.
package kernel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/initramfs"
	"github.com/berth-dev/berth/tools/runtimes/debian"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// Pin says which package is wanted.
type Pin struct {
	Meta    string // the package that always depends on the newest kernel
	Package string // the kernel itself, of Version
	Version string
	SHA256  string // of the .deb
}

// Fetch fills dir with locate's files of a microvm.
func Fetch(ctx context.Context, log io.Writer, dir string, p Pin) error {
	tmp, err := os.MkdirTemp(dir, ".deb-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	deb, version, err := download(ctx, log, tmp, p)
	if err != nil {
		return err
	}
	root := filepath.Join(tmp, "x")
	if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", deb, root).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w: %s", filepath.Base(deb), err, bytes.TrimSpace(out))
	}
	return lay(root, dir, version)
}

// lay makes the files of dir from an unpacked package.
func lay(root, dir, version string) error {
	image, err := one(filepath.Join(root, "boot", "vmlinuz-*"))
	if err != nil {
		return err
	}
	packed, err := os.ReadFile(image)
	if err != nil {
		return err
	}
	vmlinux, err := Extract(packed)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(image), err)
	}
	tree, err := one(filepath.Join(root, "lib", "modules", "*"))
	if err != nil {
		if tree, err = one(filepath.Join(root, "usr", "lib", "modules", "*")); err != nil {
			return err
		}
	}
	data, order, err := modules(tree)
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	err = initramfs.WriteModules(&archive, order, func(name string) ([]byte, error) { return data[name], nil })
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		locate.VMLinux: vmlinux, locate.Modules: archive.Bytes(), locate.KernelVersion: []byte(version + "\n"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func one(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("the kernel's package has %d of %s", len(found), filepath.Base(pattern))
	}
	return found[0], nil
}

// download returns the .deb in dir, and its package and version.
func download(ctx context.Context, log io.Writer, dir string, p Pin) (deb, version string, err error) {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return "", "", fmt.Errorf("the kernel of virtual machines comes from Debian's archive: %w", err)
	}
	name := p.Package + "=" + p.Version
	err = debian.Download(ctx, dir, name)
	if err == nil {
		if deb, err = one(filepath.Join(dir, "*.deb")); err != nil {
			return "", "", err
		}
		b, err := os.ReadFile(deb)
		if err != nil {
			return "", "", err
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != p.SHA256 {
			return "", "", fmt.Errorf("%s has another content than versions.txt pins", name)
		}
		return deb, name, nil
	}
	out, newer := exec.CommandContext(ctx, "apt-cache", "depends", "--important", p.Meta).Output()
	if newer != nil {
		return "", "", err
	}
	for line := range strings.Lines(string(out)) {
		pkg, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: ")
		if !ok || !strings.HasPrefix(pkg, "linux-image-") {
			continue
		}
		if err := debian.Download(ctx, dir, pkg); err != nil {
			return "", "", err
		}
		if deb, err = one(filepath.Join(dir, "*.deb")); err != nil {
			return "", "", err
		}
		fmt.Fprintf(log, "\nDebian's archive here has no %s any more; taking %s\n", name, filepath.Base(deb))
		_, version, _ = strings.Cut(strings.TrimSuffix(filepath.Base(deb), ".deb"), "_")
		return deb, pkg + "=" + version, nil
	}
	return "", "", err
}
