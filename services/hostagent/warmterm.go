package hostagent

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/shelf"
)

// heardTerm is the highest term of the pool that this host has heard of, for the next process: a leader
// that stood still while this one was replaced is an older one to the next as well.
type heardTerm struct {
	Term uint64    `json:"term"`
	At   time.Time `json:"at"`
}

const (
	// termKept is how long this process and the next hold to a term of which nothing is heard. Terms begin
	// anew with a control plane that was restored, and no leader stands still for so long.
	termKept = time.Hour
	// termNoted is how often it is noted that a term is still in force.
	termNoted = 5 * time.Minute
)

func (k *warmKeeper) termFile() string { return filepath.Join(k.h.cfg.Dir, "pool-term.json") }

// recall takes over the term that an earlier process heard of.
func (k *warmKeeper) recall() {
	var t heardTerm
	b, err := os.ReadFile(k.termFile())
	if err == nil {
		err = json.Unmarshal(b, &t)
	}
	switch age := time.Since(t.At); {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		k.h.log.Warn("the term of the pool is not known from before", "error", err)
	case age < termKept && t.Term > 0:
		k.heard, k.listened = t, time.Now().Add(-max(age, 0))
		_ = k.shelf.Hear(t.Term) // the first one
	}
}

// hear refuses a command of an older leader of the pool than this host has heard of.
func (k *warmKeeper) hear(term uint64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	if now.Sub(k.listened) > termKept {
		k.shelf.Unhear()
	}
	if err := k.shelf.Hear(term); err != nil {
		return err
	}
	k.listened = now
	other := term != k.heard.Term
	if !other && now.Sub(k.heard.At) < termNoted {
		return nil
	}
	next := heardTerm{Term: term, At: now.UTC()}
	if err := writeTerm(k.termFile(), next, other); err != nil {
		return errs.E("note the term of the pool", errkind.Unavailable, "", err)
	}
	k.heard = next
	return nil
}

// writeTerm replaces the file in one step; a term that is new is on stable storage then.
func writeTerm(path string, t heardTerm, sync bool) error {
	b, err := json.Marshal(t)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if sync && err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(path+".new", path)
	}
	return err
}

// heard refuses a command of an older leader once this host is ready, and counts it.
func (h *host) heard(ctx context.Context, op string, term uint64) error {
	select {
	case <-h.ready:
	case <-ctx.Done():
		return errs.E(op, errkind.Unavailable, "", "this host is still taking over what runs on it")
	}
	return h.refusal(op, h.keeper.hear(term))
}

// refusal gives what the shelf refused its kind, and counts an older leader.
func (h *host) refusal(op string, err error) error {
	var r *shelf.Refusal
	if !errors.As(err, &r) {
		return err
	}
	if r.Kind == errkind.StaleEpoch {
		h.meters.fenced(op)
	}
	return errs.E(op, r.Kind, "", r.Reason)
}
