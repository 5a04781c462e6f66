package cover

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// elsewhere runs do on a thread with a table of mounts of its own, which ends with it.
func elsewhere(t *testing.T, do func() error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread is not used again
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = do()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// world is a run folder, a root, and what lies outside of it.
func world(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"run", "root/etc/ssl/certs", "root/other", "outside/etc"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		"run/mine": "mine", "root/etc/ssl/certs/ca.crt": "theirs", "root/other/file": "theirs", "outside/etc/resolv.conf": "host", "outside/file": "host",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// lay lays the file mine over a place, twice.
func lay(dir, to string, follow bool) error {
	run, err := Folder(dir + "/run")
	if err != nil {
		return err
	}
	defer func() { _ = run.Close() }()
	root, err := Folder(dir + "/root")
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for range 2 {
		all, err := Open(int(run.Fd()), []File{{"mine", to}})
		if err != nil {
			return err
		}
		err = Root{FD: int(root.Fd()), Follow: follow}.Put(all)
		all.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// covered lists the files of the world that read as mine.
func covered(dir string) (out []string, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		if b, err := os.ReadFile(path); err == nil && string(b) == "mine" && rel != "run/mine" {
			out = append(out, rel)
		}
		return nil
	})
	return out, err
}

func points() int {
	b, _ := os.ReadFile("/proc/thread-self/mountinfo")
	return strings.Count(string(b), "\n")
}

// A link that a session leaves where a file is laid over, or on the way there, leads the host's mount elsewhere.
func TestNoLinkLeadsOutOfTheRoot(t *testing.T) {
	for name, c := range map[string]struct {
		at, link     string // made in the root; OUT is the world
		to           string
		same, follow []string // what is covered
	}{
		"a file":             {"", "", "/etc/ssl/certs/ca.crt", []string{"root/etc/ssl/certs/ca.crt"}, []string{"root/etc/ssl/certs/ca.crt"}},
		"out, absolute":      {"etc/x", "OUT/outside/file", "/etc/x", []string{"root/etc/x"}, nil},
		"out, relative":      {"etc/x", "../../../outside/file", "/etc/x", []string{"root/etc/x"}, nil},
		"way out, relative":  {"lib", "../outside", "/lib/file", nil, nil},
		"way out, absolute":  {"lib", "OUT/outside", "/lib/file", nil, nil},
		"dangling":           {"etc/x", "nothing", "/etc/x", []string{"root/etc/x"}, nil},
		"round and round":    {"etc/x", "x", "/etc/x", []string{"root/etc/x"}, nil},
		"a way in circles":   {"lib", "lib", "/lib/x", nil, nil},
		"within":             {"etc/x", "../other/file", "/etc/x", []string{"root/etc/x"}, []string{"root/etc/x", "root/other/file"}},
		"within, absolute":   {"etc/x", "/other/file", "/etc/x", []string{"root/etc/x"}, []string{"root/other/file"}},
		"above the root":     {"etc/x", "/../../../other/./file", "/etc/x", []string{"root/etc/x"}, []string{"root/other/file"}},
		"a folder on a link": {"lib", "etc/ssl", "/lib/certs/ca.crt", []string{"root/etc/ssl/certs/ca.crt"}, []string{"root/etc/ssl/certs/ca.crt"}},
		"to a folder":        {"etc/x", "ssl", "/etc/x", []string{"root/etc/x"}, nil},
		"a magic link":       {"lib", "/proc/self/root", "/lib/etc/hostname", nil, nil},
		"nothing":            {"", "", "/etc/nothing", nil, nil},
		"a folder":           {"", "", "/etc/ssl", nil, nil},
		"below a file":       {"", "", "/other/file/x", nil, nil},
		"the missing one":    {"", "", Resolver, []string{"root" + Resolver}, []string{"root" + Resolver}},
	} {
		for _, follow := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " ", follow), func(t *testing.T) {
				dir := world(t)
				if c.at != "" {
					if err := os.Symlink(strings.ReplaceAll(c.link, "OUT", dir), filepath.Join(dir, "root", c.at)); err != nil {
						t.Fatal(err)
					}
				}
				want := c.same
				if follow {
					want = c.follow
				}
				elsewhere(t, func() error {
					before := points()
					if err := lay(dir, c.to, follow); err != nil {
						return err
					}
					got, err := covered(dir)
					if !slices.Equal(got, want) || points()-before != min(len(want), 1) {
						err = errors.Join(err, fmt.Errorf("covered are %v, not %v, by %d mounts", got, want, points()-before))
					}
					return err
				})
			})
		}
	}
}

// A root whose run folder or /proc is another file system: nothing is laid over in there.
func TestAnotherFileSystemIsPassedOver(t *testing.T) {
	dir := world(t)
	if err := errors.Join(os.Mkdir(dir+"/root/proc", 0o755), os.Symlink("../proc/self/status", dir+"/root/etc/x")); err != nil {
		t.Fatal(err)
	}
	elsewhere(t, func() error {
		if err := unix.Mount("proc", dir+"/root/proc", "proc", 0, ""); err != nil {
			return err
		}
		before := points()
		err := errors.Join(lay(dir, "/proc/sysrq-trigger", false), lay(dir, "/etc/x", true))
		if points() != before {
			err = errors.Join(err, errors.New("something was laid over"))
		}
		return err
	})
}

func TestTheCopyIsReadOnlyAndTheRootUntouched(t *testing.T) {
	dir := world(t)
	file := dir + "/root/etc/ssl/certs/ca.crt"
	elsewhere(t, func() error {
		if err := lay(dir, "/etc/ssl/certs/ca.crt", false); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte("changed"), 0o644); !errors.Is(err, unix.EROFS) {
			return fmt.Errorf("a write gives %v", err)
		}
		return nil
	})
	for path, want := range map[string]string{file: "theirs", dir + "/run/mine": "mine"} {
		if b, err := os.ReadFile(path); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
	if _, err := os.Lstat(dir + "/root" + Resolver); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was made: %v", err)
	}
}

func TestWhatIsNoFileOfTheRunFolderIsAnError(t *testing.T) {
	dir := world(t)
	if err := errors.Join(os.Symlink("../outside/file", dir+"/run/link"), os.Mkdir(dir+"/run/folder", 0o755)); err != nil {
		t.Fatal(err)
	}
	run, err := Folder(dir + "/run")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = run.Close() }()
	for _, name := range []string{"link", "folder", "missing"} {
		if all, err := Open(int(run.Fd()), []File{{name, "/etc/x"}}); err == nil || all != nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func FuzzArg(f *testing.F) {
	for _, s := range []string{"-over=a:/b", "-over=a:b:/c:/d", "-over=:/", "-over=../x:/y", "-enter"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, ok, err := Arg(s)
		if !ok || err != nil {
			return
		}
		if again, ok, err := Arg(Args([]File{got})[0]); !ok || err != nil || again != got || strings.Contains(got.From, "/") {
			t.Errorf("%q: %+v, then %+v %v %v", s, got, again, ok, err)
		}
	})
}
