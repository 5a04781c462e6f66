// Package tierpolicy reads the policy that chooses a session's isolation tier by
// risk: named rules, each an expression in CEL over facts, and the tier that it
// asks for. It guarantees that a policy which was read is complete and typed (an
// unknown fact, a word that no fact can have or a tier that does not exist is an
// error with file, line and rule), that evaluating one costs a bounded number of
// steps, does no I/O and depends on its arguments alone, and that whatever a rule
// says only raises a tier: the order and the floor are the core's, not the
// policy's. How to write one: docs/howto/tier-policy.md.
package tierpolicy
