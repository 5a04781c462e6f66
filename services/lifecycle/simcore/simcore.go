// Package simcore names the pure core of lifecycle for the simulation in test/sim. It adds nothing
// to it.
package simcore

import (
	"time"

	"github.com/berth-dev/berth/services/lifecycle/internal/core"
)

// What the core goes by, is told and answers.
type (
	Policy   = core.Policy
	Plan     = core.Plan
	Template = core.Template
	Limits   = core.Limits
	Event    = core.Event
	Command  = core.Command
	Verdict  = core.Verdict
)

// Events.
type (
	OpenAsked    = core.OpenAsked
	Scheduled    = core.Scheduled
	TimerDue     = core.TimerDue
	ActivityTold = core.ActivityTold
	SleepRefused = core.SleepRefused
	ExpireTold   = core.ExpireTold
	Found        = core.Found
)

// Commands.
type (
	Wake        = core.Wake
	Publish     = core.Publish
	Arm         = core.Arm
	AskActivity = core.AskActivity
	Sleep       = core.Sleep
	Expire      = core.Expire
)

// Kinds of timer.
const (
	TimerIdle   = core.TimerIdle
	TimerWarn   = core.TimerWarn
	TimerExpire = core.TimerExpire
)

// What scheduler says to an Expire.
const (
	Granted = core.Granted
	Early   = core.Early
	Moot    = core.Moot
)

// Decide is the core.
func Decide(p Policy, ev Event, now time.Time) ([]Command, error) { return core.Decide(p, ev, now) }
