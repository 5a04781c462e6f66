// Package simcore names the pure core of identity for the simulation in test/sim. It adds nothing
// to it.
package simcore

import (
	"time"

	"github.com/berth-dev/berth/services/identity/internal/core"
)

// What the core goes by, knows, is told and answers.
type (
	Policy  = core.Policy
	Entry   = core.Entry
	Token   = core.Token
	State   = core.State
	Refusal = core.Refusal
	Event   = core.Event
	Command = core.Command
	Body    = core.Body
)

// Events.
type (
	Asked     = core.Asked
	TokenGood = core.TokenGood
	TokenBad  = core.TokenBad
	Awake     = core.Awake
)

// Commands.
type (
	VerifyToken   = core.VerifyToken
	CallLifecycle = core.CallLifecycle
	Mint          = core.Mint
	Audit         = core.Audit
)

// Verbs and doors.
const (
	Open    = core.Open
	Close   = core.Close
	Delete  = core.Delete
	Direct  = core.Direct
	Durable = core.Durable
)

// Decide is the core.
func Decide(s State, ev Event, now time.Time) (State, []Command, error) {
	return core.Decide(s, ev, now)
}
