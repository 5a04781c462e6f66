package spec

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/services/pool/internal/core"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

var templates = map[string]corev1.Tier{
	"default": corev1.Tier_TIER_GVISOR, "python": corev1.Tier_TIER_CONTAINER, "microvm": corev1.Tier_TIER_MICROVM, "wasm": corev1.Tier_TIER_WASM,
}

// TestExampleIsRead: the file that the documentation points to means what its comments say.
func TestExampleIsRead(t *testing.T) {
	raw, err := os.ReadFile("../../pools.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(raw, templates)
	if err != nil {
		t.Fatal(err)
	}
	want := []*poolv1.Spec{
		{Template: "default", Tier: corev1.Tier_TIER_GVISOR, Minimum: 4, Ratio: 0.1, Ceiling: 20, InFlight: 2, MaxAge: durationpb.New(12 * time.Hour),
			Wait: durationpb.New(200 * time.Millisecond), Share: 0.5, Zones: []string{"eu-1", "eu-2"}, Schedule: []*poolv1.Schedule{
				{Days: []uint32{1, 2, 3, 4, 5}, From: 8 * 60, To: 18 * 60, TimeZone: "Europe/Berlin", Minimum: 10},
				{From: 22 * 60, To: 6 * 60, Minimum: 1}}},
		{Template: "microvm", Tier: corev1.Tier_TIER_MICROVM, Ceiling: 2, InFlight: 2, MaxAge: durationpb.New(24 * time.Hour),
			Wait: durationpb.New(0), Share: 0.5},
	}
	if len(got) != len(want) {
		t.Fatalf("%d pools", len(got))
	}
	for i := range want {
		if !proto.Equal(got[i], want[i]) {
			t.Errorf("got  %v\nwant %v", got[i], want[i])
		}
		if _, err := core.NewSpec(got[i], time.LoadLocation); err != nil {
			t.Error(err)
		}
	}
}

// TestEveryKeyHasItsDefaultWritten: a key that a pool may have stands in the example.
func TestEveryKeyHasItsDefaultWritten(t *testing.T) {
	raw, err := os.ReadFile("../../pools.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range poolKeys {
		if !strings.Contains(string(raw), " "+key+":") {
			t.Errorf("%s is not in the example", key)
		}
	}
}

// TestFaultABadPoolFileIsTaken: every kind of bad input is refused with one sentence and its line.
func TestFaultABadPoolFileIsTaken(t *testing.T) {
	pool := func(lines string) string { return "pools:\n  - template: default\n    ceiling: 5\n    " + lines + "\n" }
	slot := func(s string) string { return pool("schedule:\n      - {" + s + "}") }
	for _, c := range []struct{ file, want string }{
		{"", "the file is empty"},
		{"# nothing\n", "the file is empty"},
		{"null", "line 1: keys and values are expected here: pools"},
		{"pools: 3", "line 1: a list is expected here"},
		{"pools:", "line 1: a list is expected here"},
		{"{}", "line 1: the file has no pools"},
		{"pool: []", `line 1: there is no key "pool" here; there are pools`},
		{"pools: []\npools: []", "line 2: pools is there twice"},
		{"pools: [3]", "line 1: keys and values are expected here: " + strings.Join(poolKeys, ", ")},
		{"pools:\n  - ceiling: 5", "line 2: the pool names no template"},
		{"pools:\n  - template:\n    ceiling: 5", "line 2: template needs a value"},
		{"pools:\n  - template: [a]\n    ceiling: 5", "line 2: template needs a value"},
		{"pools:\n  - ceiling: 5\n    template: nosuch", `line 3: there is no template "nosuch"; there are default, microvm, python, wasm`},
		{"pools:\n  - template: \"../x\\n\"", `line 2: there is no template "../x\n"; there are default, microvm, python, wasm`},
		{"pools:\n  - template: default\n    minimum: 3", "line 2: the pool of default has no ceiling"},
		{pool("minimum: 6"), "line 4: minimum is 6, above the ceiling of 5"},
		{pool("minimum: -1"), `line 4: minimum is "-1"; it is a whole number from 0 to 10000`},
		{pool("minimum: 2.5"), `line 4: minimum is "2.5"; it is a whole number from 0 to 10000`},
		{pool("minimum: many"), `line 4: minimum is "many"; it is a whole number from 0 to 10000`},
		{pool("minimum: '3'"), `line 4: minimum is "3"; it is a whole number from 0 to 10000`},
		{pool("minimum: 99999999999999999999"), `line 4: minimum is "99999999999999999999"; it is a whole number from 0 to 10000`},
		{pool("ceiling: 6"), "line 4: ceiling is there twice"},
		{"pools:\n  - template: default\n    ceiling: 10001", `line 3: ceiling is "10001"; it is a whole number from 1 to 10000`},
		{"pools:\n  - template: default\n    ceiling: 0", `line 3: ceiling is "0"; it is a whole number from 1 to 10000`},
		{pool("in_flight: 65"), `line 4: in_flight is "65"; it is a whole number from 1 to 64`},
		{pool("in_flight: 0"), `line 4: in_flight is "0"; it is a whole number from 1 to 64`},
		{pool("ratio: 10.1"), `line 4: ratio is "10.1"; it is a number from 0 to 10`},
		{pool("ratio: .nan"), `line 4: ratio is ".nan"; it is a number from 0 to 10`},
		{pool("ratio: .inf"), `line 4: ratio is ".inf"; it is a number from 0 to 10`},
		{pool("share: 1.5"), `line 4: share is "1.5"; it is a number from 0 to 1`},
		{pool("share: -0.5"), `line 4: share is "-0.5"; it is a number from 0 to 1`},
		{pool("share: 0"), "line 4: share is 0; no tenant could have any"},
		{pool("max_age: 12"), `line 4: max_age is "12"; it is a time with its unit from 1m to 720h, as in 90s, 200ms or 12h`},
		{pool("max_age: 1s"), `line 4: max_age is "1s"; it is a time with its unit from 1m to 720h, as in 90s, 200ms or 12h`},
		{pool("wait: -1s"), `line 4: wait is "-1s"; it is a time with its unit from 0s to 10s, as in 90s, 200ms or 12h`},
		{pool("wait: 1h"), `line 4: wait is "1h"; it is a time with its unit from 0s to 10s, as in 90s, 200ms or 12h`},
		{pool("tier: gvisor2"), `line 4: there is no tier "gvisor2"; there are container, gvisor, kata, microvm, wasm, null`},
		{pool("tier: unspecified"), `line 4: there is no tier "unspecified"; there are container, gvisor, kata, microvm, wasm, null`},
		{pool("tier: container"), "line 4: sessions of template default have at least tier gvisor; a pool of tier container would serve none"},
		{pool("tier: wasm"), "line 4: sessions of template default have at least tier gvisor; a pool of tier wasm would serve none"},
		{"pools:\n  - {template: wasm, ceiling: 5, tier: microvm}", "line 2: sessions of template wasm have at least tier wasm; a pool of tier microvm would serve none"},
		{"pools:\n  - {template: default, ceiling: 5}\n  - {template: default, ceiling: 6}", "line 3: template default has a pool already, on line 2"},
		{pool("zones: eu-1"), "line 4: a list is expected here"},
		{pool("zones: [a, a]"), "line 4: zone a is there twice"},
		{pool("zones: [\"a b\"]"), `line 4: "a b" is no name of a zone`},
		{slot(`to: "08:00", minimum: 1`), "line 5: this part of the schedule has no from"},
		{slot(`from: "08:00", to: "18:00", minimum: 6`), "line 5: the schedule's minimum is 6, above the ceiling of 5"},
		{slot(`from: "8:00", to: "18:00", minimum: 1`), `line 5: from is "8:00"; it is a time of the day as in "08:30"`},
		{slot(`from: 08:00, to: "24:01", minimum: 1`), `line 5: to is "24:01"; it is a time of the day as in "08:30"`},
		{slot(`from: "24:00", to: "10:00", minimum: 1`), `line 5: from is "24:00"; it is a time of the day as in "08:30"`},
		{slot(`from: "10:00", to: "10:00", minimum: 1`), "line 5: from and to are the same; a whole day is 00:00 to 24:00"},
		{slot(`from: "+1:00", to: "10:00", minimum: 1`), `line 5: from is "+1:00"; it is a time of the day as in "08:30"`},
		{slot(`days: [monday], from: "08:00", to: "18:00", minimum: 1`), `line 5: there is no day "monday"; there are sun, mon, tue, wed, thu, fri, sat`},
		{slot(`days: [mon, mon], from: "08:00", to: "18:00", minimum: 1`), "line 5: mon is there twice"},
		{slot(`days: [], from: "08:00", to: "18:00", minimum: 1`), "line 5: days names no day; leave it out for every day"},
		{slot(`time_zone: Mars/Olympus, from: "08:00", to: "18:00", minimum: 1`), `line 5: there is no time zone "Mars/Olympus"; one is named as in Europe/Berlin`},
		{slot(`time_zone: Local, from: "08:00", to: "18:00", minimum: 1`), `line 5: there is no time zone "Local"; one is named as in Europe/Berlin`},
		{slot(`time_zone: ../../etc/passwd, from: "08:00", to: "18:00", minimum: 1`), `line 5: there is no time zone "../../etc/passwd"; one is named as in Europe/Berlin`},
		{"pools: []\n---\npools: []\n", "line 2: the file holds more than one document"},
		{"a: &a [x]\npools: *a", "line 1: anchors and aliases are not allowed"},
		{"pools: &a [*a]", "line 1: anchors and aliases are not allowed"},
		{pool("minimum: !!int 3"), "line 4: tags are not allowed"},
		{"pools:\n\t- x", "line 2: this is no YAML: found character that cannot start any token"},
		{"pools: [", "line 1: this is no YAML: did not find expected node content"},
		{"pools: []\n#" + strings.Repeat("x", MaxFile), fmt.Sprintf("the file has %d bytes; at most 65536 are read", MaxFile+11)},
		{bomb(), "line 1: anchors and aliases are not allowed"},
	} {
		got, err := Parse([]byte(c.file), templates)
		if err == nil {
			t.Errorf("%.80q was read as %v", c.file, got)
		} else if err.Error() != c.want {
			t.Errorf("%.80q\ngot  %s\nwant %s", c.file, err, c.want)
		}
	}
}

// bomb would be a billion values if aliases were followed.
func bomb() string {
	var b strings.Builder
	b.WriteString("a: &a [x,x,x,x,x,x,x,x,x]\n")
	for c := 'b'; c <= 'i'; c++ {
		fmt.Fprintf(&b, "%c: &%c [%s]\n", c, c, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*%c,", c-1), 9), ","))
	}
	return b.String() + "pools: *i\n"
}

// TestAStrongerTierIsTaken: a pool may be of a stronger tier than its template's, which rules raise it to.
func TestAStrongerTierIsTaken(t *testing.T) {
	got, err := Parse([]byte("pools: [{template: python, tier: gvisor, ceiling: 3}]"), templates)
	if err != nil || got[0].Tier != corev1.Tier_TIER_GVISOR {
		t.Fatal(got, err)
	}
}

// FuzzParse: whatever a file holds, it is refused in one line or gives specs that can be worked with.
func FuzzParse(f *testing.F) {
	raw, err := os.ReadFile("../../pools.example.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(raw))
	f.Add("pools: [{template: default, ceiling: 3, share: 1e-300, ratio: 10, max_age: 1m}]")
	f.Add("pools: [{template: wasm, ceiling: 0x10}]")
	f.Add("pools: &a [*a]")
	f.Add("pools: [{template: default, ceiling: 5, schedule: [{from: '00:00', to: '24:00', minimum: 5, days: [sun]}]}]")
	f.Add(bomb())
	f.Fuzz(func(t *testing.T, text string) {
		specs, err := Parse([]byte(text), templates)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\r") || len(err.Error()) > 600 {
				t.Errorf("no sentence: %q", err)
			}
			return
		}
		seen := map[string]bool{}
		for _, s := range specs {
			c, err := core.NewSpec(s, time.LoadLocation)
			if err != nil || seen[s.Template] || s.Ceiling == 0 || s.Minimum > s.Ceiling {
				t.Fatalf("%v: %v", s, err)
			}
			seen[s.Template] = true
			if g := core.Want(c, core.Demand{}, 1000000, time.Unix(1e9, 0)); g.N < 0 || g.N > c.Ceiling {
				t.Errorf("%v wants %+v", s, g)
			}
			if !proto.Equal(s, c.Proto()) && len(s.Schedule) == 0 {
				t.Errorf("%v became %v", s, c.Proto())
			}
		}
	})
}
