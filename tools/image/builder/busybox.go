package builder

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/berth-dev/berth/tools/runtimes/debian"
)

const busyboxPackage = "busybox-static"

// busyboxFiles are the small files of the busybox image.
var busyboxFiles = []struct{ Name, Text string }{
	{"etc/passwd", "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n"},
	{"etc/group", "root:x:0:\nagent:x:1000:\n"},
	{"etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"},
	{"etc/hostname", "sandbox\n"},
	{"etc/resolv.conf", ""},
}

// Busybox returns the OCI layout of a tiny image (about 1 MB) for tests: a static
// busybox with all its commands, and the same user as the session image.
func Busybox(ctx context.Context, log io.Writer) (string, error) {
	config := imageConfig("/bin/sh")
	return fill(entryName("busybox", busyboxPackage, busyboxFiles, config), func(dir string) error {
		if _, err := exec.LookPath("dpkg-deb"); err != nil {
			return fmt.Errorf("the busybox image is made from Debian's %s package, but this machine has no dpkg-deb", busyboxPackage)
		}
		return timed(log, "building the busybox image (about 3 s)", func() error {
			return scratch(func(tmp string) error { return busyboxImage(ctx, tmp, dir, config) })
		})
	})
}

func busyboxImage(ctx context.Context, tmp, dir string, config v1.Config) error {
	binary, err := fetchBusybox(ctx, tmp)
	if err != nil {
		return err
	}
	list, err := exec.CommandContext(ctx, binary, "--list").Output()
	if err != nil {
		return fmt.Errorf("list busybox's commands: %w", err)
	}
	data, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	layer := filepath.Join(tmp, "layer.tar.gz")
	if err := writeBusyboxLayer(layer, data, strings.Fields(string(list))); err != nil {
		return fmt.Errorf("write the busybox layer: %w", err)
	}
	return writeImage(dir, layer, config)
}

// fetchBusybox gets the static binary out of Debian's package.
func fetchBusybox(ctx context.Context, tmp string) (string, error) {
	if err := debian.Download(ctx, tmp, busyboxPackage); err != nil {
		return "", err
	}
	debs, err := filepath.Glob(filepath.Join(tmp, busyboxPackage+"_*.deb"))
	if err != nil || len(debs) != 1 {
		return "", fmt.Errorf("apt-get download left %d files of %s", len(debs), busyboxPackage)
	}
	root := filepath.Join(tmp, "root")
	if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", debs[0], root).CombinedOutput(); err != nil {
		return "", fmt.Errorf("unpack %s: %w: %s", busyboxPackage, err, bytes.TrimSpace(out))
	}
	for _, path := range []string{"bin/busybox", "usr/bin/busybox"} {
		if _, err := os.Stat(filepath.Join(root, path)); err == nil {
			return filepath.Join(root, path), nil
		}
	}
	return "", fmt.Errorf("package %s has no busybox binary", busyboxPackage)
}

func writeBusyboxLayer(path string, binary []byte, commands []string) error {
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	z := gzip.NewWriter(out)
	t := tar.NewWriter(z)
	for _, d := range []struct {
		name string
		mode int64
		id   int
	}{
		{"bin/", 0o755, 0}, {"dev/", 0o755, 0}, {"etc/", 0o755, 0}, {"home/", 0o755, 0},
		{"home/agent/", 0o755, UID}, {"proc/", 0o755, 0}, {"root/", 0o700, 0}, {"run/", 0o755, 0},
		{"sys/", 0o755, 0}, {"tmp/", 0o1777, 0}, {"usr/", 0o755, 0}, {"usr/bin/", 0o755, 0}, {"var/", 0o755, 0},
	} {
		h := &tar.Header{Typeflag: tar.TypeDir, Name: d.name, Mode: d.mode, Uid: d.id, Gid: d.id, ModTime: epoch}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
	}
	if err := addFile(t, "bin/busybox", 0o755, binary); err != nil {
		return err
	}
	for _, f := range busyboxFiles {
		if err := addFile(t, f.Name, 0o644, []byte(f.Text)); err != nil {
			return err
		}
	}
	for _, command := range commands {
		if command == "busybox" {
			continue
		}
		h := &tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + command, Linkname: "busybox", Mode: 0o777, ModTime: epoch}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close(), out.Close())
}

func addFile(t *tar.Writer, name string, mode int64, data []byte) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data)), ModTime: epoch}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err := t.Write(data)
	return err
}
