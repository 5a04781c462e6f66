package disk

import (
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

// The pure rules of records, for whoever checks them without disks.

// AttachedFor is the record of an image that is attached for w.
func (r Record) AttachedFor(w Want) Record { return r.attachedFor(w) }

// Activated is the record once the session may write in epoch.
func (r Record) Activated(epoch ids.Epoch) Record { return r.activated(epoch) }

// Committed is the record once its pending manifest is the head.
func (r Record) Committed(now time.Time) Record { return r.committed(now) }
