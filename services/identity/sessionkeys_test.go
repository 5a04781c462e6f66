package identity

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
)

// TestAFileThatCannotBeUsedChangesNothing: with the keys of another
// installation, or with none, every session would be lost.
func TestAFileThatCannotBeUsedChangesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identity-session.json")
	k, err := openSessionKeys(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	first := k.secrets(time.Now())
	mine, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other := func(version uint32) func() {
		return func() {
			if _, err := keyfile.Change(path, func(keyfile.Keys) (keyfile.Keys, error) {
				return keyfile.Keys{{Version: version, Secret: slices.Repeat([]byte{7}, keyfile.Size)}}, nil
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tc := range []struct {
		what string
		do   func()
		want errkind.Kind
	}{
		{"another secret of the same version", other(1), errkind.Conflict},
		{"no version that was there", other(5), errkind.Conflict},
		{"cut off", func() { _ = os.WriteFile(path, mine[:20], 0o600) }, errkind.DataLoss},
		{"readable by others", func() { _ = os.Chmod(path, 0o644) }, errkind.Denied},
		{"gone", func() { _ = os.Remove(path) }, errkind.Unavailable},
	} {
		if err := os.WriteFile(path, mine, 0o600); err != nil {
			t.Fatal(err)
		}
		tc.do()
		if err := k.again(); errs.Kind(err) != tc.want {
			t.Errorf("%s: %v, want kind %v", tc.what, err, tc.want)
		}
		if now := k.secrets(time.Now()); !slices.EqualFunc(now, first, slices.Equal) {
			t.Errorf("%s: the keys changed", tc.what)
		}
	}
	if err := os.WriteFile(path, mine, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := keyfile.Add(path, 8, time.Now(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := k.again(); err != nil {
		t.Fatal(err)
	}
	if now := k.secrets(time.Now().Add(time.Second)); len(now) != 2 || !slices.Equal(now[1], first[0]) {
		t.Errorf("%d keys after one more version", len(now))
	}
}
