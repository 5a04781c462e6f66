package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// goneTime is what members of a supervisor that was killed get to die with it.
const goneTime = 10 * time.Second

// awaitGone returns when no member of an earlier supervisor is left: they die with it, but not at
// once, and two of one member would fight. run is where the configurations of this cluster are.
func awaitGone(ctx context.Context, run string) error {
	for end := time.Now().Add(goneTime); ; time.Sleep(20 * time.Millisecond) {
		left := membersOf(run)
		if len(left) == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(end) {
			return fmt.Errorf("the processes %v of an earlier berth up on this state folder do not end", left)
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended meanwhile
		}
	}
}

// membersOf are the processes that were started as members with a configuration in run.
func membersOf(run string) (out []int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		raw, err := os.ReadFile(filepath.Join(d, "cmdline"))
		if err != nil || !bytes.HasPrefix(raw, []byte("berth\x00run\x00")) || !bytes.Contains(raw, []byte("\x00"+run+"/")) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(d)); err == nil {
			out = append(out, pid)
		}
	}
	return out
}
