package enter

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/cover"
)

// The test binary is the first process too: a root is entered once in a process's life.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "enter" {
		first(os.Args[2], os.Args[3:])
		return
	}
	if len(os.Args) == 2 && os.Args[1] == "child" {
		fmt.Println(tries())
		return
	}
	os.Exit(m.Run())
}

// first makes the world of a sandbox that waits, and enters the root in it.
func first(world string, wants []string) {
	skeleton := filepath.Join(world, "skeleton")
	steps := []func() error{
		func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		func() error { return unix.Mount(skeleton, skeleton, "", unix.MS_BIND, "") },
		func() error { return unix.Mount("proc", skeleton+"/proc", "proc", 0, "") },
		func() error { return unix.Mount("run", skeleton+"/run", "tmpfs", 0, "") },
		func() error { return os.Mkdir(skeleton+"/run/below", 0o755) },
		func() error { return unix.Mount("below", skeleton+"/run/below", "tmpfs", unix.MS_RDONLY, "") },
		func() error { return os.Mkdir(skeleton+"/run/self", 0o755) },
		func() error { return unix.Mount(filepath.Dir(os.Args[0]), skeleton+"/run/self", "", unix.MS_BIND, "") },
		func() error { return runFolder(world, skeleton+RunFolder) },
		func() error { return unix.Mount(world+"/slot", skeleton+"/slot", "", unix.MS_BIND, "") },
		func() error { return unix.Chdir(skeleton) },
		func() error { return unix.PivotRoot(".", ".") },
		func() error { return unix.Unmount(".", unix.MNT_DETACH) },
		func() error { return unix.Chdir("/") },
		func() error { return Prepare() },
	}
	for i, f := range steps {
		if err := f(); err != nil {
			fmt.Println("step", i, err)
			return
		}
	}
	for _, folder := range wants {
		already, err := Root(folder)
		fmt.Println("root", already, err, errors.Is(err, ErrUnfit), errors.Is(err, ErrEntered))
	}
	fmt.Println(tries())
	child := exec.Command("/run/self/"+filepath.Base(os.Args[0]), "child")
	child.Stdin = os.Stdin // there is no /dev
	b, err := child.CombinedOutput()
	fmt.Print(string(b))
	if err != nil {
		fmt.Println("child", err)
	}
	if trust, err := os.ReadFile("/etc/trust"); err == nil {
		resolver, _ := os.ReadFile("/etc/resolv.conf")
		fmt.Println("over", string(trust), string(resolver), os.WriteFile("/etc/trust", nil, 0o644))
	}
	mounts, _ := os.ReadFile("/proc/self/mounts")
	var points []string
	for line := range strings.Lines(string(mounts)) {
		points = append(points, strings.Fields(line)[1])
	}
	fmt.Println(points)
}

// runFolder shows the world's run folder, if it has one, whose file is to lie over some of the root.
func runFolder(world, at string) error {
	if !exists(world + "/run") {
		return nil
	}
	Over([]cover.File{{From: "trust", To: "/etc/trust"}, {From: "trust", To: "/etc/nothing"}, {From: "trust", To: cover.Resolver}})
	return errors.Join(os.Mkdir(at, 0o755), unix.Mount(world+"/run", at, "", unix.MS_BIND, ""),
		unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
}

// tries says what the process can still do.
func tries() string {
	_, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
	return fmt.Sprintln("mount", unix.Mount("none", "/run", "tmpfs", 0, ""), "unmount", unix.Unmount("/run", 0), "tree", err,
		"namespace", unix.Unshare(unix.CLONE_NEWNS), "mine", exists("/etc/mine"), "slot", exists("/slot"), "anchor", exists("/anchor"))
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// world makes the folders that first needs; prepare changes the owner's root.
func world(t *testing.T, prepare func(root string)) string {
	t.Helper()
	if os.Geteuid() != 0 || testing.Short() {
		t.Skip("skipped: mounts need root, and a program without C for the rights of its threads")
	}
	dir := t.TempDir()
	for _, d := range []string{"skeleton/proc", "skeleton/run", "skeleton/slot", "slot/root/etc", "elsewhere"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"skeleton/anchor", "slot/root/etc/mine"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	prepare(filepath.Join(dir, "slot/root"))
	return dir
}

func enterIn(t *testing.T, dir string, folders ...string) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", append([]string{"enter", dir}, folders...)...)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Args[0] = self
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return string(b)
}

func TestARootIsEnteredOnceAndLeavesNoWayBack(t *testing.T) {
	out := enterIn(t, world(t, func(string) {}), "/slot/root", "/slot/root", "/elsewhere")
	no := "mount operation not permitted unmount operation not permitted tree operation not permitted " +
		"namespace operation not permitted mine true slot false anchor false\n"
	want := "root false <nil> false false\nroot true <nil> false false\n" +
		"root false the sandbox has a root already, which was at /slot/root false true\n" + no + "\n" + no + "\n" +
		"[/ /proc /run /run/below /run/self]\n"
	if out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
}

func TestFilesLieOverThoseOfTheRootThatIsEntered(t *testing.T) {
	dir := world(t, func(root string) {
		err := errors.Join(os.WriteFile(root+"/etc/real", []byte("theirs"), 0o644), os.Symlink("real", root+"/etc/trust"),
			os.Mkdir(root+"/../../run", 0o755), os.WriteFile(root+"/../../run/trust", []byte("ours"), 0o644))
		if err != nil {
			t.Fatal(err)
		}
	})
	out := enterIn(t, dir, "/slot/root")
	want := "over ours ours open /etc/trust: read-only file system\n[/ /proc /run /run/below /run/self /run/berth /etc/real /etc/resolv.conf]\n"
	if !strings.HasPrefix(out, "root false <nil> false false\n") || !strings.HasSuffix(out, want) {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	entries, err := os.ReadDir(filepath.Join(dir, "slot/root/etc"))
	if err != nil || len(entries) != 4 { // mine, real, trust, resolv.conf
		t.Errorf("in the root: %v, %v", entries, err)
	}
}

func TestALinkInTheOwnersRootIsNotFollowed(t *testing.T) {
	for name, spoil := range map[string]func(string) error{
		"link out":     func(root string) error { return os.Symlink("../../elsewhere", root+"/run") },
		"link in":      func(root string) error { return os.Symlink("etc", root+"/run") },
		"file":         func(root string) error { return os.WriteFile(root+"/run", nil, 0o644) },
		"pipe":         func(root string) error { return unix.Mkfifo(root+"/proc", 0o644) },
		"link to none": func(root string) error { return os.Symlink("nowhere", root+"/proc") },
	} {
		t.Run(name, func(t *testing.T) {
			dir := world(t, func(root string) {
				if err := spoil(root); err != nil {
					t.Fatal(err)
				}
			})
			out := enterIn(t, dir, "/slot/root", "/slot")
			lines := strings.Split(out, "\n")
			if !strings.HasSuffix(lines[0], " true false") {
				t.Errorf("it was not refused: %s", out)
			}
			// Nothing had changed: another root can be entered.
			if lines[1] != "root false <nil> false false" {
				t.Errorf("the refusal changed something: %s", out)
			}
			entries, err := os.ReadDir(filepath.Join(dir, "elsewhere"))
			if err != nil || len(entries) > 0 {
				t.Errorf("something was made outside: %v %v", entries, err)
			}
		})
	}
}

func TestOnlyTheTopmostFileSystemsAreTakenAlong(t *testing.T) {
	const table = `16 15 0:18 / / rw - 9p none rw
18 16 0:19 / /dev rw - dev none rw
20 16 0:21 / /run rw - tmpfs none rw
21 16 0:22 / /run2/deep rw - tmpfs none rw
23 16 0:24 / /slot rw - 9p none rw
24 18 0:25 / /dev/pts rw - devpts none rw
26 20 0:27 / /run/berth ro - 9p none ro
`
	if got, want := topmost(table, "/slot/root"), []string{"/dev", "/run", "/run2/deep"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAThreadThatKeptARightIsSeen(t *testing.T) {
	const good = "Name:\tx\nCapInh:\t0000000000000000\nCapPrm:\t00000000800405fb\nCapEff:\t00000000800405fb\nCapBnd:\t00000000800405fb\nCapAmb:\t0000000000000000\n"
	if err := verifyThread(good); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		var bad strings.Builder
		for line := range strings.Lines(good) {
			if strings.HasPrefix(line, name) {
				line = name + ":\t0000000000200000\n"
			}
			bad.WriteString(line)
		}
		if verifyThread(bad.String()) == nil {
			t.Errorf("a thread with CAP_SYS_ADMIN in %s passes", name)
		}
	}
	if verifyThread("Name:\tx\n") == nil {
		t.Error("a thread of which nothing is known passes")
	}
}
