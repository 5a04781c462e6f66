package wasm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/idroot"
)

// Files of a sandbox's folder.
const (
	recordFile = "sandbox.json"
	stdinFile  = "stdin"
	stdoutFile = "stdout"
	statusFile = "status" // what the first process ended with, by its own word

	idRange = idroot.Size
)

// record is the first thing that is written of a sandbox and the last that goes. One that is nobody's has
// no session.
type record struct {
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Epoch      ids.Epoch      `json:"epoch"`
	// Slot chooses the range of host ids.
	Slot uint32 `json:"slot"`
	// PID of the first process, and when it began by the kernel's clock, so that it is told from a later
	// one with the number; 0 while it is being made.
	PID   int    `json:"pid,omitempty"`
	Began uint64 `json:"began,omitempty"`
	// Whole: the sandbox stood and was handed out.
	Whole bool `json:"whole,omitempty"`
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
	name := ids.SandboxID(filepath.Base(dir))
	if id := driver.ID(r.Session, r.Generation, r.Epoch); id != name && !name.IsWarm() {
		return r, fmt.Errorf("the record in %s is that of %s", name, id)
	}
	return r, nil
}

// write replaces the record in the sandbox's folder, which it makes.
func (r record) write(dir string) error {
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
	return os.Rename(tmp, filepath.Join(dir, recordFile))
}

// makePipes makes the channel's pipes and the file for the status.
func makePipes(dir string) error {
	for _, name := range []string{stdinFile, stdoutFile} {
		if err := unix.Mkfifo(filepath.Join(dir, name), 0o600); err != nil && err != unix.EEXIST {
			return fmt.Errorf("make pipe: %w", err)
		}
	}
	return os.WriteFile(filepath.Join(dir, statusFile), nil, 0o600)
}

// of reports whether the sandbox is the one of the spec: by session, generation and epoch.
func (r record) of(s driver.Spec) bool {
	return r.Session == s.Session && r.Generation == s.Generation && r.Epoch == s.Epoch
}

// alive reports whether the first process runs: one that has ended and was not collected does not.
func (r record) alive() bool {
	state, began, err := process(r.PID)
	return r.PID > 0 && err == nil && began == r.Began && state != "Z" && state != "X"
}

// process reads the state and the time of birth of a process.
func process(pid int) (state string, began uint64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0, err
	}
	_, rest, ok := strings.Cut(string(b), ") ")
	for ok { // the name may hold anything
		var more string
		if _, more, ok = strings.Cut(rest, ") "); ok {
			rest = more
		}
	}
	f := strings.Fields(rest)
	if len(f) < 20 {
		return "", 0, fmt.Errorf("process %d: short stat", pid)
	}
	began, err = strconv.ParseUint(f[19], 10, 64)
	return f[0], began, err
}
