package mounts

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestShareIsFoundAndTakenBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounts need root")
	}
	dir := filepath.Join(t.TempDir(), "with space")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Share(dir); err != nil {
			t.Fatal(err)
		}
	}
	if is, err := IsMount(dir); err != nil || !is {
		t.Errorf("got %v, %v", is, err)
	}
	if got, err := Below(filepath.Dir(dir)); err != nil || !slices.Equal(got, []string{dir}) {
		t.Errorf("got %v, %v", got, err)
	}
	for range 2 {
		if err := Unshare(dir); err != nil {
			t.Fatal(err)
		}
	}
	if is, err := IsMount(dir); err != nil || is {
		t.Errorf("got %v, %v", is, err)
	}
	if is, err := IsMount(filepath.Join(dir, "missing")); err != nil || is {
		t.Errorf("got %v, %v", is, err)
	}
}
