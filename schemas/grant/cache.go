package grant

import (
	"context"
	"sync"
	"time"

	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"

	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	// cacheFresh is how old a verifier may be before it is fetched again
	// beside the path.
	cacheFresh = 30 * time.Second
	// cachePause is the shortest time between two fetches, so that forged
	// key names cannot make a host flood credentials.
	cachePause = 2 * time.Second
	// cacheWait bounds one fetch.
	cacheWait = 3 * time.Second
)

// Fetch asks credentials for its key set (RPC credentials.jwks).
type Fetch func(context.Context) (*credentialsv1.JwksReply, error)

// Cache keeps a verifier up to date. The last good one is used while
// credentials cannot be reached: grants are short-lived anyway.
type Cache struct {
	fetch Fetch

	mu    sync.Mutex
	v     *Verifier
	at    time.Time // of the last good fetch
	tried time.Time // of the last attempt
	busy  chan struct{}
}

// NewCache makes a cache that has fetched nothing yet.
func NewCache(fetch Fetch) *Cache { return &Cache{fetch: fetch} }

// For returns a verifier that knows the key of token, if credentials has
// that key. It waits for a fetch only if there is no verifier yet or the key
// is not known; else it renews an old verifier beside the path. It fails,
// with kind Unavailable, only if there never was a verifier.
func (c *Cache) For(ctx context.Context, token string) (*Verifier, error) {
	c.mu.Lock()
	v, now := c.v, time.Now()
	may := c.tried.IsZero() || now.Sub(c.tried) >= cachePause
	old := now.Sub(c.at) >= cacheFresh
	c.mu.Unlock()
	if v != nil && v.Knows(token) {
		if old && may {
			c.start()
		}
		return v, nil
	}
	if !may && c.running() == nil {
		return v, unavailable(v)
	}
	select {
	case <-c.start():
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.v, unavailable(c.v)
}

func unavailable(v *Verifier) error {
	if v != nil {
		return nil
	}
	return refuse(errkind.Unavailable, "the keys that grants are checked with cannot be fetched now")
}

func (c *Cache) running() chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.busy
}

// start begins a fetch unless one is under way, and returns a channel that
// is closed when it ends.
func (c *Cache) start() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy != nil {
		return c.busy
	}
	done := make(chan struct{})
	c.busy, c.tried = done, time.Now()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), cacheWait)
		defer cancel()
		var v *Verifier
		reply, err := c.fetch(ctx)
		if err == nil {
			v, err = FromReply(reply)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if err == nil {
			c.v, c.at = v, time.Now()
		}
		c.busy = nil
		close(done)
	}()
	return done
}
