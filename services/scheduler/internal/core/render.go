package core

import (
	"fmt"
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// Markdown renders the declared transitions and deadlines.
func Markdown() string {
	var b strings.Builder
	b.WriteString("# States of a session\n\nGenerated from the transitions declared in services/scheduler/internal/core; do not edit.\n\n")
	b.WriteString("| From | Event | When | To | Facts | Commands |\n|---|---|---|---|---|---|\n")
	for _, t := range Transitions() {
		to := StateName(t.To)
		if t.Stays() {
			to = "(stays)"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", joinNames(t.From, StateName), t.Event, t.When, to,
			joinNames(t.Emits, func(k EventKind) string { return string(k) }),
			joinNames(t.Commands, func(k CommandKind) string { return string(k) }))
	}
	b.WriteString("\nEvery state that is not at rest has a deadline and a next step:\n\n| State | Deadline | Then |\n|---|---|---|\n")
	for _, d := range Deadlines() {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", StateName(d.State), d.Bound, d.Then)
	}
	return b.String()
}

// StateName is a state in one lower-case word.
func StateName(s corev1.State) string {
	if s == Unknown {
		return "none"
	}
	return strings.ToLower(strings.TrimPrefix(s.String(), "STATE_"))
}

func joinNames[T any](items []T, name func(T) string) string {
	out := make([]string, len(items))
	for i, v := range items {
		out[i] = name(v)
	}
	return strings.Join(out, ", ")
}
