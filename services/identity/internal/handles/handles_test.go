package handles

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

func keys(t interface{ Fatal(...any) }, secrets ...string) *Keys {
	var raw [][]byte
	for _, s := range secrets {
		raw = append(raw, []byte(s))
	}
	k, err := New(raw)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func ref(tenant, session string, incarnation uint32, index uint64) *corev1.SessionRef {
	return &corev1.SessionRef{Tenant: tenant, Session: session, Generation: &corev1.Stamp{Incarnation: incarnation, Index: index},
		Epoch: &corev1.Stamp{Incarnation: 1, Index: index + 1}}
}

// TestAHandleIsOfOneGenerationOfOneSession: nothing that differs, and no
// bytes that move from one field to the next, give the same handle; a new
// epoch keeps it; every live version of the key knows it.
func TestAHandleIsOfOneGenerationOfOneSession(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		word := rapid.StringMatching(`[a-z]{0,4}`)
		draw := func(which string) *corev1.SessionRef {
			return ref(word.Draw(rt, which+" tenant"), word.Draw(rt, which+" session"), rapid.Uint32Range(0, 2).Draw(rt, which+" incarnation"), rapid.Uint64Range(0, 300).Draw(rt, which+" index"))
		}
		a, b := draw("a"), draw("b")
		same := a.GetTenant() == b.GetTenant() && a.GetSession() == b.GetSession() && a.GetGeneration().GetIndex() == b.GetGeneration().GetIndex() &&
			a.GetGeneration().GetIncarnation() == b.GetGeneration().GetIncarnation()
		before, after := keys(rt, "one"), keys(rt, "two", "one")
		if (before.Of(a) == before.Of(b)) != same {
			rt.Fatalf("%v and %v: %s, %s", a, b, before.Of(a), before.Of(b))
		}
		if !after.Is(before.Of(a), a) || !after.Is(after.Of(a), a) || after.Is(before.Of(a), b) != same {
			rt.Fatal("after a new version of the key another session, or none, has the handle")
		}
		if keys(rt, "three").Is(before.Of(a), a) || !ids.IsToken(before.Of(a)) || len(before.Of(a)) != 53 {
			rt.Fatalf("handle %s", before.Of(a))
		}
	})
}

// TestAListGoesOnOnlyInItsOwnTenant: and under every live version of the key.
func TestAListGoesOnOnlyInItsOwnTenant(t *testing.T) {
	at := ids.DeriveSessionKey([]byte("k"), "https://idp", "acme", "bob", "default")
	old := keys(t, "one")
	word, err := old.Pause("acme", at)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := keys(t, "two", "one").Resume("acme", word); err != nil || got != at {
		t.Errorf("%s, %v", got, err)
	}
	if again, _ := old.Pause("acme", at); again == word || strings.Contains(word, string(at)) {
		t.Error("the word tells the session, or that two are the same")
	}
	for name, err := range map[string]error{
		"another tenant": second(old.Resume("globex", word)),
		"another key":    second(keys(t, "three").Resume("acme", word)),
		"shortened":      second(old.Resume("acme", word[:len(word)-8])),
		"a session key":  second(old.Resume("acme", string(at))),
		"noise":          second(old.Resume("acme", "!!")),
	} {
		if err == nil {
			t.Errorf("%s went on", name)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// FuzzResume: no word makes it panic, and none but its own is taken.
func FuzzResume(f *testing.F) {
	k := keys(f, "one")
	f.Add("")
	f.Add("aaaa")
	f.Add(strings.Repeat("a", 64))
	f.Fuzz(func(t *testing.T, word string) {
		if got, err := k.Resume("acme", word); err == nil && word != "" {
			t.Fatalf("%q was taken as %s", word, got)
		}
	})
}
