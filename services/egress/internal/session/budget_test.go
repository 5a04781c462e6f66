package session

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

const anything = `rules: [{name: x, allow: {hosts: [api.example.com], ports: [443], protocol: https}}]`

// What fails or is reset again and again does not fill the audit log, whatever its paths are, and no byte of
// it is lost.
func TestRepeatedFailuresDoNotFillTheAuditLog(t *testing.T) {
	w := newWorld(t, anything)
	s := w.bind(1, 1)
	for i := range 3000 {
		r := denial("api.example.com")
		r.Verdict, r.Reason = egressv1.Verdict_VERDICT_FAILED, string(policy.Unreachable)
		if i%3 == 0 {
			r.Verdict = egressv1.Verdict_VERDICT_RESET
		}
		r.Path, r.BytesOut, r.BytesIn = fmt.Sprintf("/%d", i), 10, 100
		must(t, s.Note(r))
	}
	s.flush(true)
	var failed, reset, out, in uint64
	for _, r := range w.records {
		out, in = out+r.GetBytesOut(), in+r.GetBytesIn()
		if r.GetVerdict() == egressv1.Verdict_VERDICT_RESET {
			reset += max(r.GetTimes(), 1)
		} else {
			failed += max(r.GetTimes(), 1)
		}
	}
	if n := len(w.records); n != 4 || failed != 2000 || reset != 1000 || out != 30_000 || in != 300_000 {
		t.Errorf("%d records stand for %d failures and %d resets with %d and %d bytes", n, failed, reset, out, in)
	}
}

// One session does not push the records of the others out of what keeps them.
func TestRecordsOfOneSessionAreBounded(t *testing.T) {
	w := newWorld(t, anything)
	s, other := w.bind(1, 1), w.bind(2, 1)
	begin := func() (n int) {
		for ; n < 2*recordsAtOnce; n++ {
			l, _, err := open(t, s, "api.example.com")
			if err != nil {
				refusedAs(t, err, policy.Rate)
				return n
			}
			l.Close()
		}
		return n
	}
	if n := begin(); n != recordsAtOnce {
		t.Errorf("%d were let out at once, %d may be", n, recordsAtOnce)
	}
	w.uses.clean(w.cfg.Now())
	s = w.bind(1, 2) // it slept and woke
	if n := begin(); n != 0 {
		t.Errorf("a session that woke again began %d more", n)
	}
	l, _, err := open(t, other, "api.example.com")
	must(t, err)
	l.Close()
	w.now.Add(int64(time.Second))
	if n := begin(); n != recordsPS {
		t.Errorf("%d were let out in a second, %d may be", n, recordsPS)
	}
	w.now.Add(int64(time.Hour))
	if w.uses.clean(w.cfg.Now()); len(w.uses.begun) != 0 {
		t.Errorf("%d sessions are remembered", len(w.uses.begun))
	}
}

// A path that a sandbox makes long does not make its record long, and the record says so.
func TestALongPathIsCutInItsRecord(t *testing.T) {
	w := newWorld(t, anything)
	s := w.bind(1, 1)
	for _, path := range []string{"/" + strings.Repeat("x", 8000), "/" + strings.Repeat("ä", 4000), "/" + strings.Repeat("y", maxPath-1)} {
		r := denial("api.example.com")
		r.Verdict, r.Path = egressv1.Verdict_VERDICT_ALLOWED, path
		must(t, s.Note(r))
		got := w.records[len(w.records)-1].GetPath()
		if len(got) > maxPath || !utf8.ValidString(got) || strings.HasSuffix(got, cut) != (len(path) > maxPath) {
			t.Errorf("a path of %d bytes is recorded with %d: %q", len(path), len(got), got[len(got)-10:])
		}
	}
}

// The audit log has that something is open until its record is kept.
func TestWhatIsNotRecordedStaysOpenInTheAuditLog(t *testing.T) {
	w := newWorld(t, anything)
	s := w.bind(1, 1)
	kept, _, err := open(t, s, "api.example.com")
	must(t, err)
	lost, _, err := open(t, s, "api.example.com")
	must(t, err)
	lost.Unrecorded()
	kept.Close()
	lost.Close()
	lost.Close()
	if n, open := w.begun.Load(), w.Figures().Open; n != 1 || open != 0 {
		t.Errorf("%d are noted as open, %d are", n, open)
	}
}
