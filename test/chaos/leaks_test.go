package chaos

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
)

// inventories are what the hosts still have of sessions.
func (r *run) inventories() (left []string) {
	for _, host := range []string{"host-1", "host-2", "host-3"} {
		ctx, cancel := context.WithTimeout(r.t.Context(), opTime)
		reply := &hostv1.InventoryReply{}
		err := r.op.CallHost(ctx, host, "inventory", &hostv1.InventoryRequest{}, reply)
		cancel()
		if err != nil {
			left = append(left, fmt.Sprintf("%s: %v", host, err))
		}
		for _, s := range reply.GetSandboxes() {
			left = append(left, fmt.Sprintf("%s: sandbox %s", host, s))
		}
		for _, d := range reply.GetDisks() {
			left = append(left, fmt.Sprintf("%s: disk %s", host, d))
		}
		for _, s := range reply.GetStrays() {
			left = append(left, fmt.Sprintf("%s: stray %s", host, s))
		}
	}
	return left
}

// unfinished is a file of a writer that was killed: it counts as nothing, and is removed within hours
// (blobstore.Tidy), when no writer can be at it any more.
var unfinished = regexp.MustCompile(`\.[0-9a-f]{12,16}\.tmp$`)

// objects are the files of the store, when it is a folder, that belong to a session of this run.
func (r *run) objects() (left []string) {
	if r.store == "" {
		return nil
	}
	err := filepath.WalkDir(r.store, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // deleted while it was looked for
			return nil
		}
		if err != nil || e.IsDir() || unfinished.MatchString(path) {
			return err
		}
		for _, w := range r.workers {
			if key := w.keyNow(); key != "" && strings.Contains(path, key) {
				left = append(left, path)
			}
		}
		return nil
	})
	if err != nil {
		left = append(left, err.Error())
	}
	return left
}
