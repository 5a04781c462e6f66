package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/berth-dev/berth/sdk"
)

func (a *app) renderSnapshots(o snapshotsOut) {
	if len(o.Snapshots) == 0 {
		fmt.Fprintf(a.stdout, "session %s has no snapshots\n", o.Session)
		return
	}
	rows := [][]string{{"SNAPSHOT", "TAKEN", "AGE", "SIZE", "ADDED", "NOTES"}}
	for _, s := range o.Snapshots {
		var notes []string
		if s.Head {
			notes = append(notes, "head")
		}
		if s.ID == o.Restore {
			notes = append(notes, "restored by the next open")
		}
		if s.CrashConsistent {
			notes = append(notes, "crash-consistent")
		}
		if s.RestoredFrom != "" {
			notes = append(notes, "restored from "+s.RestoredFrom)
		}
		rows = append(rows, []string{plain(s.ID), when(s.TakenAt), age(a.time().Sub(s.TakenAt)), bytesWord(s.AllocatedBytes), bytesWord(s.AddedBytes), plain(strings.Join(notes, ", "))})
	}
	table(a.stdout, rows)
	if o.Unsaved {
		fmt.Fprintln(a.stdout, "\nwhat was written after the head is on the session's host only")
	}
}

func (a *app) renderRestore(o restoreOut) {
	if o.Pending {
		fmt.Fprintf(a.stdout, "the next open of session %s brings back snapshot %s, as of %s (%s ago)\n", o.Session, plain(o.Snapshot), when(o.AsOf), age(a.time().Sub(o.AsOf)))
		fmt.Fprintf(a.stdout, "its present state, as of %s, stays a snapshot: %s\n", when(o.HeadTakenAt), plain(o.Head))
		return
	}
	if o.TakenBack != "" {
		fmt.Fprintf(a.stdout, "the restore of snapshot %s is taken back\n", plain(o.TakenBack))
	}
	fmt.Fprintf(a.stdout, "the next open of session %s has its newest files, as of %s\n", o.Session, when(o.AsOf))
}

func (a *app) renderVerify(o verifyOut) {
	if o.Snapshots == 0 {
		fmt.Fprintf(a.stdout, "session %s was never saved: there is nothing to verify\n", o.Session)
		return
	}
	verdict := "all good"
	if len(o.Damaged) > 0 {
		verdict = strconv.Itoa(len(o.Damaged)) + " bad"
	}
	fmt.Fprintf(a.stdout, "%s of %s, %s: %s\n", count(int(o.Objects), "object", "objects"), count(int(o.Snapshots), "snapshot", "snapshots"), bytesWord(o.Bytes), verdict)
	if len(o.Damaged) == 0 {
		return
	}
	rows := [][]string{{"OBJECT", "WHAT IS WRONG", "SNAPSHOTS THAT NEED IT"}}
	for _, d := range o.Damaged {
		rows = append(rows, []string{plain(d.Object), plain(d.Reason), plain(some(d.Snapshots))})
	}
	table(a.stdout, rows)
}

// some names the first few.
func some(names []string) string {
	const few = 3
	if len(names) <= few {
		return strings.Join(names, ", ")
	}
	return strings.Join(names[:few], ", ") + " and " + strconv.Itoa(len(names)-few) + " more"
}

func (a *app) renderGrow(o growOut) {
	if o.Pending {
		fmt.Fprintf(a.stdout, "the disk of session %s has %s until its next wake, and %s from then on: its host may not resize it while it is mounted\n",
			o.Session, bytesWord(o.SizeBytes), bytesWord(o.AskedBytes))
		return
	}
	if o.SizeBytes > o.AskedBytes {
		fmt.Fprintf(a.stdout, "the disk of session %s has %s already; it does not shrink\n", o.Session, bytesWord(o.SizeBytes))
		return
	}
	fmt.Fprintf(a.stdout, "the disk of session %s has %s now\n", o.Session, bytesWord(o.SizeBytes))
}

func (o archiveOut) String() string {
	return count(int(o.Entries), "entry", "entries") + ", " + bytesWord(uint64(o.Bytes))
}

// sayLeft says on standard error what did not come along.
func (a *app) sayLeft(l sdk.Left) {
	for _, name := range l.SkippedNames {
		fmt.Fprintf(a.stderr, "berth: skipped %s\n", plain(name))
	}
	if more := l.Skipped - int64(len(l.SkippedNames)); more > 0 {
		fmt.Fprintf(a.stderr, "berth: skipped %d more\n", more)
	}
	if l.Attributes > 0 {
		fmt.Fprintf(a.stderr, "berth: %s could not be kept (owner, mode, time or extended)\n", count(int(l.Attributes), "attribute", "attributes"))
	}
}

func snapshotsWord(t *termsSnapshotsOut) string {
	if t == nil {
		return ""
	}
	text := "at checkpoints and sleep"
	if t.EveryMS > 0 {
		text = "every " + span(t.EveryMS) + " when changed, " + text
	}
	for _, k := range []struct {
		what string
		ms   float64
	}{{"all", t.KeepAllMS}, {"hourly", t.KeepHourlyMS}, {"daily", t.KeepDailyMS}} {
		if k.ms > 0 {
			text += "; " + k.what + " for " + span(k.ms)
		}
	}
	return text
}
