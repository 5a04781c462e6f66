package kernel

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// wanted are the modules of a machine. No balloon: clones of one memory must not give pages back.
var wanted = []string{"virtio_mmio", "virtio_console", "virtio_blk", "virtio_net", "virtio_rng", "overlay", "crc32c_intel", "erofs"}

// module is one that the package brings.
type module struct {
	path    string
	depends []string
	data    []byte
}

// modules reads those that are wanted, and what they need, below the folder lib/modules/VERSION. It
// returns them by file name, and the names in the order of loading. What is built in is left out.
func modules(dir string) (map[string][]byte, []string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(filepath.Join(dir, "kernel"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			files[nameOf(d.Name())] = path
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	built, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, nil, err
	}
	builtin := map[string]bool{}
	for line := range strings.Lines(string(built)) {
		builtin[nameOf(filepath.Base(strings.TrimSpace(line)))] = true
	}
	l := &loading{files: files, builtin: builtin, data: map[string][]byte{}}
	for _, name := range wanted {
		if err := l.add(name, 0); err != nil {
			return nil, nil, err
		}
	}
	return l.data, l.order, nil
}

// nameOf is the name of a module in a file name: "virtio-rng.ko.xz" is virtio_rng.
func nameOf(file string) string {
	name, _, _ := strings.Cut(file, ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

type loading struct {
	files   map[string]string
	builtin map[string]bool
	data    map[string][]byte
	order   []string
}

func (l *loading) add(name string, depth int) error {
	file := name + ".ko"
	if l.builtin[name] || slices.Contains(l.order, file) {
		return nil
	}
	path, ok := l.files[name]
	if !ok || depth > 16 {
		return fmt.Errorf("the kernel's package has no module %s", name)
	}
	data, err := readModule(path)
	if err != nil {
		return fmt.Errorf("module %s: %w", name, err)
	}
	needs, err := depends(data)
	if err != nil {
		return fmt.Errorf("module %s: %w", name, err)
	}
	for _, n := range needs {
		if err := l.add(n, depth+1); err != nil {
			return err
		}
	}
	l.data[file], l.order = data, append(l.order, file)
	return nil
}

// readModule unpacks where the package packs.
func readModule(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	switch filepath.Ext(path) {
	case ".xz":
		return exec.Command("xz", "-dc", path).Output()
	case ".zst":
		r, err := zstd.NewReader(bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return io.ReadAll(r)
	}
	return b, nil
}

// depends reads which modules one needs.
func depends(data []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, errors.New("no section .modinfo")
	}
	info, err := s.Data()
	if err != nil {
		return nil, err
	}
	var out []string
	for field := range strings.SplitSeq(string(info), "\x00") {
		list, ok := strings.CutPrefix(field, "depends=")
		for name := range strings.SplitSeq(list, ",") {
			if ok && name != "" {
				out = append(out, strings.ReplaceAll(name, "-", "_"))
			}
		}
	}
	return out, nil
}
