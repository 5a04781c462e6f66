package idrange

import (
	"os"
	"path/filepath"
	"testing"
)

func TestRangesOfIDsAreSharedByDrivers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ids")
	a, b := Claims{dir, "a", 3}, Claims{dir, "b", 3}
	for _, s := range []Claims{a, b} {
		if err := s.Recall(nil); err != nil {
			t.Fatal(err)
		}
	}
	one, _ := a.Take()
	two, _ := b.Take()
	three, err := a.Take()
	if err != nil || one == two || two == three || one == three {
		t.Fatalf("got %d, %d, %d, %v", one, two, three, err)
	}
	if _, err := b.Take(); err == nil {
		t.Error("a fourth range of three")
	}
	b.Give(one) // not its own
	if _, err := b.Take(); err == nil {
		t.Error("it gave away another's range")
	}
	// A restart of a with one sandbox left: the other range is free again.
	if err := a.Recall(map[uint32]bool{three: true}); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Take(); err != nil || got != one {
		t.Errorf("got %d, %v, want %d", got, err, one)
	}
	if _, err := os.Stat(a.file(three)); err != nil {
		t.Error(err)
	}
}
