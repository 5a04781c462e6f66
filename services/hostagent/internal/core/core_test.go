package core

import (
	"bufio"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/schemas/ids"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden scripts")

var epoch0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// TestScripts runs every testdata/*.txt: a line that begins with "> " is an event, what follows it
// is the outcome. "#" starts a comment, "reset" a new session.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			before, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			after := play(t, string(before))
			if *rewrite {
				if err := os.WriteFile(file, []byte(after), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if after != string(before) {
				t.Errorf("%s differs; got:\n%s\nrun with -rewrite to accept", file, after)
			}
		})
	}
}

func play(t *testing.T, script string) string {
	var out strings.Builder
	var s State
	lines := bufio.NewScanner(strings.NewReader(script))
	for lines.Scan() {
		line := lines.Text()
		switch {
		case line == "reset":
			s = State{}
			fmt.Fprintln(&out, line)
		case line == "> restart": // what is under way dies with the process
			s.Running, s.Stopping, s.Recalled = false, false, false
			fmt.Fprintf(&out, "%s\n  = %s\n", line, show(s))
		case strings.HasPrefix(line, "> "):
			fmt.Fprintln(&out, line)
			next, cmds, err := Decide(s, parse(t, strings.Fields(line[2:])))
			for _, c := range cmds {
				fmt.Fprintf(&out, "  %s\n", strings.TrimPrefix(fmt.Sprintf("%T%+v", c, c), "core."))
			}
			if r := RefusalOf(err); r != nil {
				fmt.Fprintf(&out, "  refused %s: %s\n", r.Kind, r.Reason)
			}
			s = next
			fmt.Fprintf(&out, "  = %s\n", show(s))
		case line == "" || strings.HasPrefix(line, "#"):
			fmt.Fprintln(&out, line)
		}
	}
	return out.String()
}

func show(s State) string {
	b := fmt.Sprintf("%s %s/%s", s.Phase, s.Generation, s.Epoch)
	for _, f := range []struct {
		on   bool
		name string
	}{{s.Running, "running"}, {s.Stopping, "stopping"}, {s.Recalled, "recalled"}, {s.Spent, "spent"}, {s.Slept, "slept"}} {
		if f.on {
			b += " " + f.name
		}
	}
	if s.Work > 0 {
		b += fmt.Sprintf(" work=%d", s.Work)
	}
	if !s.LastActivity.IsZero() {
		b += fmt.Sprintf(" last=%ds", int(s.LastActivity.Sub(epoch0).Seconds()))
	}
	return b
}

// parse reads "verb key=value ...": g and e are raft indexes, at and idle seconds.
func parse(t *testing.T, words []string) Event {
	t.Helper()
	args := map[string]string{}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		args[k] = v
	}
	num := func(key string) (n uint64) {
		if v, ok := args[key]; ok {
			if _, err := fmt.Sscan(v, &n); err != nil {
				t.Fatalf("%v: %v", words, err)
			}
		}
		return n
	}
	at := func(key string) time.Time {
		if _, ok := args[key]; !ok {
			return time.Time{}
		}
		return epoch0.Add(time.Duration(num(key)) * time.Second)
	}
	var g ids.Generation
	var e ids.Epoch
	if n := num("g"); n > 0 {
		g = ids.Generation{Incarnation: 1, Index: n}
	}
	if n := num("e"); n > 0 {
		e = ids.Epoch{Incarnation: 1, Index: n}
	}
	_, force := args["force"]
	_, failed := args["failed"]
	_, oom := args["oom"]
	_, atRest := args["atrest"]
	_, missing := args["missing"]
	switch words[0] {
	case "wake":
		return Wake{g, e}
	case "sleep":
		return Sleep{Generation: g, Epoch: e, IdleSince: at("idle"), Force: force, AtRest: atRest, Missing: missing, Why: args["why"]}
	case "delete":
		return Delete{g}
	case "admit":
		return Admit{g, e, at("at")}
	case "release":
		return Release{at("at")}
	case "lost":
		return Lost{Epoch: e, OOM: oom, Reason: "killed"}
	case "adopt":
		return Adopt{g, e, at("at")}
	case "disown":
		return Disown{}
	case "stop":
		return Stop{}
	case "ended":
		return Ended{Op: Op(args["op"]), At: at("at"), Failed: failed}
	}
	t.Fatalf("unknown event %v", words)
	return nil
}

// TestInvariants drives random events and checks what must hold whatever comes.
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s State
		var running Op
		spent := map[[2]uint64]bool{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			ev := drawEvent(t, running)
			before := s
			next, cmds, err := Decide(s, ev)
			if err != nil && (len(cmds) > 0 || next != normal(before)) {
				t.Fatalf("a refusal changed something: %+v -> %+v %v", before, next, cmds)
			}
			if order(next, normal(before).Generation, normal(before).Epoch) > 0 {
				t.Fatalf("went back from %+v to %+v", before, next)
			}
			if _, ok := ev.(Ended); ok {
				running = ""
			}
			for _, c := range cmds {
				if st, ok := c.(Start); ok {
					if running != "" {
						t.Fatalf("started %s while %s runs", st.Op, running)
					}
					running = st.Op
				}
			}
			if (running != "") != next.Running {
				t.Fatalf("running is %q, state %+v", running, next)
			}
			key := [2]uint64{next.Generation.Index, next.Epoch.Index}
			if next.Phase == Awake && spent[key] {
				t.Fatalf("epoch %v is awake twice", key)
			}
			if _, ok := ev.(Sleep); ok && before.Phase == Awake && next.Phase == Sleeping &&
				before.Work > 0 && !ev.(Sleep).Force {
				t.Fatalf("a busy session went to sleep: %+v", before)
			}
			if next.Phase == Sleeping && next.Stopping && next.Recalled {
				t.Fatalf("a sleep that was taken back goes on: %+v", next)
			}
			if next.Spent && (next.Phase != Sleeping || next.Stopping || !next.Running) {
				spent[key] = true
			}
			s = next
		}
	})
}

func normal(s State) State {
	if s.Phase == "" {
		s.Phase = Absent
	}
	return s
}

func drawEvent(t *rapid.T, running Op) Event {
	g := ids.Generation{Incarnation: 1, Index: rapid.Uint64Range(1, 2).Draw(t, "g")}
	e := ids.Epoch{Incarnation: 1, Index: rapid.Uint64Range(1, 4).Draw(t, "e")}
	at := epoch0.Add(time.Duration(rapid.IntRange(0, 100).Draw(t, "at")) * time.Second)
	kinds := []Event{Wake{g, e}, Sleep{Generation: g, Epoch: e, IdleSince: at}, Sleep{Generation: g, Epoch: e, Force: true},
		Sleep{Generation: g, Epoch: e, AtRest: rapid.Bool().Draw(t, "at rest")}, Sleep{Generation: g, Epoch: e, Force: true, Missing: true},
		Delete{g}, Admit{g, e, at}, Release{at}, Lost{Epoch: e}, Disown{}}
	if running == OpSleep {
		kinds = append(kinds, Stop{})
	}
	if running != "" {
		end := Ended{Op: running, At: at, Failed: rapid.Bool().Draw(t, "failed")}
		kinds = append(kinds, end, end, end)
	}
	return rapid.SampledFrom(kinds).Draw(t, "event")
}
