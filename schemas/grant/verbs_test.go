package grant_test

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"google.golang.org/protobuf/reflect/protoreflect"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
)

// covered is the whole table of which verbs cover which operation.
var covered = map[string]string{
	"exec": "exec", "exec_attach": "exec",
	"read_file": "files read", "stat": "files read", "list_dir": "files read", "watch": "files read", "export": "files read",
	"write_file": "files", "move": "files", "remove": "files", "make_dir": "files", "import": "files", "checkpoint": "files",
	"list_execs": "exec files read", "info": "exec files read", "present": "exec files ports read",
}

// TestVerbsCoverNoOtherOperation goes through every operation that there is,
// with every set of verbs: a new operation without a row here fails.
func TestVerbsCoverNoOtherOperation(t *testing.T) {
	ops := (&boxv1.Operation{}).ProtoReflect().Descriptor().Oneofs().ByName("op").Fields()
	all := []grant.Verb{grant.VerbExec, grant.VerbFiles, grant.VerbPorts, grant.VerbRead}
	for i := range ops.Len() {
		field := ops.Get(i)
		words, ok := covered[string(field.Name())]
		if !ok {
			t.Errorf("operation %s has no row: which verbs cover it?", field.Name())
			continue
		}
		op := &boxv1.Operation{}
		op.ProtoReflect().Set(field, protoreflect.ValueOfMessage(op.ProtoReflect().NewField(field).Message()))
		for set := range 1 << len(all) {
			c, want := claims(), false
			c.Verbs = nil
			for j, v := range all {
				if set&(1<<j) != 0 {
					c.Verbs = append(c.Verbs, v)
					want = want || slices.Contains(strings.Fields(words), string(v))
				}
			}
			switch err := c.Covers(op); {
			case want && err != nil:
				t.Errorf("%s with %v: %v", field.Name(), c.Verbs, err)
			case !want:
				wantKind(t, err, errkind.Denied)
			}
		}
	}
	if len(covered) != ops.Len() {
		t.Errorf("%d rows for %d operations", len(covered), ops.Len())
	}
}

func TestNoVerbCoversAnOperationThatIsNotKnown(t *testing.T) {
	wantKind(t, claims().Covers(&boxv1.Operation{}), errkind.Denied)
	wantKind(t, claims().Covers(nil), errkind.Denied)
}

// What somebody asks for is read into the one form, or refused; it is never
// more than was asked for.
func TestParsedVerbsAreTheWordsAndNothingMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.SliceOfN(rapid.SampledFrom([]string{"exec", "files", "ports", "read", "admin", "", "Exec", "exec "}), 1, 20).Draw(t, "words")
		got, err := grant.ParseVerbs(words)
		if err != nil {
			if grant.KindOf(err) != errkind.Invalid {
				t.Fatal(err)
			}
			return
		}
		if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
			t.Fatalf("%v is not in the one form", got)
		}
		for _, v := range got {
			if !slices.Contains(words, string(v)) {
				t.Fatalf("%v is more than %v", got, words)
			}
		}
		for _, w := range words {
			if !slices.Contains(got, grant.Verb(w)) {
				t.Fatalf("%v lacks %q", got, w)
			}
		}
	})
	if got, err := grant.ParseVerbs(nil); err != nil || !reflect.DeepEqual(got, grant.DefaultVerbs()) {
		t.Error(got, err)
	}
}

// A grant of a release that had no verbs is what it was: good for everything
// but nothing new. Nobody can make one of a grant with verbs: it is signed.
func TestAGrantOfAReleaseWithoutVerbsIsReadAsTheDefault(t *testing.T) {
	body, err := json.Marshal(claims())
	if err != nil {
		t.Fatal(err)
	}
	old := strings.Replace(string(body), `"verbs":["exec","files","ports"],`, "", 1)
	if old == string(body) {
		t.Fatal("the test looks in the wrong place")
	}
	c, err := verifier(t).Verify(forge(signer, `{"alg":"EdDSA","kid":"k1","typ":"berth-grant+jwt"}`, old), claims().Binding(), now)
	if err != nil || !reflect.DeepEqual(c, claims()) {
		t.Error(c, err)
	}
}
