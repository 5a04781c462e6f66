package scheduler

import (
	"strings"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// maxFailure bounds the reason that is stored of what a host could not do.
const maxFailure = 1000

// cut bounds what others said. What is cut ends with a whole character: a
// message with half of one can neither be sent nor stored.
func cut(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "")
}

// bound is an answer of a host of which no more is stored than there is room for
// in each session's record. What names a disk is never cut: it is refused whole.
func bound(a core.Answer) core.Answer {
	if a.Err != nil {
		f := *a.Err
		f.Reason = cut(f.Reason, maxFailure)
		a.Err = &f
	}
	var m core.ManifestInfo
	if a.Slept != nil {
		m = a.Slept.Manifest
	}
	if a.Woke != nil {
		m.ImageDigest = a.Woke.ImageDigest
	}
	if max(len(m.ID), len(m.Parent), len(m.ImageDigest), len(m.RestoredFrom)) > maxID {
		a.Woke, a.Slept = nil, nil
		a.Err = &core.Failure{Kind: errkind.Internal, Reason: "the host answered with an id that is too long"}
	}
	return a
}
