package vault

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/http"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials/internal/platform"
	"github.com/berth-dev/berth/services/credentials/internal/platform/platformtest"
)

// open opens a bucket with the platform key that ref names.
func open(t *testing.T, conn *bus.Conn, ref, path string) *Vault {
	t.Helper()
	key, err := platform.Open(t.Context(), ref, path)
	if err != nil {
		t.Fatal(err)
	}
	v, err := Open(bustest.Context(t), conn, "BERTH_CREDENTIALS", key)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func create(ctx context.Context, v *Vault, key string, plain []byte) error {
	s, err := v.Seal(ctx, key, plain)
	if err != nil {
		return err
	}
	return v.Add(ctx, s)
}

func TestRecordsAreBoundToTheirPlaceAndKey(t *testing.T) {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("credentials"))
	path := filepath.Join(t.TempDir(), "k.json")
	v := open(t, conn, "file", path)
	ctx := bustest.Context(t)
	if err := create(ctx, v, "a", []byte("secret")); err != nil {
		t.Fatal(err)
	}
	if err := create(ctx, v, "a", []byte("other")); !errs.Is(err, errkind.Exists) {
		t.Errorf("created twice: %v", err)
	}
	raw, _, err := v.bucket.Get(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(raw, []byte("secret")) {
		t.Error("the record holds the secret")
	}
	if _, err := v.bucket.Put(ctx, "b", raw); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Get(ctx, "b"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a record that was moved: %v", err)
	}
	other := *v
	other.name = "BERTH_DATAKEYS"
	if _, err := other.open(ctx, "a", raw); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a record that was moved to another bucket: %v", err)
	}
	for i := range raw {
		bad := bytes.Clone(raw)
		bad[i] ^= 1
		if _, err := v.open(ctx, "a", bad); !errs.Is(err, errkind.DataLoss) {
			t.Errorf("byte %d was changed: %v", i, err)
		}
		if _, err := v.open(ctx, "a", raw[:i]); !errs.Is(err, errkind.DataLoss) {
			t.Errorf("cut after %d bytes: %v", i, err)
		}
	}
	// Who can write the bucket repairs the sum; the record still tells.
	bad := bytes.Clone(raw)
	bad[len(bad)-1] ^= 1
	copy(bad[2:], sum(bad))
	if _, err := v.open(ctx, "a", bad); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a forged record: %v", err)
	}
	if _, err := keyfile.Rotate(path, 2); err != nil {
		t.Fatal(err)
	}
	if got, err := open(t, conn, "file", path).Get(ctx, "a"); err != nil || string(got) != "secret" {
		t.Errorf("after a rotation of the platform key: %q, %v", got, err)
	}
}

func TestADestroyedRecordIsNotMadeAgainWhileItsMarkIsThere(t *testing.T) {
	e := bustest.Start(t)
	v := open(t, bustest.Connect(t, e, subjects.Service("credentials")), "", filepath.Join(t.TempDir(), "k.json"))
	ctx := bustest.Context(t)
	if err := create(ctx, v, "c", []byte("old")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := v.Destroy(ctx, "c"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := v.Get(ctx, "c"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a destroyed record: %v", err)
	}
	if err := create(ctx, v, "c", []byte("new")); !errs.Is(err, errkind.Exists) {
		t.Errorf("made again: %v", err)
	}
	if err := v.Compact(ctx, keepInTest); err != nil {
		t.Error(err)
	}
	if err := create(ctx, v, "c", []byte("new")); !errs.Is(err, errkind.Exists) {
		t.Errorf("made again after marks of before were removed: %v", err)
	}
}

const keepInTest = 1 << 50 // as good as for ever

func TestRecordsOfFormat1StayReadableAlsoWithAService(t *testing.T) {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("credentials"))
	platformtest.Vault(t)
	path := filepath.Join(t.TempDir(), "k.json")
	v := open(t, conn, "", path)
	ctx := bustest.Context(t)
	version := v.platform.FileKeys().Newest().Version
	// As releases before this one wrote it.
	raw := binary.BigEndian.AppendUint32([]byte{1}, version)
	raw = v.old[version].Seal(raw, nil, []byte("old secret"), []byte("berth/v1/record/BERTH_CREDENTIALS/a"))
	if _, err := v.bucket.Put(ctx, "a", raw); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"file", "hashivault://berth"} {
		v := open(t, conn, ref, path)
		if got, err := v.Get(ctx, "a"); err != nil || string(got) != "old secret" {
			t.Errorf("%s: %q, %v", ref, got, err)
		}
		if got, err := v.ReadNote(ctx, "a"); err != nil || string(got) != "old secret" {
			t.Errorf("%s: a revocation of before: %q, %v", ref, got, err)
		}
		for i := range raw {
			bad := bytes.Clone(raw)
			bad[i] ^= 1
			if _, err := v.open(ctx, "a", bad); !errs.Is(err, errkind.DataLoss) {
				t.Errorf("%s: byte %d was changed: %v", ref, i, err)
			}
		}
	}
	without := open(t, conn, "hashivault://berth", filepath.Join(t.TempDir(), "k.json"))
	if _, err := without.Get(ctx, "a"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("without the key file: %v", err)
	}
}

func TestANoteNeverStandsInForASecret(t *testing.T) {
	e := bustest.Start(t)
	v := open(t, bustest.Connect(t, e, subjects.Service("credentials")), "", filepath.Join(t.TempDir(), "k.json"))
	ctx := bustest.Context(t)
	if err := v.Note(ctx, "n", []byte("text")); err != nil {
		t.Fatal(err)
	}
	if got, err := v.ReadNote(ctx, "n"); err != nil || string(got) != "text" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := v.Get(ctx, "n"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a note was read as a secret: %v", err)
	}
}

// Two writers of one note: the one who did not see the other's is told, also where a note was destroyed.
func TestANoteIsReplacedByWhoSawItOnly(t *testing.T) {
	e := bustest.Start(t)
	v := open(t, bustest.Connect(t, e, subjects.Service("credentials")), "", filepath.Join(t.TempDir(), "k.json"))
	ctx := bustest.Context(t)
	var last uint64
	for round := range 3 {
		rev, err := v.NoteIf(ctx, "n", []byte("one"), 0)
		if err != nil || rev <= last {
			t.Fatalf("round %d: revision %d after %d, %v", round, rev, last, err)
		}
		if _, err := v.NoteIf(ctx, "n", []byte("other"), 0); !errs.Is(err, errkind.Conflict) {
			t.Errorf("made twice: %v", err)
		}
		last, err = v.NoteIf(ctx, "n", []byte("two"), rev)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := v.NoteIf(ctx, "n", []byte("late"), rev); !errs.Is(err, errkind.Conflict) {
			t.Errorf("replaced unseen: %v", err)
		}
		if got, at, err := v.NoteAt(ctx, "n"); err != nil || string(got) != "two" || at != last {
			t.Errorf("%q at %d, %v", got, at, err)
		}
		if err := v.Destroy(ctx, "n"); err != nil {
			t.Fatal(err)
		}
	}
	if err := create(ctx, v, "secret", []byte("secret")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := v.NoteAt(ctx, "secret"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a secret was read as a note: %v", err)
	}
}

// With the service away nothing is written, notes and destruction work, and
// bytes that rotted are told from a service that refuses.
func TestWithTheServiceAwayNothingIsMadeAndDestructionWorks(t *testing.T) {
	e := bustest.Start(t)
	f := platformtest.Vault(t)
	v := open(t, bustest.Connect(t, e, subjects.Service("credentials")), "hashivault://berth", filepath.Join(t.TempDir(), "k.json"))
	ctx := bustest.Context(t)
	if err := create(ctx, v, "a", []byte("secret")); err != nil {
		t.Fatal(err)
	}
	raw, _, err := v.bucket.Get(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	f.Fail(platformtest.Answer(http.StatusServiceUnavailable, `{"errors":["Vault is sealed"]}`))
	if _, err := v.Get(ctx, "a"); !errs.Is(err, errkind.Unavailable) {
		t.Error(err)
	}
	if err := create(ctx, v, "b", []byte("x")); !errs.Is(err, errkind.Unavailable) {
		t.Error(err)
	}
	raw[len(raw)-1] ^= 1
	calls := f.Calls.Load()
	if _, err := v.open(ctx, "a", raw); !errs.Is(err, errkind.DataLoss) || f.Calls.Load() != calls {
		t.Error(err)
	}
	if err := v.Note(ctx, "n", nil); err != nil {
		t.Error(err)
	}
	if err := v.Destroy(ctx, "a"); err != nil {
		t.Error(err)
	}
	if keys, err := v.Keys(ctx); err != nil || len(keys) != 1 || keys[0] != "n" {
		t.Errorf("%v, %v", keys, err)
	}
}

func TestRecordsComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := record{platform.By(rapid.Byte().Draw(t, "by")), rapid.SliceOfN(rapid.Byte(), 1, 600).Draw(t, "wrapped"), rapid.SliceOf(rapid.Byte()).Draw(t, "body")}
		got, err := decode(want.encode())
		if err != nil || got.by != want.by || !bytes.Equal(got.wrapped, want.wrapped) || !bytes.Equal(got.body, want.body) {
			t.Fatalf("%+v, %v", got, err)
		}
	})
}

func FuzzDecode(f *testing.F) {
	f.Add(record{platform.ByFile, []byte("w"), []byte("b")}.encode())
	f.Add([]byte{2})
	f.Fuzz(func(t *testing.T, raw []byte) {
		if rec, err := decode(raw); err == nil && !bytes.Equal(rec.encode(), raw) {
			t.Errorf("%x is read as %+v", raw, rec)
		}
	})
}
