// Package hostile runs, inside real sandboxes of a real installation, what a hostile session would
// try: once as root and once as a user, in every isolation tier that this machine offers. Each row is
// a named test that says what must happen. It guarantees that a row which comes through anywhere else
// than Row.Own allows fails, that the host looks the same before and after, and that a tier which did
// not run is printed as not run. docs/threat-model.md says what the rows mean.
package hostile
