package driver

import (
	"context"

	"github.com/berth-dev/berth/schemas/ids"
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
	// RunDir, Guest, Init, Env, Hostname and Limits as in Spec; RunDir is that of the session later.
	RunDir   string
	Guest    string
	Init     []string
	Env      []string
	Hostname string
	Limits   Limits
}

// Warm reports whether a sandbox has been prepared and not claimed: it is of no session.
func (s Sandbox) Warm() bool { return s.Session == "" && s.ID != "" }

// Spec is what the warm sandbox can be claimed for, by whoever's session it is.
func (w WarmSpec) Spec(s ids.SessionKey, g ids.Generation, e ids.Epoch) Spec {
	return Spec{Session: s, Generation: g, Epoch: e, Tier: w.Tier, Image: w.Image, RunDir: w.RunDir, Guest: w.Guest,
		Init: w.Init, Env: w.Env, Hostname: w.Hostname, Limits: w.Limits}
}
