// Package simcore names the pure core of credentials for the simulation in test/sim. It adds nothing
// to it.
package simcore

import (
	"time"

	"github.com/berth-dev/berth/services/credentials/internal/core"
)

// What the core knows, is told and answers.
type (
	Policy     = core.Policy
	State      = core.State
	Generation = core.Generation
	Session    = core.Session
	Actor      = core.Actor
	Record     = core.Record
	SigningKey = core.SigningKey
	Refusal    = core.Refusal
	Event      = core.Event
	Command    = core.Command
)

// Events.
type (
	Tick    = core.Tick
	KeyMade = core.KeyMade
	Mint    = core.Mint
	Revoke  = core.Revoke
	DataKey = core.DataKey
)

// Commands.
type (
	MakeKey        = core.MakeKey
	DropKey        = core.DropKey
	Sign           = core.Sign
	EndGeneration  = core.EndGeneration
	DropRevocation = core.DropRevocation
	GiveDataKey    = core.GiveDataKey
	Audit          = core.Audit
)

// NewState returns a state without keys.
func NewState(p Policy) State { return core.NewState(p) }

// Decide is the core.
func Decide(s State, ev Event, now time.Time) (State, []Command, error) {
	return core.Decide(s, ev, now)
}
