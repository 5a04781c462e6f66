package leaks

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// secretPlaces are the folders of an installation whose files hold secrets, for
// their owner alone.
var secretPlaces = []string{"keys", "clients", "tls"}

// contents are folders of users' files, which may hold anything, and of images.
var contents = []string{"disks", "images", "modules", "rootfs", "snapshots"}

// Installation scans the state folder of a `berth up`, whether it runs or has
// ended, for what its keys and logins hold, too. Its folders of keys, logins
// and certificates are left out, and so are users' disks and images.
func Installation(dir string) ([]Finding, error) {
	s := &Scanner{MaxFile: 64 << 20, Skip: func(path string, isDir bool) bool {
		top, _, _ := strings.Cut(path, string(filepath.Separator))
		name := filepath.Base(path)
		switch {
		case slices.Contains(secretPlaces, top):
			return true
		case isDir:
			return slices.Contains(contents, name) || strings.HasPrefix(name, "io.containerd.content") || strings.HasPrefix(name, "io.containerd.snapshotter")
		}
		return name == "host.key" || name == "disks.xfs"
	}}
	for _, place := range secretPlaces {
		if err := s.registerBelow(filepath.Join(dir, place)); err != nil {
			return nil, err
		}
	}
	hosts, _ := filepath.Glob(filepath.Join(dir, "host", "*", "host.key"))
	for _, file := range hosts {
		if err := s.registerFile(file); err != nil {
			return nil, err
		}
	}
	return s.Dir(dir)
}

// registerBelow registers what the files of a folder keep secret.
func (s *Scanner) registerBelow(dir string) error {
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		return s.registerFile(path)
	})
}

// registerFile registers the secrets of one file: those of a JSON by the names
// of their members, private keys of a PEM line by line, and other files whole.
func (s *Scanner) registerFile(path string) error {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read what must not be found elsewhere: %w", err)
	}
	what := "the secret of " + filepath.Base(path)
	var doc any
	switch {
	case json.Unmarshal(raw, &doc) == nil:
		return s.registerMembers(what, doc)
	case bytes.Contains(raw, []byte("-----BEGIN")):
		return s.registerPEM(what, raw)
	}
	if raw = bytes.TrimSpace(raw); len(raw) >= leastKnown && len(raw) <= 4096 {
		return s.Register(what, raw)
	}
	return nil
}

func (s *Scanner) registerMembers(what string, doc any) error {
	var err error
	switch v := doc.(type) {
	case []any:
		for _, x := range v {
			err = errors.Join(err, s.registerMembers(what, x))
		}
	case map[string]any:
		for name, x := range v {
			text, ok := x.(string)
			switch {
			case !ok:
				err = errors.Join(err, s.registerMembers(what, x))
			case strings.Contains(text, "-----BEGIN"):
				err = errors.Join(err, s.registerPEM(what, []byte(text)))
			case slices.Contains([]string{"secret", "seed", "private", "token", "d"}, strings.ToLower(name)) && len(text) >= leastKnown:
				err = errors.Join(err, s.Register(what, []byte(text)))
				if key, derr := base64.StdEncoding.DecodeString(text); derr == nil && len(key) >= leastKnown {
					err = errors.Join(err, s.Register(what, key))
				}
			}
		}
	}
	return err
}

// registerPEM registers the lines of private keys.
func (s *Scanner) registerPEM(what string, raw []byte) error {
	private := false
	for line := range strings.Lines(string(raw)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "-----"):
			private = strings.HasPrefix(line, "-----BEGIN") && strings.Contains(line, "PRIVATE KEY")
		case private && len(line) >= 40:
			if err := s.Register(what, []byte(line)); err != nil {
				return err
			}
		}
	}
	return nil
}

// CheckInstallation fails the test for every secret that an installation left
// where none may be.
func CheckInstallation(t testing.TB, dir string) {
	t.Helper()
	found, err := Installation(dir)
	if err != nil {
		t.Errorf("look for secrets in %s: %v", dir, err)
	}
	for i, f := range found {
		if i == 20 {
			t.Errorf("and %d more", len(found)-i)
			break
		}
		t.Errorf("a secret leaked: %s", f)
	}
}
