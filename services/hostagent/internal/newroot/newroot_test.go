package newroot

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/idroot"
	_ "github.com/berth-dev/berth/services/hostagent/internal/idroot/child"
)

const owner = 1 << 20

// inside is what the first process of these tests does: it lives on an empty root with file systems of its
// own, says so, and then answers what it sees.
func inside(root string) error {
	for _, err := range []error{
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("empty", root, "tmpfs", 0, "size=64k,mode=755"),
		os.Chdir(root), os.Mkdir(Slot, 0o700), os.Mkdir("proc", 0o755), os.Mkdir("tmp", 0o755),
		unix.Mount("proc", "proc", "proc", 0, ""), unix.Mount("kept", "tmp", "tmpfs", 0, "size=64k"),
		os.Mkdir("tmp/below", 0o755), unix.Mount("deeper", "tmp/below", "tmpfs", 0, "size=64k"),
		os.WriteFile("tmp/mine", []byte("kept"), 0o644),
		unix.PivotRoot(".", "."), unix.Unmount(".", unix.MNT_DETACH), os.Chdir("/"), unix.Sethostname([]byte("before")),
	} {
		if err != nil {
			return err
		}
	}
	fmt.Println("ready")
	in := bufio.NewReader(os.Stdin)
	for {
		if _, err := in.ReadString('\n'); err != nil {
			return nil
		}
		table, _ := os.ReadFile("/proc/self/mountinfo")
		mine, _ := os.ReadFile("/tmp/mine")
		cwd, _ := os.Getwd()
		name, _ := os.Hostname()
		names, _ := os.ReadDir(".")
		fmt.Printf("%q %q %q %q %q\n", table, mine, cwd, name, fmt.Sprint(names))
	}
}

func TestMain(m *testing.M) {
	if root := os.Getenv("NEWROOT_INSIDE"); root != "" {
		if err := inside(root); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// sandbox is a process in tables of its own.
type sandbox struct {
	in   io.Writer
	out  *bufio.Reader
	proc int
	pid  int
}

func newSandbox(t *testing.T) *sandbox {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	fd := -1
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NEWROOT_INSIDE="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWPID, PidFD: &fd}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); _ = unix.Close(fd) })
	s := &sandbox{in: in, out: bufio.NewReader(out), proc: fd, pid: cmd.Process.Pid}
	if got := s.line(t); got != "ready" {
		t.Fatal(got)
	}
	return s
}

func (s *sandbox) line(t *testing.T) string {
	t.Helper()
	got, err := s.out.ReadString('\n')
	if err != nil {
		t.Fatalf("it ended: %v %s", err, got)
	}
	return strings.TrimSpace(got)
}

// view is what the sandbox sees.
type view struct{ mounts, mine, cwd, name, list string }

func (s *sandbox) look(t *testing.T) (v view) {
	t.Helper()
	if _, err := fmt.Fprintln(s.in); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(s.line(t), "%q %q %q %q %q", &v.mounts, &v.mine, &v.cwd, &v.name, &v.list); err != nil {
		t.Fatal(err)
	}
	return v
}

// points are the mount points of a table, sorted.
func (v view) points() (out []string) {
	for _, line := range strings.Split(strings.TrimSpace(v.mounts), "\n") {
		out = append(out, strings.Fields(line)[4])
	}
	slices.Sort(out)
	return out
}

// makeRoot makes a root of an image without folders and a session's files, after change saw these.
func makeRoot(t *testing.T, change func(upper string) error) (root *os.File, upper string) {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"lower/etc", "disk/upper", "disk/work"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := change(dir + "/disk/upper"); err != nil {
		t.Fatal(err)
	}
	space, err := idroot.NewSpace(owner)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(space.Close)
	if root, err = space.Make(t.Context(), dir+"/lower", dir+"/disk"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return root, dir + "/disk/upper"
}

func TestNothingOfTheEmptyRootIsLeft(t *testing.T) {
	s := newSandbox(t)
	if v := s.look(t); v.name != "before" || !strings.Contains(v.list, Slot) {
		t.Fatalf("it is not as these tests want it: %+v", v)
	}
	root, upper := makeRoot(t, func(string) error { return nil })
	before := hostView(t)
	if err := (Swap{Process: s.proc, Root: root, Folders: []string{"proc", "tmp"}, Owner: owner, Hostname: "after"}).Do(); err != nil {
		t.Fatal(err)
	}
	v := s.look(t)
	if want := []string{"/", "/proc", "/tmp", "/tmp/below"}; !slices.Equal(v.points(), want) {
		t.Errorf("mounts at %v, not %v", v.points(), want)
	}
	if strings.Contains(v.mounts, "empty") || v.mine != "kept" || v.cwd != "/" || v.name != "after" || strings.Contains(v.list, Slot) || !strings.Contains(v.list, "etc") {
		t.Errorf("it sees %+v", v)
	}
	for _, name := range []string{"proc", "tmp"} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(upper, name), &st); err != nil || st.Mode != unix.S_IFDIR|folderMode || st.Uid != 0 || st.Gid != 0 {
			t.Errorf("/%s was made as %o of %d:%d, %v", name, st.Mode, st.Uid, st.Gid, err)
		}
	}
	after := hostView(t) // the thread that was in the sandbox ends a moment after its work
	for end := time.Now().Add(20 * time.Second); after != before && time.Now().Before(end); after = hostView(t) {
		time.Sleep(time.Millisecond)
	}
	if after != before {
		t.Errorf("this process sees %s, not %s", after, before)
	}
}

// hostView is what a thread left behind in a sandbox would change.
func hostView(t *testing.T) string {
	t.Helper()
	out, tables := []string{}, map[string]bool{}
	tasks, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		for _, what := range []string{"ns/mnt", "ns/uts", "root"} {
			if l, err := os.Readlink(filepath.Join(task, what)); err == nil && !tables[l] {
				tables[l] = true
				out = append(out, l)
			}
		}
	}
	name, _ := os.Hostname()
	slices.Sort(out)
	return name + fmt.Sprint(out)
}

// What a session leaves where a file system of the sandbox goes leads that file system elsewhere.
func TestWhatIsNoFolderIsRefusedAndTheSandboxUntouched(t *testing.T) {
	s := newSandbox(t)
	before := s.look(t)
	for what, c := range map[string]func(upper string) error{
		"a link":            func(u string) error { return os.Symlink("etc", u+"/tmp") },
		"a link to nothing": func(u string) error { return os.Symlink("nothing", u+"/tmp") },
		"a link out":        func(u string) error { return os.Symlink("../../../../../..", u+"/tmp") },
		"a magic link":      func(u string) error { return os.Symlink("/proc/self/root", u+"/tmp") },
		"a file":            func(u string) error { return os.WriteFile(u+"/tmp", nil, 0o644) },
		"a pipe":            func(u string) error { return unix.Mkfifo(u+"/tmp", 0o644) },
	} {
		root, upper := makeRoot(t, c)
		if err := Check(filepath.Dir(filepath.Dir(upper))+"/lower", upper, []string{"proc", "tmp"}); !errors.Is(err, ErrFolder) {
			t.Errorf("%s passes the look: %v", what, err)
		}
		err := Swap{Process: s.proc, Root: root, Folders: []string{"proc", "tmp"}, Owner: owner, Hostname: "after"}.Do()
		if !errors.Is(err, ErrFolder) {
			t.Errorf("%s: got %v", what, err)
		}
		if v := s.look(t); v != before {
			t.Errorf("%s: it sees %+v, not %+v", what, v, before)
		}
	}
	// What was deleted on the disk is missing, no hindrance.
	root, upper := makeRoot(t, func(u string) error { return unix.Mknod(u+"/tmp", unix.S_IFCHR, 0) })
	if err := Check(filepath.Dir(filepath.Dir(upper))+"/lower", upper, []string{"proc", "tmp"}); err != nil {
		t.Errorf("a deleted folder does not pass the look: %v", err)
	}
	if err := (Swap{Process: s.proc, Root: root, Folders: []string{"proc", "tmp"}, Owner: owner}).Do(); err != nil {
		t.Errorf("a deleted folder: %v", err)
	}
	if v := s.look(t); v.mine != "kept" || v.name != "before" {
		t.Errorf("it sees %+v", v)
	}
}

func TestASandboxThatEndedIsAnError(t *testing.T) {
	s := newSandbox(t)
	root, _ := makeRoot(t, func(string) error { return nil })
	if err := unix.Kill(s.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := s.out.ReadString('\n'); err == nil {
		t.Fatal("it lives")
	}
	if err := (Swap{Process: s.proc, Root: root, Folders: []string{"proc"}, Owner: owner}).Do(); err == nil {
		t.Error("its root was changed")
	}
}
