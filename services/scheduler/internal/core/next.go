package core

import "github.com/berth-dev/berth/schemas/ids"

// Command is work outside the state machine. It follows from the stored
// session alone, so that a new leader derives the same one.
type Command struct {
	Kind CommandKind
	Ref  Ref
	Host ids.Host
}

// Next returns what is to be done for a session now; nothing for one at rest.
func Next(s *Session) []Command {
	c := func(k CommandKind) Command {
		return Command{Kind: k, Host: s.Host, Ref: Ref{Session: s.Key, Generation: s.Generation, Epoch: s.Epoch}}
	}
	switch {
	case s.State == Waking:
		return []Command{c(HostWake)}
	case s.State == Sleeping:
		return []Command{c(HostSleep)}
	case s.State == Deleting:
		return []Command{c(Revoke), c(HostDelete)}
	case s.Wake != nil:
		return []Command{c(Retry)}
	case s.State == Failed && s.NeedsStop:
		return []Command{c(HostStop)}
	}
	return nil
}
