//go:build linux

package microvm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail"
)

// Files of a sandbox's folder.
const (
	recordFile = "sandbox.json"
	// endFile is there once the machine has ended by itself.
	endFile = "end.json"
)

// record is the first thing that is written of a sandbox and the last that goes. It need not survive
// a reboot: nothing that it tells of does.
type record struct {
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Epoch      ids.Epoch      `json:"epoch"`
	// User is QEMU's user id.
	User      int           `json:"user"`
	DiskImage string        `json:"disk_image"`
	RunDir    string        `json:"run_dir"`
	Limits    driver.Limits `json:"limits"`
	// QEMU is the process, once it was started; Ready is set when the sandbox is whole.
	QEMU  jail.Process `json:"qemu"`
	Ready bool         `json:"ready"`
	// Maker is the process that prepared it, and Warm what for, while it is nobody's.
	Maker string           `json:"maker,omitempty"`
	Warm  *driver.WarmSpec `json:"warm,omitempty"`
	// Spare: its placeholder is a file.
	Spare bool `json:"spare,omitempty"`
}

// recordOf is the record of a sandbox that is about to be spec's.
func recordOf(spec driver.Spec) record {
	return record{Session: spec.Session, Generation: spec.Generation, Epoch: spec.Epoch,
		DiskImage: spec.DiskImage, RunDir: spec.RunDir, Limits: spec.Limits}
}

// is reports whether the record is that of the spec's sandbox.
func (r record) is(spec driver.Spec) bool {
	return r.Session == spec.Session && r.Generation == spec.Generation && r.Epoch == spec.Epoch
}

// end is how a machine ended by itself.
type end struct {
	Status   uint32 `json:"status"`
	OOMKills uint64 `json:"oom_kills"`
	At       int64  `json:"at"` // unix nanoseconds
}

func readRecord(dir string) (record, error) {
	var r record
	if err := readJSON(filepath.Join(dir, recordFile), &r); err != nil {
		return r, err
	}
	if name := ids.SandboxID(filepath.Base(dir)); name.IsWarm() {
		return r, nil // it keeps its name when it is claimed
	}
	if id := driver.ID(r.Session, r.Generation, r.Epoch); string(id) != filepath.Base(dir) {
		return r, fmt.Errorf("the record in %s is that of %s", filepath.Base(dir), id)
	}
	return r, nil
}

// write makes the sandbox's folder with its record. Idempotent.
func (r record) write(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return writeJSON(filepath.Join(dir, recordFile), r)
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

// writeJSON replaces a file in one step.
func writeJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
