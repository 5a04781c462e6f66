package archive

import "sync"

// maxCached bounds the headers kept in memory, in bytes as they are counted below.
const maxCached = 32 << 20

// headerCache keeps checked headers by id. A header never changes, so it never gets stale.
type headerCache struct {
	mu   sync.Mutex
	by   map[string]*header
	cost int
}

func (c *headerCache) get(id string) *header {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.by[id]
}

func (c *headerCache) add(h *header) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by[h.info.ID] != nil || costOf(h) > maxCached/4 {
		return
	}
	for id, old := range c.by { // any will do: it can be read again
		if c.cost+costOf(h) <= maxCached {
			break
		}
		delete(c.by, id)
		c.cost -= costOf(old)
	}
	if c.by == nil {
		c.by = map[string]*header{}
	}
	copied := *h // an index holds its chunk table too, and may go
	c.by[h.info.ID] = &copied
	c.cost += costOf(h)
}

func costOf(h *header) int { return 512 + 48*len(h.packs) + 256*len(h.history) }
