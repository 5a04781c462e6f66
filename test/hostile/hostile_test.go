package hostile

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// minRows is the least number of rows in all tiers that this project promises.
const minRows = 120

// users of a row: root of the sandbox, and somebody without rights.
var users = []string{"root", "nobody"}

// TestHostile runs all that this package has, in one installation: each part opens sessions of its own.
func TestHostile(t *testing.T) {
	e := testenv.Start(t, testenv.AllTiers...)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *testenv.Env)
	}{
		{"rows", programRows}, {"traces", traceRows}, {"greed", greedRows}, {"modules", moduleRows}, {"disks", diskRows},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(t, e) })
	}
}

// programRows runs every row of programs in every tier that has them.
func programRows(t *testing.T, e *testenv.Env) {
	program := probe(t)
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			w := enter(t, e, tier, program)
			control(t, w)
			before := look(t)
			for _, g := range groups {
				t.Run(strings.ReplaceAll(g.Name, " ", "-"), func(t *testing.T) {
					for _, row := range g.Rows {
						runRow(t, w, row)
					}
				})
			}
			for what, was := range before {
				if is := look(t)[what]; is != was {
					t.Errorf("the host's %s was %q and is %q", what, was, is)
				}
			}
			alive(t, w)
		})
	}
}

func runRow(t *testing.T, w *world, row Row) {
	for _, user := range users {
		if row.Users == "root" && user != "root" || row.Users == "user" && user == "root" {
			continue
		}
		t.Run(row.Name+" as "+user, func(t *testing.T) {
			counted(t, w.tier)
			o, err := w.try(user, row.Do...)
			if err != nil {
				t.Fatal(err)
			}
			switch why := row.Own[w.tier]; {
			case o.Through && why == "":
				t.Errorf("it came through: %s", o.Detail)
			case o.Through:
				t.Logf("it came through (%s), which is harmless: %s", o.Detail, why)
			default:
				t.Logf("refused: %s", o.Detail)
			}
		})
	}
}

// seen are the rows of group "another session" that the other session itself must come through: what
// is looked for is really there, and the probe finds it.
var seen = []string{"look-files", "look-names", "look-procs", "look-environ", "look-memory", "shm-file", "dial", "abstract"}

func control(t *testing.T, w *world) {
	own := *w
	own.attacker = w.victim
	for _, row := range anotherSession {
		if !slices.Contains(seen, row.Do[0]) || strings.Contains(strings.Join(row.Do, " "), "::1") {
			continue
		}
		t.Run("control/"+row.Name, func(t *testing.T) {
			o, err := own.try("root", row.Do...)
			if row.Do[0] == "look-memory" && strings.HasSuffix(o.Detail, " 0 bytes of memory") {
				t.Skip("this tier's kernel shows no memory of other processes, not even of its own session")
			}
			if err != nil || !o.Through {
				t.Errorf("the probe does not find in a session what is there: %s, %v", o.Detail, err)
			}
		})
	}
}

// alive: attacker and victim still answer, and the victim's secret is still its own.
func alive(t *testing.T, w *world) {
	t.Helper()
	for _, s := range []*sdk.Session{w.attacker, w.victim} {
		if out, err := s.Output(t.Context(), "echo", "here"); err != nil || strings.TrimSpace(string(out)) != "here" {
			t.Errorf("a session does not answer any more: %q, %v", out, err)
		}
	}
	if out, err := w.victim.Output(t.Context(), "cat", "/root/"+w.mark); err != nil || string(out) != w.mark {
		t.Errorf("the other session's file holds %q, %v", out, err)
	}
}

// greedy attempts, each for a few seconds, and what the neighbour may not lose meanwhile: its answer.
var greedy = []struct {
	name string
	do   []string
}{
	{"a fork bomb", []string{"fork-bomb", "3"}},
	{"a memory hog", []string{"memory-hog", "5"}},
	{"a full disk", []string{"disk-fill", "5"}},
	{"a flood of dirty pages", []string{"dirty-flood", "4"}},
	{"files without end", []string{"inode-hog", "3"}},
	{"all processors", []string{"burn", "3", "16"}},
}

// greedRows: how much the neighbour loses is `make bench-tiers`; here it must answer all the time, and
// the greedy one must be usable again afterwards.
func greedRows(t *testing.T, e *testenv.Env) {
	program := probe(t)
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			w := enter(t, e, tier, program)
			for _, g := range greedy {
				name := strings.ReplaceAll(g.name, " ", "-")
				if !t.Run(name, func(t *testing.T) { counted(t, tier); w.greed(t, g.do) }) {
					return // a session that is not usable again says nothing of the next
				}
			}
		})
	}
}

// inMemory is a file of the greedy session that is gone once its sandbox has ended.
const inMemory = "/tmp/before-the-greed"

// survives reports whether the greed must not end the greedy session's own sandbox. A fork bomb must not: the
// limit of processes refuses processes. Of virtual machines this was not tried.
func (w *world) survives(do []string) bool {
	return do[0] == "fork-bomb" && (w.tier == "container" || w.tier == "gvisor")
}

func (w *world) greed(t *testing.T, do []string) {
	if w.survives(do) {
		put(t, w.attacker, inMemory, nil)
	}
	done := make(chan error, 1)
	go func() {
		o, err := w.try("root", do...)
		if err == nil && o.Through && do[0] != "burn" {
			t.Errorf("there is no limit: %s", o.Detail)
		}
		done <- err
	}()
	answers := 0
	for {
		began := time.Now()
		if _, err := w.victim.Output(t.Context(), "true"); err != nil {
			t.Fatalf("the neighbour does not answer: %v", err)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the neighbour needed %s for an answer", took)
		}
		answers++
		select {
		case err := <-done:
			if err != nil {
				t.Logf("the greedy session's call ended with: %v", err)
			}
			t.Logf("the neighbour answered %d times", answers)
			w.recovers(t)
			if w.survives(do) {
				if out, err := w.attacker.Output(t.Context(), "ls", inMemory); err != nil {
					t.Errorf("the greed ended the greedy session's own sandbox: %q, %v", out, err)
				}
			}
			return
		default:
		}
	}
}

// recovery is long for emulated machines: five hundred processes of a fork bomb have to end there on a
// tenth of a processor.
const recovery = 3 * time.Minute

// recoveryTry bounds one command of a session that recovers: one that met the last of the greed may never end.
const recoveryTry = 30 * time.Second

// recovers waits until the greedy session works again; where running out of memory ends the whole
// sandbox it wakes anew.
func (w *world) recovers(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(recovery); ; time.Sleep(100 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(t.Context(), recoveryTry)
		out, err := w.attacker.Output(ctx, "echo", "here")
		cancel()
		if err == nil && bytes.Equal(bytes.TrimSpace(out), []byte("here")) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the greedy session is not usable again: %q, %v", out, err)
		}
		_ = w.attacker.Reopen(t.Context())
	}
}
