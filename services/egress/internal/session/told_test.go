package session

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

func denial(name string) *egressv1.Record {
	return &egressv1.Record{Protocol: "https", Door: "transparent", Authority: name, Port: 443, Verdict: egressv1.Verdict_VERDICT_DENIED, Reason: string(policy.NoRule)}
}

func TestRepeatedRefusalsAreCountedNotLost(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	for range 100 {
		must(t, s.Note(denial("evil.test")))
	}
	if r, e := w.counts(); r != 1 || e != 1 {
		t.Fatalf("%d records and %d events at once", r, e)
	}
	w.now.Add(int64(recordWindow))
	s.flush(false)
	if r, e := w.counts(); r != 2 || e != 1 || w.records[1].GetTimes() != 99 || w.records[1].GetId() == w.records[0].GetId() {
		t.Fatalf("%d records, %d events, the last record stands for %d", r, e, w.records[r-1].GetTimes())
	}
	w.now.Add(int64(eventWindow))
	s.flush(false)
	if _, e := w.counts(); e != 2 || w.events[1].GetTimes() != 99 {
		t.Fatalf("%d events, the last stands for %d", e, w.events[e-1].GetTimes())
	}
	e := w.events[0]
	if e.GetText() != "https://evil.test was not let out: no rule allows this host. If it is needed, ask it@acme.example." || e.GetRecord() != w.records[0].GetId() {
		t.Errorf("the event says %q", e.GetText())
	}
}

// An event that stands for counted refusals names a record that was written: an operator allows by it.
func TestEventOfCountedRefusalsNamesARecordThatExists(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	for range 3 * int(eventWindow/time.Second) {
		must(t, s.Note(denial("evil.test")))
		w.now.Add(int64(time.Second))
		s.flush(false)
	}
	must(t, s.Note(denial("evil.test")))
	s.flush(true)
	r, e := w.counts()
	written := map[string]bool{}
	for _, x := range w.records[:r] {
		written[x.GetId()] = true
	}
	if e < 3 || len(written) != r {
		t.Fatalf("%d events, %d records of %d ids", e, r, len(written))
	}
	for _, x := range w.events[:e] {
		if !written[x.GetRecord()] {
			t.Errorf("an event of %d refusals names the record %q, which was never written", x.GetTimes(), x.GetRecord())
		}
	}
}

// Data in thousands of names fills neither the memory nor the audit log, and every one is counted.
func TestFloodOfRefusedNamesIsBounded(t *testing.T) {
	w := newWorld(t, pypi)
	s := w.bind(1, 1)
	for i := range 10_000 {
		must(t, s.Note(denial(fmt.Sprintf("d%d.evil.test", i))))
	}
	s.flush(true)
	total := uint64(0)
	for _, r := range w.records {
		total += max(r.GetTimes(), 1)
	}
	if n, _ := w.counts(); n > 2*maxLike || total != 10_000 {
		t.Errorf("%d records stand for %d refusals", n, total)
	}
}

func TestNoticeSaysWhatIsAllowedAndWhatWasRefused(t *testing.T) {
	w := newWorld(t, pypi)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	defer func() { cancel(); <-done }()
	s := w.bind(1, 1)
	for i := range 30 {
		must(t, s.Note(denial(fmt.Sprintf("d%d.evil.test", i))))
	}
	must(t, s.Note(denial("d29.evil.test")))
	var n notice
	for until := time.Now().Add(patience); ; {
		w.now.Add(int64(noticeEvery))
		select {
		case raw := <-w.notices:
			must(t, json.Unmarshal(raw, &n))
		case <-time.After(50 * time.Millisecond):
		}
		if len(n.Refused) == lastRefused && n.Refused[0].Times == 2 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("the last notice is %+v", n)
		}
	}
	if len(n.Allowed) != 2 || n.Contact != "it@acme.example" || n.Refused[0].Host != "d29.evil.test" || n.Refused[19].Host != "d10.evil.test" {
		t.Errorf("%+v", n)
	}
}

func TestNoticeOfALargePolicyIsBounded(t *testing.T) {
	doc := "rules:\n"
	for i := range 2000 {
		doc += fmt.Sprintf("  - {name: r%d, allow: {hosts: [h%d.example.com], ports: [443], protocol: https}}\n", i, i)
	}
	w := newWorld(t, doc)
	raw := w.bind(1, 1).Notice()
	var n notice
	must(t, json.Unmarshal(raw, &n))
	if len(raw) > maxNotice+1 || len(n.Allowed)+n.Omitted != 2000 || len(n.Allowed) == 0 {
		t.Errorf("%d bytes, %d allowed, %d omitted", len(raw), len(n.Allowed), n.Omitted)
	}
}
