package cache

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

func TestRoot(t *testing.T) {
	t.Setenv(EnvRoot, "/somewhere")
	if got, err := Root(); err != nil || got != "/somewhere" {
		t.Fatalf("Root() = %q, %v", got, err)
	}
	t.Setenv(EnvRoot, "")
	t.Setenv("XDG_CACHE_HOME", "/xdg")
	if got, err := Root(); err != nil || got != "/xdg/berth" {
		t.Fatalf("Root() = %q, %v", got, err)
	}
}

func TestFillBuildsOnceForAll(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "new", "parent")
	var built atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			path, err := Fill(parent, "entry", func(dir string) error {
				built.Add(1)
				return os.WriteFile(filepath.Join(dir, "f"), nil, 0o644)
			})
			if err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(filepath.Join(path, "f")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := built.Load(); n != 1 {
		t.Fatalf("built %d times; want once", n)
	}
}

func TestFillLeavesNothingOfAFailedBuild(t *testing.T) {
	parent := t.TempDir()
	broken := errors.New("broken")
	_, err := Fill(parent, "entry", func(dir string) error {
		os.WriteFile(filepath.Join(dir, "half"), nil, 0o644)
		return broken
	})
	if !errors.Is(err, broken) {
		t.Fatalf("Fill: %v; want the build's error", err)
	}
	// What a killed build leaves behind is not seen by the next one.
	os.MkdirAll(filepath.Join(parent, ".entry.tmp", "junk"), 0o755)
	path, err := Fill(parent, "entry", func(dir string) error {
		left, _ := os.ReadDir(dir)
		if len(left) != 0 {
			t.Errorf("build starts with %v; want an empty directory", left)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
}

func TestPointReplaces(t *testing.T) {
	link := filepath.Join(t.TempDir(), "current")
	for _, target := range []string{"a", "b"} {
		if err := Point(link, target); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.Readlink(link); got != target {
			t.Fatalf("link points to %q; want %q", got, target)
		}
	}
}
