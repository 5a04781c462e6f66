package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
)

// patch mends one place of a component's source. It is part of the cache key.
type patch struct {
	File string // in the module
	Old  string // stands there exactly once
	New  string
}

// freezePatch keeps a gVisor sandbox alive that is frozen more than once. The cgroup freezer interrupts the
// wait in which a thread of the sandbox asks its kernel for a system call; after two interruptions without a
// call between them the kernel's counter of questions is too high by one, and the one who waits for a
// question is told that there is none (ENOENT). gVisor takes that for the thread's death and ends the
// sandbox at its next allocation. Waiting again is right: the thread asks anew.
var freezePatch = patch{
	File: "pkg/sentry/platform/systrap/syscall_thread_unsafe.go",
	Old:  "if errno == unix.EINTR && t.subproc.alive() {",
	New:  "if (errno == unix.EINTR || errno == unix.ENOENT) && t.subproc.alive() {",
}

// patchedModules copies the module in source, the modules beside it and the pinned module, mended, to tmp. It
// returns the copy of source, which requires the mended module by a relative path: a path of this machine
// would stand in the binaries.
func patchedModules(source, pinned, tmp string, r recipe) (string, error) {
	if err := os.CopyFS(tmp, os.DirFS(filepath.Dir(source))); err != nil {
		return "", fmt.Errorf("copy the modules to mend: %w", err)
	}
	const mended = "mended"
	if err := patched(pinned, filepath.Join(tmp, mended), r.Patches); err != nil {
		return "", err
	}
	copied := filepath.Join(tmp, filepath.Base(source))
	file := filepath.Join(copied, "go.mod")
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	text = fmt.Appendf(text, "\nreplace %s => ../%s\n", r.Pin.Module, mended)
	return copied, os.WriteFile(file, text, 0o644)
}

// patched copies a module's source to dir and mends it there: the module cache stays as it is.
func patched(source, dir string, patches []patch) error {
	if err := os.CopyFS(dir, os.DirFS(source)); err != nil {
		return fmt.Errorf("copy the source to mend: %w", err)
	}
	for _, p := range patches {
		file := filepath.Join(dir, filepath.FromSlash(p.File))
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if n := bytes.Count(text, []byte(p.Old)); n != 1 {
			return fmt.Errorf("%s has %d places to mend, not one: look at the patch for this version", p.File, n)
		}
		if err := os.Remove(file); err != nil { // it is read-only
			return err
		}
		if err := os.WriteFile(file, bytes.Replace(text, []byte(p.Old), []byte(p.New), 1), 0o644); err != nil {
			return err
		}
	}
	return nil
}
