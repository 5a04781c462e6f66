package disk

import "testing"

// TestASessionWhoseWritersAreStoppedCanBeEnded: a process that waits for a frozen disk cannot be
// killed, so a session that is to end is thawed and not frozen again; the next epoch is as any.
func TestASessionWhoseWritersAreStoppedCanBeEnded(t *testing.T) {
	frozen := make(chan Key, 8)
	s := openWith(t, Config{Dir: t.TempDir(), Frozen: func(k Key, _ string) { frozen <- k }}, nil)
	a := awake(t, s, 1, 1)
	s.freezeAll(Space{})
	<-frozen
	if err := s.LetGo(key(1)); err != nil {
		t.Fatal(err)
	}
	s.freezeAll(Space{})
	put(t, a, "f", "the last words") // it would wait for ever
	if err := s.Detach(t.Context(), key(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.LetGo(key(1)); err != nil {
		t.Errorf("of a disk that is not attached: %v", err)
	}
	if a := wake(t, s, 1, 2, "", 1); get(t, a, "f") != "the last words" {
		t.Error("another disk")
	}
	s.freezeAll(Space{})
	<-frozen
	s.thawAll()
	if n := len(frozen); n != 0 {
		t.Errorf("frozen %d times too often", n)
	}
}
