package diskpool

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// state is what a device holds.
type state int

const (
	blank    state = iota // no signature that is known
	halfMade              // an mkfs of ours was killed
	ready                 // XFS
)

// openDevice mounts the device, which it formats only if it is blank.
func (p *Pool) openDevice(ctx context.Context) error {
	mounted, err := p.mounted()
	if err != nil || mounted {
		return err
	}
	holds, err := p.probe()
	if err != nil {
		return err
	}
	mark := p.file() + making
	if holds != ready {
		if err := p.format(ctx, mark, holds == halfMade); err != nil {
			return err
		}
	}
	if err := os.Remove(mark); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := mountXFS(p.device, p.dir); err != nil {
		return err
	}
	return p.at("mounted")
}

// format says in a file that it begins: only then an unfinished file system is ours to make again.
func (p *Pool) format(ctx context.Context, mark string, again bool) error {
	f, err := os.OpenFile(mark, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(p.device)
	if err := errors.Join(err, f.Sync(), f.Close(), syncDir(filepath.Dir(mark))); err != nil {
		return err
	}
	if err := p.at("marked"); err != nil {
		return err
	}
	p.log.Info("formatting a blank device", "device", p.device)
	if err := mkfs(ctx, p.device, again); err != nil {
		return err
	}
	return p.at("formatted")
}

// probe tells what the device holds; Refused if that is somebody else's.
func (p *Pool) probe() (state, error) {
	var st unix.Stat_t
	if err := unix.Stat(p.device, &st); err != nil {
		return 0, errs.Errorf("", errkind.Unavailable, "look at device %s: %w", p.device, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, errs.Errorf("", errkind.Invalid, "%s is no block device", p.device)
	}
	sb, err := readSuperblock(p.device)
	if err != nil {
		return 0, errs.Errorf("", errkind.Unavailable, "look at device %s: %w", p.device, err)
	}
	if sb.halfMade {
		if mark, err := os.ReadFile(p.file() + making); err == nil && string(mark) == p.device {
			return halfMade, nil
		}
		return 0, errs.Errorf("", errkind.Refused, "device %s holds an unfinished XFS that is not of this pool; it is left as it is", p.device)
	}
	what, err := signature(p.device)
	switch {
	case err != nil:
		return 0, err
	case sb.xfs && what == "xfs":
		return ready, nil
	case what == "" && !sb.xfs:
		return blank, nil
	}
	return 0, errs.Errorf("", errkind.Refused,
		"device %s holds %s and is left as it is: empty it with wipefs -a if nobody needs it, or name another one", p.device, what)
}

// signature names what blkid finds at the beginning of a device, empty for nothing at all.
func signature(device string) (string, error) {
	out, err := exec.Command("blkid", "-p", "-o", "export", device).Output()
	const nothing, several = 2, 8 // exit codes of blkid -p
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.ExitCode() == nothing && len(exit.Stderr) == 0:
		return "", nil
	case errors.As(err, &exit) && exit.ExitCode() == several:
		return "several file systems", nil
	default:
		return "", errs.Errorf("", errkind.Unavailable, "blkid of device %s: %w", device, err)
	}
	what := "something unknown"
	for line := range strings.Lines(string(out)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "TYPE":
			return value, nil
		case "PTTYPE":
			what = "a partition table (" + value + ")"
		}
	}
	return what, nil
}
