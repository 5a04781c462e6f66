package replica

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	"github.com/hashicorp/raft"
)

// pins say which folder belongs to which replica. A replica that lost its
// folder has forgotten how it voted and what it acknowledged; under its old id
// it could elect a leader that lacks committed entries (hashicorp/raft 502).
// So each folder has a random name, each replica remembers the folders of the
// others before it speaks with them, and an id is free for another folder only
// after the group has removed it.
type pins struct {
	store raft.StableStore
	own   string

	mu     sync.Mutex
	folder map[string]string
}

var (
	keyFolder = []byte("berth-folder")
	keyPins   = []byte("berth-pins")
)

func openPins(store raft.StableStore) (*pins, error) {
	p := &pins{store: store, folder: map[string]string{}}
	own, err := get(store, keyFolder)
	if err != nil {
		return nil, fmt.Errorf("read the folder's name: %w", err)
	}
	if len(own) == 0 {
		own = []byte(rand.Text())
		if err := store.Set(keyFolder, own); err != nil {
			return nil, fmt.Errorf("name the folder: %w", err)
		}
	}
	p.own = string(own)
	raw, err := get(store, keyPins)
	if err != nil {
		return nil, fmt.Errorf("read the folders of the other replicas: %w", err)
	}
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &p.folder); err != nil {
			return nil, fmt.Errorf("read the folders of the other replicas: %w", err)
		}
	}
	return p, nil
}

// get returns nothing for a key that is not there; raft knows that by its text.
func get(s raft.StableStore, key []byte) ([]byte, error) {
	v, err := s.Get(key)
	if err != nil && err.Error() == "not found" {
		return nil, nil
	}
	return v, err
}

// check refuses a replica with another folder than the one it is known by.
func (p *pins) check(id, folder string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if was, ok := p.folder[id]; ok && was != folder {
		return fmt.Errorf("replica %s is known to its group with another folder: what it promised is lost with that one, "+
			"so remove %s and start it under a new replica id with join set", id, id)
	}
	return nil
}

// pin remembers, on disk before it returns, the folder of a replica.
func (p *pins) pin(id, folder string) error {
	if err := p.check(id, folder); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.folder[id] == folder {
		return nil
	}
	p.folder[id] = folder
	return p.save()
}

// keep forgets all but the members of the group.
func (p *pins) keep(members []raft.Server) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.folder)
	for id := range p.folder {
		if !slices.ContainsFunc(members, func(s raft.Server) bool { return string(s.ID) == id }) {
			delete(p.folder, id)
		}
	}
	if n == len(p.folder) {
		return nil
	}
	return p.save()
}

func (p *pins) save() error {
	raw, err := json.Marshal(p.folder)
	if err != nil {
		return err
	}
	return p.store.Set(keyPins, raw)
}
