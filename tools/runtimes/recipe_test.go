package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/tools/runtimes/locate"
)

func testRecipes(t *testing.T) []recipe {
	t.Helper()
	pins, err := parseVersions(locate.Versions)
	if err != nil {
		t.Fatal(err)
	}
	list, err := recipes(pins, "go1 linux amd64")
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestParseVersionsRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"few fields": "runc v1 mod\n",
		"twice":      "runc v1 mod sum\nrunc v2 mod sum\n",
	} {
		if _, err := parseVersions(text); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := recipes(nil, ""); err == nil || !strings.Contains(err.Error(), "containerd") {
		t.Errorf("missing line: %v", err)
	}
}

func TestRecipesMakeEveryBinary(t *testing.T) {
	made := make(map[string]bool)
	for _, r := range testRecipes(t) {
		for name := range r.Binaries {
			if made[name] {
				t.Errorf("%s is made twice", name)
			}
			made[name] = true
		}
	}
	for _, name := range locate.All() {
		if !made[name] {
			t.Errorf("no recipe makes %s", name)
		}
	}
}

func TestKeyFollowsEveryInput(t *testing.T) {
	base := testRecipes(t)[0]
	if base.key() != testRecipes(t)[0].key() {
		t.Fatal("the same recipe has two keys")
	}
	if !strings.HasPrefix(base.key(), "containerd-"+base.Pin.Version+"-") {
		t.Errorf("key %s does not say what it is", base.key())
	}
	changes := map[string]func(*recipe){
		"version": func(r *recipe) { r.Pin.Version = "v0" },
		"sum":     func(r *recipe) { r.Pin.Sum = "h1:other" },
		"digest":  func(r *recipe) { r.Digest = "other" },
		"package": func(r *recipe) { r.Binaries = map[string]string{"containerd": "./other"} },
		"cgo":     func(r *recipe) { r.CGO = !r.CGO },
		"tags":    func(r *recipe) { r.Tags += ",x" },
		"ldflags": func(r *recipe) { r.LDFlags += " -x" },
		"patch":   func(r *recipe) { r.Patches = []patch{{File: "a"}} },
		"go":      func(r *recipe) { r.Go = "go2 linux amd64" },
	}
	for name, change := range changes {
		r := base
		change(&r)
		if r.key() == base.key() {
			t.Errorf("a change of the %s keeps the key", name)
		}
	}
	slower := base
	slower.Seconds++
	if slower.key() != base.key() {
		t.Error("the estimate changes the key")
	}
}

func TestSetKeyFollowsEveryComponent(t *testing.T) {
	base := setKey(testRecipes(t))
	for i := range testRecipes(t) {
		list := testRecipes(t)
		list[i].Digest = "other"
		if setKey(list) == base {
			t.Errorf("a change of %s keeps the set's key", list[i].Name)
		}
	}
}

func TestDigestTree(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		os.MkdirAll(filepath.Dir(path), 0o755)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	digest := func() string {
		t.Helper()
		sum, err := digestTree(root, "a", "b")
		if err != nil {
			t.Fatal(err)
		}
		return sum
	}
	write("a/main.go", "one")
	write("b/go.mod", "two")
	first := digest()
	write("a/main_test.go", "tests do not count")
	write("c/other", "other folders do not count")
	if digest() != first {
		t.Error("digest depends on what does not count")
	}
	write("a/main.go", "changed")
	if digest() == first {
		t.Error("digest ignores a change")
	}
	if _, err := digestTree(root, "missing"); err == nil {
		t.Error("a missing folder is accepted")
	}
}

// The shims must be built against what versions.txt says.
func TestShimModulesFollowVersions(t *testing.T) {
	pins, err := parseVersions(locate.Versions)
	if err != nil {
		t.Fatal(err)
	}
	for shim, name := range map[string]string{"runc": "containerd", "runsc": "runsc"} {
		mod, err := os.ReadFile(filepath.Join("shims", shim, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		if want := pins[name].Module + " " + pins[name].Version; !strings.Contains(string(mod), want+"\n") {
			t.Errorf("shims/%s/go.mod does not require %s", shim, want)
		}
	}
}

// The shims are modules of their own, which go test ./... does not enter. Package
// hold needs nothing but the standard library, so its tests run from here.
func TestHold(t *testing.T) {
	out, err := goCommand(t.Context(), filepath.Join("shims", "hold"), false, "test", "./...")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
