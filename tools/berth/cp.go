package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type cpCmd struct {
	userFlags
	As   string `help:"User inside: name, uid or uid:gid." placeholder:"USER"`
	From string `arg:"" help:"File, directory, [SESSION]:PATH, or - for standard input." placeholder:"FROM"`
	To   string `arg:"" help:"The same, or - for standard output." placeholder:"TO"`
}

// remote splits SESSION:PATH; ok is false for a local path. :PATH is in the
// default session; a path that is not absolute is below the user's home there.
func remote(s string) (session, file string, ok bool) {
	session, file, ok = strings.Cut(s, ":")
	if !ok || strings.ContainsAny(session, "/\\.") {
		return "", s, false
	}
	return or(session, string(ids.DefaultSession)), or(file, "."), true
}

func (c *cpCmd) Run(a *app) error {
	fromSession, from, down := remote(c.From)
	toSession, to, up := remote(c.To)
	switch {
	case down == up:
		return usage("one of FROM and TO must be SESSION:PATH, and the other a local path")
	case up && from != "-":
		if _, err := os.Stat(from); err != nil {
			return fmt.Errorf("read what is to be copied: %w", err)
		}
	}
	cl, name, err := c.named(a, fromSession+toSession)
	if err != nil {
		return err
	}
	defer cl.Close()
	s, err := a.open(cl, sdk.OpenOptions{Name: name})
	if err != nil {
		return err
	}
	defer s.Detach()
	t := &transfer{app: a, ctx: a.ctx, files: s.Files().As(c.As), out: copyOut{Skipped: []string{}}}
	if up {
		err = t.up(from, to)
	} else {
		err = t.down(from, to)
	}
	if err != nil {
		return err
	}
	for _, s := range t.out.Skipped {
		fmt.Fprintf(a.stderr, "berth: skipped %s: neither a file nor a directory\n", plain(s))
	}
	if to == "-" {
		return nil
	}
	return a.print(t.out, func() {
		fmt.Fprintln(a.stdout, t.out)
	})
}

// transfer is one copy.
type transfer struct {
	app   *app
	ctx   context.Context
	files *sdk.Files
	out   copyOut
}

// up copies into the session. A directory that is there gets the source
// inside it, as cp does.
func (t *transfer) up(from, to string) error {
	if from == "-" {
		return t.put(t.app.stdin, to, 0o644)
	}
	if info, err := t.files.StatTarget(t.ctx, to); err == nil && info.IsDir() {
		abs, err := filepath.Abs(from)
		if err != nil {
			return err
		}
		to = path.Join(to, filepath.Base(abs))
	} else if err != nil && !errors.Is(err, sdk.ErrNotFound) {
		return err
	}
	from, err := filepath.EvalSymlinks(from) // what the user names stands for what it leads to
	if err != nil {
		return fmt.Errorf("read what is to be copied: %w", err)
	}
	return filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		target := path.Join(to, filepath.ToSlash(rel))
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case info.IsDir():
			t.out.Dirs++
			return t.files.MakeDir(t.ctx, target, info.Mode().Perm())
		case info.Mode().IsRegular():
			f, err := os.Open(p)
			if err != nil {
				return err
			}
			defer f.Close()
			return t.put(f, target, info.Mode().Perm())
		}
		t.out.Skipped = append(t.out.Skipped, p)
		return nil
	})
}

func (t *transfer) put(r io.Reader, to string, mode fs.FileMode) error {
	n, err := t.files.Write(t.ctx, to, r, sdk.WriteOptions{Mode: mode})
	if err != nil {
		return err
	}
	t.out.Files++
	t.out.Bytes += n
	return nil
}

// down copies out of the session.
func (t *transfer) down(from, to string) error {
	info, err := t.files.StatTarget(t.ctx, from)
	if err != nil {
		return err
	}
	if to == "-" {
		if info.IsDir() {
			return usage("a directory cannot go to standard output")
		}
		return t.stream(from, t.app.stdout)
	}
	if local, err := os.Stat(to); err == nil && local.IsDir() {
		to = filepath.Join(to, path.Base(from))
	}
	return t.get(from, to, info)
}

// get copies a file, or a directory with all below it. Names come from the
// sandbox and are not trusted to be names.
func (t *transfer) get(from, to string, info sdk.FileInfo) error {
	switch info.Kind {
	case "file":
		return t.getFile(from, to, info.Mode.Perm())
	case "dir":
	default:
		t.out.Skipped = append(t.out.Skipped, from)
		return nil
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return fmt.Errorf("make the directory: %w", err)
	}
	t.out.Dirs++
	list, err := t.files.List(t.ctx, from)
	if err != nil {
		return err
	}
	for _, e := range list {
		if e.Path == "." || e.Path == ".." || strings.ContainsAny(e.Path, "/\x00") || !filepath.IsLocal(e.Path) {
			return fmt.Errorf("the session lists a file with the name %q, which cannot be written here", e.Path)
		}
		if err := t.get(path.Join(from, e.Path), filepath.Join(to, e.Path), e); err != nil {
			return err
		}
	}
	return nil
}

// getFile writes beside the target and puts it in place when it is whole.
func (t *transfer) getFile(from, to string, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(to), ".berth-cp-*")
	if err != nil {
		return fmt.Errorf("write the file: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := t.stream(from, f); err != nil {
		return err
	}
	if err := errors.Join(f.Chmod(mode), f.Close()); err != nil {
		return fmt.Errorf("write the file: %w", err)
	}
	if err := os.Rename(f.Name(), to); err != nil {
		return fmt.Errorf("write the file: %w", err)
	}
	return nil
}

func (t *transfer) stream(from string, w io.Writer) error {
	r, err := t.files.Read(t.ctx, from, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := io.Copy(w, r)
	if err != nil {
		return err
	}
	t.out.Files++
	t.out.Bytes += n
	return nil
}
