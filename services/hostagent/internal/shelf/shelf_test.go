package shelf

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/script"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

var epoch0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// TestScripts: begin NAME cap=N kind=K image=I memory=M, and verbs that name one sandbox.
func TestScripts(t *testing.T) {
	script.Run(t, func(t *testing.T) func(string) string {
		s, now := New(), epoch0
		return func(line string) string { return play(t, s, &now, strings.Fields(line)) }
	})
}

func play(t *testing.T, s *Shelf, now *time.Time, words []string) string {
	args := map[string]string{"kind": "web", "image": "i1", "cap": "2", "memory": "1"}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		args[k] = v
	}
	num := func(k string) (n int) {
		if _, err := fmt.Sscan(args[k], &n); err != nil {
			t.Fatalf("%v: %v", words, err)
		}
		return n
	}
	name, said := ids.SandboxID(""), ""
	if len(words) > 1 {
		name = ids.SandboxID(words[1])
	}
	kind := Kind{args["kind"], "null"}
	switch words[0] {
	case "term":
		said = told(s.Hear(uint64(num("t"))))
	case "begin":
		begun, err := s.Begin(Item{Name: name, Kind: kind, Memory: uint64(num("memory"))}, num("cap"), *now)
		said = told(err)
		if err == nil && !begun {
			said = "it is there"
		}
	case "made":
		said = fmt.Sprint(s.Made(name, args["image"], *now))
	case "take":
		got, why := s.Take(kind, args["image"], func(n ids.SandboxID) string {
			if string(n) == args["unfit"] {
				return "it does not fit"
			}
			return ""
		})
		said = strings.TrimSpace(string(got) + " " + why)
	case "putback":
		s.PutBack(name)
	case "claim":
		said = fmt.Sprint(s.Claim(name))
	case "bind":
		s.Bind(name)
	case "moved":
		s.Moved(name, *now)
	case "giveup":
		said = fmt.Sprint("remove ", s.GiveUp(name))
	case "retire":
		remove, claimed := s.Retire(name, *now)
		said = fmt.Sprintf("remove %v claimed %v", remove, claimed)
	case "gone":
		s.Gone(name, *now)
	case "stale":
		s.Mark(func(it Item) string {
			if it.Name == name {
				return "old"
			}
			return it.Stale
		})
	case "missed":
		s.Missed(kind)
	case "excess":
		said = fmt.Sprint(s.Excess(uint64(num("memory"))))
	case "later":
		*now = now.Add(time.Duration(num("minutes")) * time.Minute)
	default:
		t.Fatalf("unknown event %v", words)
	}
	return show(s, said)
}

func told(err error) string {
	var r *Refusal
	if errors.As(err, &r) {
		return fmt.Sprintf("%s: %s", r.Kind, r.Reason)
	}
	return ""
}

func show(s *Shelf, said string) string {
	var b strings.Builder
	if said != "" {
		fmt.Fprintln(&b, said)
	}
	for _, it := range s.sorted() {
		fmt.Fprintln(&b, strings.TrimRight(fmt.Sprintf("  %s %s %s %s", it.Name, it.Kind, it.State, it.Stale), " "))
	}
	for _, k := range []Kind{{"job", "null"}, {"web", "null"}} {
		u, ok := s.Uses()[k]
		if !ok {
			continue
		}
		fmt.Fprintf(&b, "  = %s: %d here, %d ready, %d of memory, %d claimed, %d missed\n", k, s.Count(k), s.Ready()[k], s.Memory(), u.Claimed, u.Missed)
	}
	return b.String()
}

// TestInvariants drives random commands and checks what must hold whatever comes.
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, now := New(), epoch0
		var term uint64
		kinds := []Kind{{"web", "null"}, {"job", "null"}}
		caps := map[Kind]int{} // of the last begin that went well
		over, began := map[ids.SandboxID]bool{}, map[ids.SandboxID]bool{}
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			name := ids.SandboxID(fmt.Sprint("w", rapid.IntRange(1, 12).Draw(t, "name")))
			kind := kinds[rapid.IntRange(0, 1).Draw(t, "kind")]
			now = now.Add(time.Second)
			state := s.Is(name)
			switch rapid.IntRange(0, 9).Draw(t, "event") {
			case 0:
				n := rapid.Uint64Range(1, 5).Draw(t, "term")
				err := s.Hear(n)
				if (err != nil) != (n < term) {
					t.Fatalf("term %d after %d: %v", n, term, err)
				}
				term = max(term, n)
			case 1, 2:
				most := rapid.IntRange(0, 4).Draw(t, "cap")
				before := s.Count(kind)
				begun, err := s.Begin(Item{Name: name, Kind: kind, Memory: 1}, most, now)
				if begun && (before >= most || over[name] || state != "") {
					t.Fatalf("%s began with %d of %d, state %q, used up %v", name, before, most, state, over[name])
				}
				if err != nil && told(err) == "" {
					t.Fatalf("%v is no refusal", err)
				}
				if begun {
					caps[kind] = most
				} else {
					caps[kind] = max(caps[kind], before)
				}
			case 3:
				s.Made(name, "i", now)
			case 4:
				if got, _ := s.Take(kind, "i", func(ids.SandboxID) string { return "" }); got != "" && (over[got] || began[got]) {
					t.Fatalf("%s was given out again", got)
				}
			case 5:
				s.PutBack(name)
				if began[name] && s.Is(name) == Ready {
					t.Fatalf("%s came back", name)
				}
			case 6:
				if s.Claim(name) {
					if state != Taken || began[name] {
						t.Fatalf("a claim of one that is %q", state)
					}
					began[name] = true
				}
			case 7:
				s.Bind(name)
				if state == Claimed {
					s.Moved(name, now)
					over[name] = true
				}
			case 8:
				if state == Taken || state == Claiming || state == Claimed {
					s.GiveUp(name)
				} else if s.Retire(name, now); state == "" {
					over[name] = true
				}
			case 9:
				if state == Retiring {
					s.Gone(name, now)
					over[name] = true
				}
			}
			for _, k := range kinds {
				if s.Count(k) > caps[k] {
					t.Fatalf("%d of %s", s.Count(k), k)
				}
			}
		}
	})
}

// TestRefusalsHaveAKindOfTheContract.
func TestRefusalsHaveAKindOfTheContract(t *testing.T) {
	s := New()
	for want, err := range map[errkind.Kind]error{errkind.Invalid: s.Hear(0), errkind.OK: s.Hear(2), errkind.StaleEpoch: s.Hear(1)} {
		var r *Refusal
		if errors.As(err, &r) != (want != errkind.OK) || r != nil && r.Kind != want {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// TestWhatIsRetiredWhileAWakeHasItIsNotPutBack: nobody else gets it, and it is removed once that wake does
// without it.
func TestWhatIsRetiredWhileAWakeHasItIsNotPutBack(t *testing.T) {
	s, k, now := New(), Kind{"t", "null"}, time.Unix(0, 0)
	fits := func(ids.SandboxID) string { return "" }
	for _, name := range []ids.SandboxID{"w1", "w2"} {
		if begun, err := s.Begin(Item{Name: name, Kind: k, Memory: 5}, 9, now); !begun || err != nil {
			t.Fatal(begun, err)
		}
		s.Made(name, "", now)
		if got, _ := s.Take(k, "", fits); got != name {
			t.Fatalf("got %s", got)
		}
	}
	if remove, claimed := s.Retire("w1", now); remove || !claimed {
		t.Errorf("%v %v", remove, claimed)
	}
	if !s.PutBack("w1") || s.PutBack("w1") || s.PutBack("w2") || s.Is("w1") != Retiring || s.Is("w2") != Ready || s.Memory() != 10 {
		t.Errorf("%s, %s, %d", s.Is("w1"), s.Is("w2"), s.Memory())
	}
	if got, _ := s.Take(k, "", fits); got != "w2" || s.Count(k) != 2 {
		t.Errorf("got %s, %d are counted", got, s.Count(k))
	}
	if s.Gone("w1", now); s.Has("w1") || s.Count(k) != 1 {
		t.Error("it is still there")
	}
}
