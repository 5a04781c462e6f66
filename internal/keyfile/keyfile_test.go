package keyfile

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

func TestOpenCreatesOnceAndReadsAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deep", "k.json")
	var wg sync.WaitGroup
	got := make([]Keys, 8)
	for i := range got {
		wg.Go(func() {
			k, err := Open(path)
			if err != nil {
				t.Error(err)
			}
			got[i] = k
		})
	}
	wg.Wait()
	for _, k := range got {
		if len(k) != 1 || !bytes.Equal(k.Newest().Secret, got[0].Newest().Secret) {
			t.Fatal("two creators got different keys")
		}
	}
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Errorf("%d files left, want 1", len(left))
	}
}

func TestRotateKeepsTheNewest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "k.json")
	first, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := Rotate(path, 2); err != nil {
			t.Fatal(err)
		}
	}
	keys, err := Read(path)
	if err != nil || len(keys) != 2 || keys[0].Version != 4 || keys[1].Version != 3 {
		t.Fatalf("%v, %v", keys, err)
	}
	if _, ok := keys.Version(first.Newest().Version); ok {
		t.Error("a dropped version is still there")
	}
}

func TestReadRefuses(t *testing.T) {
	const key = `"secret":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="`
	for name, tc := range map[string]struct {
		text string
		mode os.FileMode
		want errkind.Kind
	}{
		"readable by others": {`{"keys":[{"version":1,` + key + `}]}`, 0o644, errkind.Denied},
		"readable by group":  {`{"keys":[{"version":1,` + key + `}]}`, 0o640, errkind.Denied},
		"empty":              {``, 0o600, errkind.DataLoss},
		"no keys":            {`{"keys":[]}`, 0o600, errkind.DataLoss},
		"short key":          {`{"keys":[{"version":1,"secret":"AAAA"}]}`, 0o600, errkind.DataLoss},
		"oldest first":       {`{"keys":[{"version":1,` + key + `},{"version":2,` + key + `}]}`, 0o600, errkind.DataLoss},
		"unknown field":      {`{"keys":[{"version":1,` + key + `}],"x":1}`, 0o600, errkind.DataLoss},
		"cut":                {`{"keys":[{"version":1`, 0o600, errkind.DataLoss},
		"good":               {`{"keys":[{"version":1,` + key + `}]}`, 0o600, errkind.OK},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "k.json")
			if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, tc.mode); err != nil {
				t.Fatal(err)
			}
			if _, err := Open(path); errs.Kind(err) != tc.want {
				t.Errorf("%v, want kind %v", err, tc.want)
			}
		})
	}
}
