//go:build linux

package microvm

import (
	"context"
	"time"
)

// A machine whose disk has no room below it (ENOSPC) is stopped by QEMU in the middle of the write, so
// that its guest sees no error and nothing is lost. Nobody but this driver lets it go on.

const (
	// statusFull is QEMU's name for the state of such a machine.
	statusFull = "io-error"
	// roomEvery is how often the write is tried again.
	roomEvery = time.Second
)

// mayStand has the state looked at.
func (v *vm) mayStand() {
	select {
	case v.stands <- struct{}{}:
	default:
	}
}

// keepGoing lets a machine that stands still for want of room go on, again until it does.
func (v *vm) keepGoing() {
	for {
		select {
		case <-v.stands:
		case <-v.ctx.Done():
			return
		}
		for v.goOn() {
			select {
			case <-time.After(roomEvery):
			case <-v.ctx.Done():
				return
			}
		}
		v.setFull(false)
	}
}

// goOn tries once; again says that it is to be looked at once more.
func (v *vm) goOn() (again bool) {
	ctx, cancel := context.WithTimeout(v.ctx, linkTime)
	defer cancel()
	var st struct{ Status string }
	if err := v.call(ctx, "query-status", nil, &st); err != nil {
		return v.ended() == nil // frozen, or the connection is made again
	}
	if st.Status != statusFull {
		return false
	}
	v.setFull(true)
	_ = v.call(ctx, "cont", nil, nil) // the next look says what came of it
	return true
}

func (v *vm) setFull(on bool) {
	was := on
	v.change(func() { was, v.full = v.full, on })
	if was != on {
		v.tell()
	}
}

// isFull says that the machine stands still because there is no room for what it writes.
func (v *vm) isFull() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.full
}
