package hostend_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// With BERTH_TEST_RUNTIME=/path/to/runc or .../runsc the tests that start a guest
// do so as PID 1 of a container of that runtime. Its root is that of this
// machine, so that programs and temporary directories are the same.

// containerCommand makes a bundle and returns the command that runs it, and how
// to ask it to end.
func containerCommand(t testing.TB, runtime string) (run *exec.Cmd, terminate func() error) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "berth-guest-")
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "rootfs")
	id := filepath.Base(dir)
	isGVisor := strings.Contains(filepath.Base(runtime), "runsc")
	args := []string{"--root", filepath.Join(dir, "state")}
	if isGVisor {
		args = append(args, "--network=none", "--ignore-cgroups", "--overlay2=none", "--host-uds=none")
	}
	t.Cleanup(func() {
		_ = exec.Command(runtime, append(args, "delete", "--force", id)...).Run()
		_ = unix.Unmount(root, unix.MNT_DETACH)
		_ = unix.Unmount(filepath.Join(dir, "state", "null-netns"), unix.MNT_DETACH)
		// Below root were the files of this machine: nothing is removed but by name.
		for _, name := range []string{"config.json", "rootfs", "state/null-netns", "state/" + id, "state", ""} {
			_ = os.Remove(filepath.Join(dir, name))
		}
	})
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("/", root, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", root, "", unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(containerConfig(t, root))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	terminate = func() error { return exec.Command(runtime, append(args, "kill", id, "TERM")...).Run() }
	return exec.Command(runtime, append(args, "run", "--bundle", dir, id)...), terminate
}

// containerConfig is the least that an OCI runtime takes.
func containerConfig(t testing.TB, root string) map[string]any {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	caps := []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SYS_ADMIN",
	}
	type m = map[string]any
	var namespaces []m
	for _, kind := range []string{"pid", "mount", "ipc", "uts"} {
		namespaces = append(namespaces, m{"type": kind})
	}
	mount := func(kind, at string, options ...string) m {
		return m{"destination": at, "type": kind, "source": kind, "options": options}
	}
	return m{
		"ociVersion": "1.0.2",
		"root":       m{"path": root, "readonly": false},
		"process": m{
			"args": []string{self}, "cwd": "/", "user": m{"uid": 0, "gid": 0},
			"env":             []string{"BERTH_TEST_ROLE=guest", "BERTH_TEST_IN_CONTAINER=1", fmt.Sprint("PATH=", os.Getenv("PATH"))},
			"noNewPrivileges": true,
			"capabilities":    m{"bounding": caps, "effective": caps, "permitted": caps},
		},
		"mounts": []m{
			mount("proc", "/proc"), mount("tmpfs", "/dev", "mode=755"),
			mount("devpts", "/dev/pts", "newinstance", "ptmxmode=0666", "mode=0620"), mount("tmpfs", "/dev/shm"),
		},
		"linux": m{"namespaces": namespaces},
	}
}
