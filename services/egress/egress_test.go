package egress

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/egress/policy"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is a bus with the service, and an operator.
type world struct {
	t  testing.TB
	op *bus.Conn
}

func newWorld(t testing.TB, change ...func(*Config)) *world {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("egress"))
	cfg := NewConfig()
	for _, f := range change {
		f(&cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- Run(ctx, cfg, conn, bustest.Log(t), func() { close(ready) }) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	select {
	case <-ready:
	case <-time.After(30 * time.Second):
		t.Fatal("it is not ready")
	}
	return &world{t: t, op: bustest.Connect(t, e, subjects.Operator())}
}

func (w *world) apply(s *egressv1.Scope, doc string, replaces uint64) (uint64, error) {
	r, err := bus.Invoke[*egressv1.ApplyReply](bustest.Context(w.t), w.op, "egress", "apply", &egressv1.ApplyRequest{Scope: s, Document: []byte(doc), Replaces: replaces, By: "op"})
	return r.GetGeneration(), err
}

func (w *world) policies(s *egressv1.Scope) ([]*egressv1.Policy, error) {
	r, err := bus.Invoke[*egressv1.PoliciesReply](bustest.Context(w.t), w.op, "egress", "policies", &egressv1.PoliciesRequest{Scope: s})
	return r.GetPolicies(), err
}

func (w *world) remove(s *egressv1.Scope, replaces uint64) error {
	_, err := bus.Invoke[*egressv1.RemovePolicyReply](bustest.Context(w.t), w.op, "egress", "remove", &egressv1.RemovePolicyRequest{Scope: s, Replaces: replaces})
	return err
}

var (
	cell = &egressv1.Scope{Layer: egressv1.Layer_LAYER_CELL}
	acme = &egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT, Name: "acme"}
)

func rule(name string) string {
	return fmt.Sprintf("rules: [{name: %s, allow: {hosts: [%s.example.com], ports: [443], protocol: https}}]", name, name)
}

func TestPolicyIsAppliedChangedAndRemoved(t *testing.T) {
	w := newWorld(t)
	first, err := w.apply(cell, rule("a"), 0)
	must(t, err)
	other, err := w.apply(acme, rule("b"), 0)
	must(t, err)
	second, err := w.apply(cell, rule("c"), first)
	must(t, err)
	if !(first < other && other < second) {
		t.Errorf("the generations are %d, %d, %d", first, other, second)
	}
	list, err := w.policies(nil)
	must(t, err)
	if len(list) != 2 || string(list[0].GetDocument()) != rule("c") || list[0].GetGeneration() != second || list[1].GetScope().GetName() != "acme" || list[0].GetAppliedBy() != "op" {
		t.Errorf("%v", list)
	}
	if err := w.remove(cell, first); !errs.Is(err, errkind.Conflict) || !strings.Contains(err.Error(), fmt.Sprint("generation ", second)) {
		t.Errorf("a removal of an earlier generation: %v", err)
	}
	must(t, w.remove(cell, second))
	if _, err := w.policies(cell); !errs.Is(err, errkind.NotFound) {
		t.Errorf("after its removal: %v", err)
	}
	if _, err := w.apply(cell, rule("a"), second); !errs.Is(err, errkind.Conflict) {
		t.Errorf("a change of what was removed: %v", err)
	}
	again, err := w.apply(cell, rule("a"), 0)
	must(t, err)
	if again <= second {
		t.Errorf("generation %d after %d", again, second)
	}
}

// Row 29: two writers of one policy.
func TestOfTwoWritersOneIsTold(t *testing.T) {
	w := newWorld(t)
	base, err := w.apply(acme, rule("a"), 0)
	must(t, err)
	if _, err := w.apply(acme, rule("b"), 0); !errs.Is(err, errkind.Conflict) || !strings.Contains(err.Error(), fmt.Sprint("generation ", base)) {
		t.Errorf("a second first one: %v", err)
	}
	var wg sync.WaitGroup
	errors := make([]error, 20)
	for i := range errors {
		wg.Go(func() { _, errors[i] = w.apply(acme, rule(fmt.Sprint("w", i)), base) })
	}
	wg.Wait()
	list, err := w.policies(acme)
	must(t, err)
	won := 0
	for i, err := range errors {
		switch {
		case err == nil:
			won++
			if string(list[0].GetDocument()) != rule(fmt.Sprint("w", i)) {
				t.Error("the policy of another one is stored")
			}
		case !errs.Is(err, errkind.Conflict) || !strings.Contains(err.Error(), fmt.Sprint("generation ", list[0].GetGeneration())):
			t.Errorf("a loser is told %v", err)
		}
	}
	if won != 1 {
		t.Errorf("%d writers won", won)
	}
}

// The bus sends a request again whose answer was lost.
func TestRepeatedRequestIsNoConflict(t *testing.T) {
	w := newWorld(t)
	first, err := w.apply(acme, rule("a"), 0)
	must(t, err)
	again, err := w.apply(acme, rule("a"), 0)
	must(t, err)
	second, err := w.apply(acme, rule("b"), first)
	must(t, err)
	third, err := w.apply(acme, rule("b"), first)
	must(t, err)
	if again != first || third != second {
		t.Errorf("%d %d, %d %d", first, again, second, third)
	}
}

func TestWhatIsNoPolicyIsRefusedInASentence(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		scope *egressv1.Scope
		doc   string
		kind  errkind.Kind
		text  string
	}{
		"no scope":     {nil, rule("a"), errkind.Invalid, "scope"},
		"a bad line":   {cell, "rules:\n  - name: a\n    allow: {hosts: [EXAMPLE.com], ports: [443], protocol: https}\n", errkind.Invalid, "line 3"},
		"no yaml":      {cell, "{", errkind.Invalid, "line"},
		"an address":   {cell, "rules: [{name: a, allow: {hosts: [10.0.0.1], ports: [443], protocol: https}}]", errkind.Invalid, "10.0.0.1"},
		"a large one":  {cell, "#" + strings.Repeat("x", policy.MaxFile), errkind.TooLarge, "bytes"},
		"many rules":   {cell, "rules:\n" + strings.Repeat("  - {name: a, deny: {hosts: [a.example.com]}}\n", 10_001), errkind.Invalid, "10000"},
		"a wrong name": {&egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT, Name: "A.B"}, rule("a"), errkind.Invalid, "A.B"},
	} {
		_, err := w.apply(c.scope, c.doc, 0)
		if !errs.Is(err, c.kind) || !strings.Contains(strings.ReplaceAll(err.Error(), ",", ""), c.text) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if list, err := w.policies(nil); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}

func TestNumberOfPoliciesIsBounded(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxPolicies = 1 })
	first, err := w.apply(cell, rule("a"), 0)
	must(t, err)
	if _, err := w.apply(acme, rule("a"), 0); !errs.Is(err, errkind.Exhausted) {
		t.Errorf("got %v", err)
	}
	_, err = w.apply(cell, rule("b"), first)
	must(t, err)
}

func TestAnAnswerOfManyLargePoliciesFits(t *testing.T) {
	w := newWorld(t)
	for i := range 4 {
		doc := rule("a") + "\n#" + strings.Repeat("x", policy.MaxFile/2-i*1000)
		_, err := w.apply(&egressv1.Scope{Layer: egressv1.Layer_LAYER_TENANT, Name: fmt.Sprint("t", i)}, doc, 0)
		must(t, err)
	}
	list, err := w.policies(nil)
	must(t, err)
	if len(list) != 4 || len(list[0].GetDocument()) != 0 || len(list[3].GetDocument()) == 0 {
		t.Errorf("%d policies", len(list))
	}
}

func TestExampleIsTheDefaults(t *testing.T) {
	raw, err := os.ReadFile("egress.example.yaml")
	must(t, err)
	cfg := Config{}
	must(t, svc.ParseConfig(raw, &cfg))
	must(t, cfg.Validate())
	if cfg != NewConfig() {
		t.Errorf("the example is %+v", cfg)
	}
}
