// Package mounts reads and shapes the mount table. It guarantees that what is unmounted below a shared
// folder goes away for every process of the host, and that a folder is never shared twice.
package mounts

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Share makes dir a shared mount of its own, so that an unmount below it reaches copies of
// the mount table that other processes hold, for example a container that is just starting.
func Share(dir string) error {
	mounted, err := IsMount(dir)
	if err != nil || mounted {
		return err
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", dir, err)
	}
	// Private first: a peer group of its own, not that of the file system around it.
	for _, how := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.Mount("", dir, "", how, ""); err != nil {
			return errors.Join(fmt.Errorf("share %s: %w", dir, err), unix.Unmount(dir, unix.MNT_DETACH))
		}
	}
	return nil
}

// Unshare takes back what Share did; nothing may be mounted below dir any more. Idempotent.
func Unshare(dir string) error {
	if err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); err != nil &&
		!errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

// Below lists the mount points at or below dir in the order in which they were made.
func Below(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	defer func() { _ = f.Close() }()
	var out []string
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 5 {
			continue
		}
		if p := unescape(fields[4]); p == dir || strings.HasPrefix(p, dir+"/") {
			out = append(out, p)
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	return out, nil
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// IsMount reports whether path is a mount point: its mount differs from its parent's.
func IsMount(path string) (bool, error) {
	id, err := mountID(path)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at mount %s: %w", path, err)
	}
	parent, err := mountID(path + "/..")
	if err != nil {
		return false, fmt.Errorf("look at mount above %s: %w", path, err)
	}
	return id != parent, nil
}

func mountID(path string) (uint64, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &st)
	return st.Mnt_id, err
}
