package subjects

import (
	"testing"

	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

// The names were made by another program from the words of UserFrontend's comment.
func TestUserFrontendVectors(t *testing.T) {
	for _, v := range []struct{ issuer, subject, want string }{
		{"https://login.example.com", "ann", "u-54liwwrdqep3jvkrgjdrl2cncy"},
		{"https://login.example.com", "Ann", "u-bcaawqz5s23bdlfv2t4gtxazsu"},
		{"https://login.example.com/", "ann", "u-y7cqdqbxsxhcrsxk5rx4h47b3a"},
		{"https://login.example.co", "mann", "u-lz2pj5vdropnzkusgwxb4rrrcm"},
		{"https://login.example.com", "*.>", "u-fz3m4ormfurghhdupt7lpvhavy"},
		{"https://login.example.com", "\u0430nn", "u-ho4amtktht56udqkdi7p7c6qou"},
	} {
		if got := UserFrontend(v.issuer, v.subject); string(got) != v.want {
			t.Errorf("%q of %q is %s, not %s", v.subject, v.issuer, got, v.want)
		}
	}
}

// No two users share a name, whatever bytes move from issuer to subject, and every name is one that a
// subject and a client file can hold.
func TestUserFrontendsAreOneEach(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := rapid.String().Draw(t, "whole")
		i, j := rapid.IntRange(0, len(whole)).Draw(t, "i"), rapid.IntRange(0, len(whole)).Draw(t, "j")
		a, b := UserFrontend(whole[:i], whole[i:]), UserFrontend(whole[:j], whole[j:])
		if (a == b) != (i == j) {
			t.Fatalf("cut at %d and %d: %s and %s", i, j, a, b)
		}
		f, err := ids.ParseFrontend(string(a))
		if err != nil || !IsUserFrontend(f) || len(f) != 28 {
			t.Fatalf("%s is no frontend: %v", a, err)
		}
		c := Frontend("a-b", f)
		if back, err := ParseName(c.Name()); err != nil || back != c {
			t.Fatalf("%s reads back as %v, %v", c.Name(), back, err)
		}
	})
}

func TestNamesOfIdentitysOwnLogins(t *testing.T) {
	for _, c := range []Caller{Callout(), Warden()} {
		if back, err := ParseName(c.Name()); err != nil || back != c {
			t.Errorf("%s reads back as %v, %v", c.Name(), back, err)
		}
		for _, m := range Methods {
			if m.Allows(c) {
				t.Errorf("%s may call %s.%s", c, m.Service, m.Name)
			}
		}
	}
}
