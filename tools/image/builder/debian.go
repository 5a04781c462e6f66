package builder

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/tools/runtimes/debian"
)

const (
	suite    = "bookworm"
	packages = "python3,git,curl,ca-certificates,busybox"
)

// untranslated keeps documentation and translations out of the image.
var untranslated = []string{
	"/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*",
	"/usr/share/locale/*", "/usr/share/lintian/*", "/usr/share/bug/*",
}

// customize runs in a shell when the packages are installed; $1 is the image's
// root. It adds the user and removes what tells of the building machine.
const customize = `set -eu
chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash agent
printf '[user]\n\tname = agent\n\temail = agent@localhost\n[init]\n\tdefaultBranch = main\n' > "$1/etc/gitconfig"
printf '127.0.0.1 localhost\n::1 localhost\n' > "$1/etc/hosts"
echo sandbox > "$1/etc/hostname"
: > "$1/etc/resolv.conf"
rm -rf "$1"/etc/apt/sources.list.d/* "$1"/var/log/* "$1"/var/cache/debconf/*-old
echo '# no package sources: add some if the egress policy allows them' > "$1/etc/apt/sources.list"
`

func canBuildDebian() bool {
	_, err := exec.LookPath("mmdebstrap")
	return err == nil || debian.CanInstall()
}

// debianImage builds the Debian session image.
func debianImage(ctx context.Context, log io.Writer) (string, error) {
	config := imageConfig("/bin/bash")
	return fill(entryName("debian-"+suite, packages, untranslated, customize, config), func(dir string) error {
		return timed(log, "building the Debian image (about 60 s)", func() error {
			return scratch(func(tmp string) error {
				layer := filepath.Join(tmp, "layer.tar.gz")
				if err := bootstrap(ctx, log, tmp, layer); err != nil {
					return err
				}
				return writeImage(dir, layer, config)
			})
		})
	})
}

// bootstrap runs mmdebstrap and compresses what it makes.
func bootstrap(ctx context.Context, log io.Writer, tmp, layer string) error {
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		if err := debian.Install(ctx, log, "building the default image", "mmdebstrap"); err != nil {
			return err
		}
	}
	sources, err := machineSources(tmp)
	if err != nil {
		return err
	}
	root := filepath.Join(tmp, "root.tar")
	args := []string{"--variant=minbase", "--skip=output/dev", "--include=" + packages,
		"--customize-hook=" + customize}
	for _, path := range untranslated {
		args = append(args, "--dpkgopt=path-exclude="+path)
	}
	args = append(append(args, suite, root), sources...)
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	cmd.Env = append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", epoch.Unix()))
	// It and its workers need the signal; then it unmounts and removes what it made.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	err = follow(cmd, log)
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if err != nil {
		return fmt.Errorf("build the Debian image with mmdebstrap: %w", err)
	}
	return compress(root, layer)
}

// follow runs cmd, reports its progress lines and, if it fails, its last ones.
func follow(cmd *exec.Cmd, log io.Writer) error {
	out, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	start := time.Now()
	var last []string
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		line := lines.Text()
		if step, ok := strings.CutPrefix(line, "I: "); ok && strings.HasSuffix(step, "...") && !strings.Contains(step, "/") {
			fmt.Fprintf(log, "  %3.0f s: %s\n", time.Since(start).Seconds(), strings.TrimSuffix(step, "..."))
		}
		last = append(last[max(0, len(last)-9):], line)
	}
	if err := errors.Join(lines.Err(), cmd.Wait()); err != nil {
		return fmt.Errorf("%w\n%s", err, strings.Join(last, "\n"))
	}
	return nil
}

func compress(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("compress the image: %w", err)
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return fmt.Errorf("compress the image: %w", err)
	}
	defer out.Close()
	z := gzip.NewWriter(out)
	if _, err := io.Copy(z, in); err != nil {
		return fmt.Errorf("compress the image: %w", err)
	}
	return errors.Join(z.Close(), out.Close())
}
