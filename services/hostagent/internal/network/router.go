package network

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"
)

// Router is the namespace of a host that has the host's end of every link.
type Router struct {
	path string
	log  *slog.Logger
}

// Open makes the router at dir/router, or adopts the one that is there.
func Open(ctx context.Context, dir string, log *slog.Logger) (*Router, error) {
	return &Router{path: filepath.Join(dir, "router"), log: log}, nil
}

// Path is where the router's namespace is pinned.
func (r *Router) Path() string { return r.path }

// Make gives a sandbox its link, the one that it has if there is one.
func (r *Router) Make(ctx context.Context, sandbox string, tap bool) (Link, error) {
	return Link{}, nil
}

// Remove takes a sandbox's link away.
func (r *Router) Remove(ctx context.Context, sandbox string) error { return nil }

// List tells the links.
func (r *Router) List() []Link { return nil }

// Find tells a sandbox's link.
func (r *Router) Find(sandbox string) (Link, bool) { return Link{}, false }

// Bind lets a sandbox's link through.
func (r *Router) Bind(ctx context.Context, sandbox string) error { return nil }

// Unbind ends that.
func (r *Router) Unbind(ctx context.Context, sandbox string) error { return nil }

// Bound tells whose links are bound.
func (r *Router) Bound() []string { return nil }

// Lease lets bound links through for so long.
func (r *Router) Lease(ctx context.Context, left time.Duration) error { return nil }

// Check restores the router's table if it is not what it should be.
func (r *Router) Check(ctx context.Context) (restored bool, err error) { return false, nil }

// Drops counts dropped packets by reason.
func (r *Router) Drops(ctx context.Context) (map[string]uint64, error) { return nil, nil }

// Canary proves denial.
func (r *Router) Canary(ctx context.Context) error { return nil }

// Close lets go of the router and keeps it.
func (r *Router) Close() error { return nil }

// Destroy removes the router and every link.
func (r *Router) Destroy(ctx context.Context) error { return nil }

// Plug puts the link's peer into a sandbox's namespace.
func Plug(ctx context.Context, link Link, netnsPath string) error { return nil }

// OpenTap opens the link's tap.
func OpenTap(link Link) (*os.File, error) { return nil, os.ErrInvalid }
