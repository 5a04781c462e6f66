// Package initramfs makes the files that a virtual machine starts with: the kernel's modules and the
// guest agent as /init. It guarantees that the same inputs give the same bytes, and that a file made
// by Ensure is whole, on stable storage, and named after what is in it.
package initramfs

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Where the modules are, for who makes modules.cpio and who loads them.
const (
	ModulesDir  = "modules"
	ModulesList = "modules/order" // one file name of ModulesDir a line, in the order of loading
)

// WriteModules writes the archive of modules that Ensure takes; names are in the order of loading.
func WriteModules(out io.Writer, names []string, read func(name string) ([]byte, error)) error {
	w := NewWriter(out)
	if err := w.Dir(ModulesDir, 0o700); err != nil {
		return err
	}
	if err := w.File(ModulesList, 0o400, []byte(strings.Join(names, "\n")+"\n")); err != nil {
		return err
	}
	for _, name := range names {
		data, err := read(name)
		if err != nil {
			return fmt.Errorf("initramfs: module %s: %w", name, err)
		}
		if err := w.File(ModulesDir+"/"+name, 0o400, data); err != nil {
			return err
		}
	}
	return w.Close()
}

// Build writes the initramfs of the guest agent and the archive of modules.
func Build(out io.Writer, modules, guest []byte) error {
	w := NewWriter(out)
	for _, dir := range []string{"dev", "proc", "sys", "new", "run"} {
		if err := w.Dir(dir, 0o700); err != nil {
			return err
		}
	}
	// A Go program does not start without these.
	err := errors.Join(w.Char("dev/console", 0o600, 5, 1), w.Char("dev/null", 0o600, 1, 3), w.File("init", 0o555, guest), w.Close())
	if err != nil {
		return err
	}
	if _, err := out.Write(modules); err != nil {
		return fmt.Errorf("initramfs: write: %w", err)
	}
	return nil
}

// Ensure returns the path of the initramfs in dir of the files modules and guest, which it makes if it
// is missing. The name changes with what is in it, so several may be there; who started a machine
// from one keeps it. Safe for concurrent use, also by several processes.
func Ensure(dir, modules, guest string) (string, error) {
	mods, err := os.ReadFile(modules)
	if err != nil {
		return "", fmt.Errorf("initramfs: modules: %w", err)
	}
	agent, err := os.ReadFile(guest)
	if err != nil {
		return "", fmt.Errorf("initramfs: guest agent: %w", err)
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "1 %d %d ", len(mods), len(agent))
	_, _ = sum.Write(mods)
	_, _ = sum.Write(agent)
	path := filepath.Join(dir, "initramfs-"+hex.EncodeToString(sum.Sum(nil)[:8])+".cpio")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, place(path, func(f *os.File) error { return Build(f, mods, agent) })
}

// place makes a file whole or not at all.
func place(path string, fill func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".initramfs-*")
	if err != nil {
		return fmt.Errorf("initramfs: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	err = fill(f)
	if err == nil {
		err = f.Chmod(0o444)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("initramfs: %w", err)
	}
	return nil
}
