package grant

import (
	"slices"
	"strings"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/berth-dev/berth/schemas/errkind"
)

// Verb is one thing that a grant is good for. What a verb covers is fixed
// here, for hosts and for whoever stands in for one.
type Verb string

const (
	// VerbExec starts processes and attaches to them.
	VerbExec Verb = "exec"
	// VerbFiles reads and changes files, and has them saved.
	VerbFiles Verb = "files"
	// VerbPorts is for ports of the session; no operation needs it yet.
	VerbPorts Verb = "ports"
	// VerbRead looks at files and at what runs, and changes nothing.
	VerbRead Verb = "read"
)

// maxVerbWords bounds what ParseVerbs reads.
const maxVerbWords = 16

// DefaultVerbs is what a grant is good for when nobody asked for less.
func DefaultVerbs() []Verb { return []Verb{VerbExec, VerbFiles, VerbPorts} }

func known(v Verb) bool {
	return v == VerbExec || v == VerbFiles || v == VerbPorts || v == VerbRead
}

// ParseVerbs reads what a grant is to be good for: sorted, each once; none
// means DefaultVerbs. A word that is no verb is refused with kind Invalid.
func ParseVerbs(words []string) ([]Verb, error) {
	if len(words) == 0 {
		return DefaultVerbs(), nil
	}
	if len(words) > maxVerbWords {
		return nil, refuse(errkind.Invalid, "%d verbs are too many; there are exec, files, ports and read", len(words))
	}
	out := make([]Verb, 0, len(words))
	for _, w := range words {
		if !known(Verb(w)) {
			return nil, refuse(errkind.Invalid, "%.16q is no verb of a grant; there are exec, files, ports and read", w)
		}
		out = append(out, Verb(w))
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// checkVerbs holds the verbs of a grant to the one form that they have.
func checkVerbs(verbs []Verb) error {
	if len(verbs) == 0 {
		return refuse(errkind.Unauthenticated, "the grant is good for nothing")
	}
	for i, v := range verbs {
		if !known(v) || i > 0 && verbs[i-1] >= v {
			return refuse(errkind.Unauthenticated, "the verbs of the grant are not in order, or not known here")
		}
	}
	return nil
}

// look is what reading needs, and change what changing files needs.
var (
	look   = []Verb{VerbRead, VerbFiles}
	change = []Verb{VerbFiles}
	run    = []Verb{VerbExec}
	some   = []Verb{VerbExec, VerbFiles, VerbRead}
)

// needs says for each operation which verbs cover it; one of them is enough.
// An operation that is not here is covered by none.
var needs = map[protoreflect.Name][]Verb{
	"exec": run, "exec_attach": run,
	"read_file": look, "stat": look, "list_dir": look, "watch": look, "export": look,
	"write_file": change, "move": change, "remove": change, "make_dir": change, "import": change, "checkpoint": change,
	"list_execs": some, "info": some,
	"present": {VerbExec, VerbFiles, VerbPorts, VerbRead},
}

var operations = (&boxv1.Operation{}).ProtoReflect().Descriptor().Oneofs().ByName("op")

// Covers reports, as nil, that the grant is good for an operation. Otherwise
// the error is of kind Denied and names what is missing.
func (c Claims) Covers(op *boxv1.Operation) error {
	field := op.ProtoReflect().WhichOneof(operations)
	if field == nil {
		return refuse(errkind.Denied, "the grant is for no operation that is not known here")
	}
	enough := needs[field.Name()]
	for _, v := range c.Verbs {
		if slices.Contains(enough, v) {
			return nil
		}
	}
	if len(enough) == 0 {
		return refuse(errkind.Denied, "no grant is good for %s", field.Name())
	}
	return refuse(errkind.Denied, "the grant is good for %s alone, and %s needs %s", list(c.Verbs, "and"), field.Name(), list(enough, "or"))
}

func list(verbs []Verb, last string) string {
	words := make([]string, len(verbs))
	for i, v := range verbs {
		words[i] = string(v)
	}
	if n := len(words); n > 1 {
		return strings.Join(words[:n-1], ", ") + " " + last + " " + words[n-1]
	}
	return strings.Join(words, "")
}
