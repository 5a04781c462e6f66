package identity

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
)

// reread is how often the file is looked at. A version that `berth key rotate`
// adds begins much later than that, so that every identity sends it with the
// others before one of them makes a session with it.
const reread = 2 * time.Second

// sessionKeys are the live versions of the key that session keys are derived
// with, as the file has them now. Safe for concurrent use.
type sessionKeys struct {
	path string
	log  *slog.Logger
	keys atomic.Pointer[keyfile.Keys]
}

// openSessionKeys reads the file, or makes it.
func openSessionKeys(path string, log *slog.Logger) (*sessionKeys, error) {
	keys, err := keyfile.Open(path)
	if err != nil {
		return nil, err
	}
	k := &sessionKeys{path: path, log: log}
	k.keys.Store(&keys)
	return k, nil
}

// secrets are every live version: first the one that new sessions are made with.
func (k *sessionKeys) secrets(now time.Time) [][]byte {
	made := k.keys.Load().Making(now)
	out := make([][]byte, 0, len(made))
	for _, v := range made {
		out = append(out, v.Secret)
	}
	return out
}

// watch takes over what the file becomes until ctx ends. A file that cannot be
// used changes nothing: what was read last goes on.
func (k *sessionKeys) watch(ctx context.Context) {
	tick := time.NewTicker(reread)
	defer tick.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := k.again()
		now := ""
		if err != nil {
			now = err.Error()
		}
		if now != said && err != nil {
			k.log.Error("the file of the session key cannot be used; the versions read before stay", "error", err)
		}
		said = now
	}
}

// again reads the file once more. One whose versions have other secrets than
// before is another installation's: with it every session would be lost.
func (k *sessionKeys) again() error {
	got, err := keyfile.Read(k.path)
	if err != nil {
		return err
	}
	had := *k.keys.Load()
	known := false
	for _, v := range got {
		old, ok := had.Version(v.Version)
		if ok && !bytes.Equal(old.Secret, v.Secret) {
			return errs.Errorf("read session key", errkind.Conflict, "version %d in %s is not what it was", v.Version, k.path)
		}
		known = known || ok
	}
	if !known {
		return errs.Errorf("read session key", errkind.Conflict, "%s has no version that was there before", k.path)
	}
	if len(got) != len(had) || got.Newest().Version != had.Newest().Version {
		k.log.Info("the versions of the session key changed", "live", len(got), "newest", got.Newest().Version)
	}
	k.keys.Store(&got)
	return nil
}

// tag returns a name for data that only the holders of the session key can
// compute. It uses the oldest live version, so that a rotation changes no name
// until that version is removed.
func (k *sessionKeys) tag(data []byte) string {
	keys := *k.keys.Load()
	mac := hmac.New(sha256.New, keys[len(keys)-1].Secret)
	mac.Write([]byte("berth/v1/audit"))
	mac.Write(data)
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(mac.Sum(nil)))
}
