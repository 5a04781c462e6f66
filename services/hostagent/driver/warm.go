package driver

import (
	"context"
	"slices"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// Preparer makes sandboxes that are nobody's yet, so that a session need not wait for one to be built.
//
// A warm sandbox holds no identity, secret or file of anybody. It is claimed at most once: Claim notes
// durably (for the life of this boot) whose it is before it does anything else, and whatever fails
// after that, the sandbox is removed and never becomes warm again. It belongs to the driver that
// prepared it: the next driver on the same state lists it as Partial, for Stop to remove.
//
// A claimed sandbox keeps its name: its ID is the one that Prepare gave, not driver.ID of the session.
// Every other method of the driver takes that ID. Create of the same session, generation and epoch
// returns it; of another epoch it is Busy; List shows it with the session's names.
type Preparer interface {
	// Prepare makes a warm sandbox and returns when it can be claimed. Idempotent by name. Kinds as
	// Create.
	Prepare(ctx context.Context, w WarmSpec) (Sandbox, error)
	// Fits says in a few words why a sandbox that was prepared so cannot become the one of spec, or
	// nothing when it can: all that spec asks for, the limits too, is then bound by Claim. Pure.
	Fits(w WarmSpec, spec Spec) string
	// Claim makes a warm sandbox the one of spec. NotFound: it was never prepared by this driver, or is
	// gone. Conflict: it was claimed before. Unimplemented: it does not fit. Busy: as Create. These
	// change nothing. After any other error nothing of the sandbox is left, or List shows what is.
	Claim(ctx context.Context, warm ids.SandboxID, spec Spec) (Sandbox, error)
}

// WarmSpec asks for one warm sandbox.
type WarmSpec struct {
	// ID is its name for life: ids.NewWarmID, never used twice.
	ID    ids.SandboxID
	Tier  Tier
	Image Image
	// RunDir, Guest, Init, Env, Hostname, Limits, Link and Over as in Spec; RunDir is that of the session
	// later, and so is the link: a claim's Link is the warm one's, or it does not fit. The files of Over are
	// in the run folder when the sandbox is prepared.
	RunDir   string
	Guest    string
	Init     []string
	Env      []string
	Hostname string
	Limits   Limits
	Link     *network.Link
	Over     []Over
}

// Warm reports whether a sandbox has been prepared and not claimed: it is of no session.
func (s Sandbox) Warm() bool { return s.Session == "" && s.ID != "" }

// Spec is what the warm sandbox can be claimed for, by whoever's session it is.
func (w WarmSpec) Spec(s ids.SessionKey, g ids.Generation, e ids.Epoch) Spec {
	return Spec{Session: s, Generation: g, Epoch: e, Tier: w.Tier, Image: w.Image, RunDir: w.RunDir, Guest: w.Guest,
		Init: w.Init, Env: w.Env, Hostname: w.Hostname, Limits: w.Limits, Link: w.Link, Over: w.Over}
}

// SameNetwork says why a sandbox that was prepared so cannot become the one of spec for what it was given of
// a network, or nothing when it can.
func (w WarmSpec) SameNetwork(spec Spec) string {
	switch {
	case (w.Link == nil) != (spec.Link == nil) || w.Link != nil && *w.Link != *spec.Link:
		return "it has another link"
	case !slices.Equal(w.Over, spec.Over):
		return "other files lie over those of its root"
	}
	return ""
}
