package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/berth-dev/berth/sdk"
)

type diskExportCmd struct {
	userFlags
	Session string `arg:"" help:"Name or key of the session." placeholder:"SESSION"`
	File    string `arg:"" optional:"" default:"-" help:"File to write; default: standard output." placeholder:"FILE"`
}

func (c *diskExportCmd) Run(a *app) error {
	if c.File == "-" && isTerminal(a.stdout) {
		return usage("an archive is nothing for a terminal; name a FILE or redirect standard output")
	}
	if info, err := os.Stat(c.File); c.File != "-" && err == nil && !info.Mode().IsRegular() {
		return usage("%s is there already and is no file", c.File)
	}
	return c.userFlags.within(a, c.Session, true, func(s *sdk.Session) error {
		res, err := c.export(a, s)
		if err != nil {
			return err
		}
		a.sayLeft(res.Left)
		if c.File == "-" {
			return nil
		}
		out := archiveOutOf(s, res.Bytes, res.Entries, res.Left)
		return a.print(out, func() { fmt.Fprintln(a.stdout, out) })
	})
}

// export writes beside the target and puts it in place when it is whole.
func (c *diskExportCmd) export(a *app, s *sdk.Session) (sdk.ExportResult, error) {
	if c.File == "-" {
		return s.Export(a.ctx, a.stdout)
	}
	f, err := os.CreateTemp(filepath.Dir(c.File), ".berth-export-*")
	if err != nil {
		return sdk.ExportResult{}, fmt.Errorf("write the archive: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	res, err := s.Export(a.ctx, f)
	if err != nil {
		return res, err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return res, fmt.Errorf("write the archive: %w", err)
	}
	if err := os.Rename(f.Name(), c.File); err != nil {
		return res, fmt.Errorf("write the archive: %w", err)
	}
	return res, nil
}

type diskImportCmd struct {
	userFlags
	Session string `arg:"" help:"Name or key of the session." placeholder:"SESSION"`
	File    string `arg:"" help:"Tar archive, or - for standard input." placeholder:"FILE"`
	To      string `help:"Directory in the session, absolute; default: the root, which is where an export belongs." default:"/" placeholder:"PATH"`
}

func (c *diskImportCmd) Run(a *app) error {
	if !strings.HasPrefix(c.To, "/") || len(c.To) > 4096 || strings.ContainsRune(c.To, 0) {
		return usage("--to must be an absolute path")
	}
	in := a.stdin
	if c.File == "-" {
		if isTerminal(a.stdin) {
			return usage("standard input is a terminal; name a FILE or redirect it")
		}
	} else {
		f, err := os.Open(c.File)
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		defer f.Close()
		if info, err := f.Stat(); err == nil && info.IsDir() {
			return usage("%s is a directory; an import takes a tar archive", c.File)
		}
		in = f
	}
	return c.userFlags.within(a, c.Session, false, func(s *sdk.Session) error {
		res, err := s.Import(a.ctx, in, c.To)
		if err != nil {
			return err
		}
		a.sayLeft(res.Left)
		out := archiveOutOf(s, res.Bytes, res.Entries, res.Left)
		return a.print(out, func() { fmt.Fprintln(a.stdout, out) })
	})
}

// within opens a session of the user, which with known must be there already, and runs do in it.
func (u userFlags) within(a *app, session string, known bool, do func(*sdk.Session) error) error {
	cl, name, err := u.named(a, session)
	if err != nil {
		return err
	}
	defer cl.Close()
	if known {
		if err := exists(a.ctx, cl, name); err != nil {
			return err
		}
	}
	s, err := a.open(cl, sdk.OpenOptions{Name: name})
	if err != nil {
		return err
	}
	defer s.Detach()
	return do(s)
}
