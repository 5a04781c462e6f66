package policy

import (
	"net/url"
	"strings"
	"testing"
)

// TestAPathHasOneForm: and what servers read in different ways has none.
func TestAPathHasOneForm(t *testing.T) {
	for in, want := range map[string]string{
		"/": "/", "/a": "/a", "/a/": "/a/", "/a/./b": "/a/b", "/a/../b": "/b", "/../../a": "/a", "/a/..": "/", "/a/.": "/a/", "/a//b": "/a//b", "/a//../b": "/a/b",
		"/%61": "/a", "/%7e": "/~", "/%2e%2E/a": "/a", "/a/%2e%2e/b": "/b", "/%2f": "/%2F", "/a%3ab": "/a%3Ab", "/@scope%2fname": "/@scope%2Fname", "/a|b": "/a%7Cb",
		"/a{b}^`\"<>": "/a%7Bb%7D%5E%60%22%3C%3E", "/%e2%82%ac": "/%E2%82%AC", "/%25": "/%25", "/%2541": "/%2541", "/...": "/...", "/.a": "/.a", "/a;b=c/d": "/a;b=c/d", "*": "*",
	} {
		if got, err := CanonicalPath(in); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", in, got, err, want)
		}
	}
	for _, in := range []string{"", "a", "**", "/a b", "/a\x00", "/%00", "/%0a", "/%7f", "/a\\b", "/%5c", "/%5C..%5C", "/%", "/%2", "/%zz", "/a?b", "/a#b", "/\x80", "/ä",
		"/a/..%2fb", "/a%2f..%2fb", "/a%2F.", "/a/..;/b", "/a/..;x=y/b", "/a/.;/b", "/a/..%3B/b", "/%252e%252e/a", "/a%252fb", "/%25252e", "/%255c", "/%252500", strings.Repeat("/", maxPath+1)} {
		if got, err := CanonicalPath(in); err == nil {
			t.Errorf("%q is read as %s", in, got)
		}
	}
}

// TestPrefixesEndAtSegments: /v1 is not the beginning of /v10, and a denial is not passed by a second slash.
func TestPrefixesEndAtSegments(t *testing.T) {
	for _, c := range []struct {
		path, prefix string
		allow, deny  bool
	}{
		{"/v1", "/v1", true, true}, {"/v1/", "/v1", true, true}, {"/v1/x", "/v1", true, true}, {"/v10", "/v1", false, false}, {"/v1", "/v1/", false, false},
		{"/v1/", "/v1/", true, true}, {"/x", "/", true, true}, {"//v1/x", "/v1", false, true}, {"/v1//x", "/v1/", true, true}, {"/v1%2Fx", "/v1", false, true},
		{"/v1/x%2Fy", "/v1/", true, true}, {"/v1;x/y", "/v1", false, true}, {"*", "/", false, false},
	} {
		if a, d := belowAny(c.path, []string{c.prefix}, false), belowAny(c.path, []string{c.prefix}, true); a != c.allow || d != c.deny {
			t.Errorf("%s below %s: %v, %v", c.path, c.prefix, a, d)
		}
	}
}

// TestADenialIsNotPassedBySemicolonOrCase: nor does either widen what is allowed.
func TestADenialIsNotPassedBySemicolonOrCase(t *testing.T) {
	for _, c := range []struct {
		path, prefix string
		deny         bool
	}{
		{"/v1/export;a=b", "/v1/export", true}, {"/admin;x/keys", "/admin/", true}, {"/v1/export%3ba=b", "/v1/export", true}, {"/V1/EXPORT", "/v1/export", true},
		{"/v1/export", "/V1/Export", true}, {"/v1/;x/export", "/v1/export", true}, {"/v1;x%2Fexport", "/v1/export", true}, {"/V1;a;b//Export;c/d", "/v1/export", true},
		{"/;x/v1/export", "/v1/export", true}, {"/a;b/c", "/A;B", true}, {"/v1/exports;a", "/v1/export", false}, {"/v1/;export", "/v1/export", false}, {"/a", "/a;b", false},
	} {
		path, err := CanonicalPath(c.path)
		if err != nil {
			t.Fatal(err)
		}
		if d := belowAny(path, []string{c.prefix}, true); d != c.deny {
			t.Errorf("%s is denied below %s: %v", c.path, c.prefix, d)
		}
		if belowAny(path, []string{c.prefix}, false) {
			t.Errorf("%s is allowed below %s", c.path, c.prefix)
		}
	}
}

// FuzzCanonicalPath: its own form, without a dot segment in any reading.
func FuzzCanonicalPath(f *testing.F) {
	for _, s := range []string{"/", "/a/../b", "/%2e%2e/a", "/a%2f..", "/..;/x", "/%252e", "*", "/a|b", "//a/.."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		got, err := CanonicalPath(raw)
		if err != nil || got == "*" {
			return
		}
		if again, err := CanonicalPath(got); err != nil || again != got {
			t.Fatalf("%q: %q is read as %q, %v", raw, got, again, err)
		}
		u, err := url.Parse("https://example.com" + got)
		if err != nil || u.RawQuery != "" || u.Fragment != "" || u.Host != "example.com" {
			t.Fatalf("%q: %q is not a path for net/url: %v", raw, got, err)
		}
		for s := range strings.SplitSeq(u.Path, "/") {
			if s, _, _ = strings.Cut(s, ";"); s == "." || s == ".." {
				t.Fatalf("%q: %q holds a dot segment", raw, got)
			}
		}
		once, err := url.PathUnescape(u.Path)
		if err == nil && strings.Contains(once, "/../") && !strings.Contains(u.Path, "/../") {
			t.Fatalf("%q: %q climbs when it is decoded twice", raw, got)
		}
	})
}
