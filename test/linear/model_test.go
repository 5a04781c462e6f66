package linear

import (
	"testing"

	"github.com/anishathalye/porcupine"
)

// history is written as one operation after the other, unless at says when.
type history struct {
	ops []porcupine.Operation
	now int64
}

func (h *history) add(in Input, out Output) *history {
	in.Session = "s1"
	h.ops = append(h.ops, porcupine.Operation{ClientId: 0, Input: in, Call: h.now, Output: out, Return: h.now + 5})
	h.now += 10
	return h
}

// unknown never returns.
func (h *history) unknown(in Input) *history {
	h.add(in, Output{Unknown: true})
	h.ops[len(h.ops)-1].Return = int64(Forever)
	return h
}

func at(index uint64) Stamp { return Stamp{1, index} }

func said(p Phase, epoch uint64, host, head string) Output {
	return Output{Generation: at(1), Epoch: at(epoch), Phase: p, Host: host, Head: head, Revision: epoch}
}

func show() Input { return Input{Kind: Show} }

func commits(epoch uint64, host, parent, id string) Input {
	return Input{Kind: Commit, Generation: at(1), Epoch: at(epoch), Host: host, Parent: parent, ID: id}
}

// TestCheckerFindsWhatIsWrong is the mutation test of the checker: each
// illegal history differs from a legal one by one answer.
func TestCheckerFindsWhatIsWrong(t *testing.T) {
	open, sleep, remove := Input{Kind: Open}, Input{Kind: Sleep}, Input{Kind: Delete}
	base := func() *history {
		return new(history).add(show(), Output{None: true}).
			add(open, said(Active, 2, "h1", "")).add(show(), said(Active, 2, "h1", "")).
			add(commits(2, "h1", "", "m1"), Output{}).add(show(), said(Active, 2, "h1", "m1")).
			add(sleep, said(Rest, 2, "h1", "m1")).add(open, said(Active, 5, "h2", ""))
	}
	for _, c := range []struct {
		name  string
		legal bool
		h     *history
	}{
		{"all is well", true, base().add(show(), said(Active, 5, "h2", "m1"))},
		{"a handoff in between", true, base().add(show(), said(Waking, 7, "h3", "m1"))},
		{"a stale read", false, base().add(show(), said(Rest, 2, "h1", "m1"))},
		{"a read that forgot the session", false, base().add(show(), Output{None: true})},
		{"active again after asleep in one epoch", false, base().add(open, said(Active, 2, "h1", ""))},
		{"two owners of one epoch", false, base().add(show(), said(Active, 5, "h1", "m1"))},
		{"an old owner commits", false, base().add(commits(2, "h1", "m1", "m2"), Output{})},
		{"a stranger commits", false, base().add(commits(5, "h1", "m1", "m2"), Output{})},
		{"the owner commits", true, base().add(commits(5, "h2", "m1", "m2"), Output{}).add(show(), said(Active, 5, "h2", "m2"))},
		{"a lost commit", false, base().add(commits(5, "h2", "m1", "m2"), Output{}).add(show(), said(Active, 5, "h2", "m1"))},
		{"a commit that overwrites another", false, base().add(commits(5, "h2", "m1", "m2"), Output{}).add(commits(5, "h2", "m1", "m3"), Output{})},
		{"a head out of nowhere", false, base().add(show(), said(Active, 5, "h2", "m9"))},
		{"an unknown commit happened", true, base().unknown(commits(5, "h2", "m1", "m2")).add(show(), said(Active, 5, "h2", "m2"))},
		{"an unknown commit did not happen", true, base().unknown(commits(5, "h2", "m1", "m2")).add(show(), said(Active, 5, "h2", "m1"))},
		{"an unknown commit happened late", true, base().unknown(commits(5, "h2", "m1", "m2")).add(show(), said(Active, 5, "h2", "m1")).
			add(show(), said(Active, 5, "h2", "m2"))},
		{"a refused commit did not happen", true, base().add(commits(5, "h2", "m1", "m2"), Output{Unknown: true}).add(show(), said(Active, 5, "h2", "m1"))},
		{"a refused commit happened", true, base().add(commits(5, "h2", "m1", "m2"), Output{Unknown: true}).add(show(), said(Active, 5, "h2", "m2"))},
		{"a refused commit happened after its answer", false, base().add(commits(5, "h2", "m1", "m2"), Output{Unknown: true}).
			add(show(), said(Active, 5, "h2", "m1")).add(show(), said(Active, 5, "h2", "m2"))},
		{"an unknown commit was taken back", false, base().unknown(commits(5, "h2", "m1", "m2")).add(show(), said(Active, 5, "h2", "m2")).
			add(show(), said(Active, 5, "h2", "m1"))},
		{"back from the dead", false, base().add(remove, said(Deleted, 5, "", "")).add(show(), said(Active, 5, "h2", "m1"))},
		{"a new generation", true, base().add(remove, said(Deleted, 5, "", "")).
			add(open, Output{Generation: at(9), Epoch: at(10), Host: "h1", Phase: Active}).
			add(show(), Output{Generation: at(9), Epoch: at(10), Host: "h1", Phase: Active, Revision: 1})},
		{"a revision for two states", false, base().add(show(), Output{Generation: at(1), Epoch: at(5), Phase: Active, Host: "h2", Head: "m1", Revision: 2})},
	} {
		t.Run(c.name, func(t *testing.T) {
			if legal := porcupine.CheckOperations(Model(), c.h.ops); legal != c.legal {
				t.Errorf("found legal: %v", legal)
			}
		})
	}
}

// TestOrderOfConcurrentAnswersIsFree, and only of those.
func TestOrderOfConcurrentAnswersIsFree(t *testing.T) {
	op := func(call, ret int64, in Input, out Output) porcupine.Operation {
		in.Session = "s1"
		return porcupine.Operation{Input: in, Call: call, Output: out, Return: ret}
	}
	open := op(10, 30, Input{Kind: Open}, said(Active, 2, "h1", ""))
	before := op(0, 20, show(), Output{None: true})
	if !porcupine.CheckOperations(Model(), []porcupine.Operation{open, before}) {
		t.Error("a read that overlaps an open may come before it")
	}
	after := op(31, 40, show(), Output{None: true})
	if porcupine.CheckOperations(Model(), []porcupine.Operation{open, after}) {
		t.Error("a read after an open does not see it")
	}
}
