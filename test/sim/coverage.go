package sim

import (
	"fmt"
	"io"

	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// Coverage counts how often each kind of fault and each outcome of interest happened.
type Coverage map[string]int

func (c Coverage) hit(what string) { c[what]++ }

// Add takes the counts of another simulation over.
func (c Coverage) Add(o Coverage) {
	for k, n := range o {
		c[k] += n
	}
}

// Print writes the counts in order.
func (c Coverage) Print(out io.Writer) {
	for _, k := range sortedKeys(c) {
		_, _ = fmt.Fprintf(out, "%10d  %s\n", c[k], k)
	}
}

// Missing lists what has to happen in a large run and never did.
func (c Coverage) Missing() (out []string) {
	for _, k := range faultKinds {
		if c["fault: "+k] == 0 {
			out = append(out, "fault: "+k)
		}
	}
	for _, k := range wanted {
		if c[k] == 0 {
			out = append(out, k)
		}
	}
	return out
}

// wanted are the outcomes without which a run proves little.
var wanted = []string{
	"answer: close ok", "answer: close unsaved", "answer: delete ok", "answer: open ok", "answer: open superseded", "checkpoint acknowledged",
	"compute dropped, disk kept", "compute of another owner removed", "data key destroyed", "data key refused", "deleted, and the store is not clean yet",
	"deposed leader that still believes, paused", "disk fetched from the store", "drain asked for", "drain move", "drain save", "drain sleep",
	"durable request delivered again", "effect refused: no lease", "end of retention announced", "end of retention refused as too early", "entry lost with its leader",
	"entry of a deposed leader committed", "event published again", "generation erased", "handoff placed", "handoff waits for its turn", "host drained",
	"host lost", "host refuses a stale epoch", "host removed", "host lost: displaced", "idle sleep asked for", "idle sleep refused as busy", "leader changed", "lease lost and had again", "disk at rest saved in a later epoch",
	"left compute cleared", "manifest refused", "refused: manifest stale_epoch", "message doubled", "message dropped", "message into a cut link", "message late", "message very late", "open proposal settled",
	"proposal of a deposed leader", "proposal that had become the head", "replica restored from a snapshot", "request by the durable door", "request sent again", "retention ended", "returned to its host",
	"sandbox adopted", "sandbox stopped by the watchdog", "sandboxes frozen", "scheduler refuses a stale answer", "sleep could not be saved", "sleep recalled", "stale disk dropped",
	"stale disk refused", "store away", "store full", "store slow", "stray sandbox removed", "unplaceable", "wake failed on the host", "wake on a full disk pool", "wake on a host without a lease",
	"wake takes long", "wake timed out", "wake: created", "wake: restored as of", "wake: restored, and something unsaved was lost", "wake: resumed", "warm sandbox claimed", "reserved warm sandbox was gone", "over share: starts cold", "write answered", "tier raised to that of the machine that wrote the disk",
}

// entryHits counts what entries came to.
func (w *World) entryHits(e sched.Entry, out sched.Outcome) {
	switch {
	case e.HostLost != nil && out.Events > 0:
		w.cov.hit("host lost")
		if len(out.Touched) > 0 {
			w.cov.hit("host lost: displaced")
		}
	case e.Join != nil && len(out.Touched) > 0:
		w.cov.hit("returned to its host")
	case e.Place != nil && out.Session != nil && out.Session.State == sched.Waking && isHandoff(out.Session):
		w.cov.hit("handoff placed")
	case out.Refused != nil:
		w.cov.hit("refused: " + e.Name() + " " + out.Refused.Kind.String())
	}
}
