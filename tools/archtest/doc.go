// Package archtest holds the architecture to its rules: imports go one way,
// services never import each other, a core is pure, every package says what
// it guarantees, and no file or function outgrows its room. It has only tests.
package archtest
