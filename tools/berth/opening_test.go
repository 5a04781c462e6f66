package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
)

// An open that waits for a place is silent until its time is over.
func TestAnOpenSaysOnceWhyItTakesLong(t *testing.T) {
	full := sdk.Event{Body: &schedulerv1.Event{Detail: &schedulerv1.Event_Unplaceable{Unplaceable: &schedulerv1.Unplaceable{Reason: "no host has room"}}}}
	placed := sdk.Event{Body: &schedulerv1.Event{Detail: &schedulerv1.Event_Placed{Placed: &schedulerv1.Placed{Host: "h1"}}}}
	var early, late bytes.Buffer
	o := newWaitWord(&early, time.Hour)
	o.hear(full)
	o.end()
	if early.Len() > 0 {
		t.Errorf("before its time: %q", &early)
	}
	o = newWaitWord(&late, time.Hour)
	o.late = true // as the timer does
	for _, e := range []sdk.Event{{}, full, full, placed} {
		o.hear(e)
	}
	o.end()
	if got := late.String(); got != "berth: the session is not ready yet: no host has room\n" {
		t.Errorf("%q", got)
	}
}

// A command in a session whose files are older than they were does not know it.
func TestExecSaysThatFilesAreOlder(t *testing.T) {
	w, key, list := twoSnapshots(t)
	w.ok("disk", "restore", key, "--snapshot", list.Snapshots[1].ID)
	_, say, code := w.berth("", "exec", "--", "cat", "/work/f")
	if code != 0 || strings.Count(say, "restored as of") != 1 {
		t.Errorf("exit %d, %q", code, say)
	}
	if _, say, code := w.berth("", "exec", "--", "cat", "/work/f"); code != 0 || say != "" {
		t.Errorf("the next one: exit %d, %q", code, say)
	}
}
