package hostagent

import (
	"github.com/berth-dev/berth/services/hostagent/internal/core"
)

// may is asked before each effect on a session, with the name of the place: the lease holds. Every
// place has a row in fencing_test.go.
func (h *host) may(place string) error {
	err := h.lease.check()
	if err != nil {
		h.meters.unleased(place)
	}
	return err
}

// placeOf names the event that was refused.
func placeOf(ev core.Event) string {
	switch ev.(type) {
	case core.Wake:
		return "wake"
	case core.Sleep:
		return "sleep"
	case core.Delete:
		return "delete"
	case core.Admit:
		return "admit"
	case core.Adopt:
		return "adopt"
	}
	return "other"
}

// drainReason is what a sleep for a drain says as its reason.
const drainReason = "drain"

// supersededReason is that of an epoch which was placed again elsewhere.
const supersededReason = "superseded"

// sleepWhy is what streams end with when the session is put to sleep for a reason.
func (h *host) sleepWhy(reason string) string {
	switch reason {
	case drainReason:
		return "handed over: host " + string(h.id) + " is draining"
	case supersededReason:
		return "handed over: the session runs on another host now"
	}
	return ""
}
