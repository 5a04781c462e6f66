// Package debian gets what the tools need from the machine's own Debian package
// sources. It guarantees that it installs only packages asked for by name (and
// what they depend on), and that a machine where it cannot do so gets one
// sentence that names them.
package debian

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// CanInstall reports whether packages can be installed here: apt, and root.
func CanInstall() bool {
	_, err := exec.LookPath("apt-get")
	return err == nil && os.Geteuid() == 0
}

// Install installs packages for purpose, which completes the sentence "... needs".
func Install(ctx context.Context, log io.Writer, purpose string, packages ...string) error {
	if len(packages) == 0 {
		return nil
	}
	names := strings.Join(packages, " ")
	if !CanInstall() {
		return fmt.Errorf("%s needs packages that are missing here; install them (Debian: apt-get install %s)", purpose, names)
	}
	fmt.Fprintf(log, "installing %s\n", names)
	args := append([]string{"install", "-y", "--no-install-recommends"}, packages...)
	return withUpdate(ctx, ".", args)
}

// Download fetches the .deb file of one package into dir. It needs no privileges.
func Download(ctx context.Context, dir, pkg string) error {
	return withUpdate(ctx, dir, []string{"download", "-o", "APT::Sandbox::User=root", pkg})
}

// withUpdate runs apt-get; if that fails, perhaps because the package lists are
// missing or old, it refreshes them and tries once more.
func withUpdate(ctx context.Context, dir string, args []string) error {
	if aptGet(ctx, dir, args...) == nil {
		return nil
	}
	if err := aptGet(ctx, dir, "update"); err != nil {
		return err
	}
	return aptGet(ctx, dir, args...)
}

func aptGet(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	out, err := cmd.CombinedOutput()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return fmt.Errorf("apt-get %s: %w: %s", strings.Join(args, " "), err, lines[len(lines)-1])
	}
	return nil
}
