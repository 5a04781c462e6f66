package containerd

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/idroot"
)

const (
	recordFile = "sandbox.json"
	idRange    = idroot.Size
)

// record is the first thing that is written of a sandbox and the last that goes. It need not
// survive a reboot: nothing that it tells of does.
type record struct {
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Epoch      ids.Epoch      `json:"epoch"`
	Tier       driver.Tier    `json:"tier"`
	// Slot chooses the range of host ids.
	Slot uint32 `json:"slot"`
	// OpenFiles is the limit of each process, 0 if it is the driver's own.
	OpenFiles uint64 `json:"open_files,omitempty"`
	// PIDs is the limit of processes that gVisor's kernel was started with, 0 for other tiers and for
	// sandboxes from before that limit.
	PIDs uint32 `json:"pids,omitempty"`
	// Device of the session's disk, "major:minor", where its rate can be limited.
	Device string `json:"device,omitempty"`
	// Bound: a sandbox that was prepared has all that its session asks for. One that has a session and is
	// not bound is half-claimed; it never becomes warm again.
	Bound bool `json:"bound,omitempty"`
}

func readRecord(dir string) (record, error) {
	var r record
	b, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, err
	}
	if ids.SandboxID(filepath.Base(dir)).IsWarm() { // the name follows from nothing
		return r, nil
	}
	if id := driver.ID(r.Session, r.Generation, r.Epoch); string(id) != filepath.Base(dir) {
		return r, fmt.Errorf("the record in %s is that of %s", filepath.Base(dir), id)
	}
	return r, nil
}

// write makes the sandbox's folder with its record and pipes. Idempotent.
func (r record) write(dir string, ch driver.Channel) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, recordFile+".new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, recordFile)); err != nil {
		return err
	}
	for _, p := range []string{ch.Stdin, ch.Stdout} {
		if err := unix.Mkfifo(p, 0o600); err != nil && err != unix.EEXIST {
			return fmt.Errorf("make pipe: %w", err)
		}
	}
	return nil
}
