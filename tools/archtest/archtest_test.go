package archtest

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

type pkg struct {
	ImportPath, Dir, Doc string
	Imports              []string
	GoFiles              []string
	Standard             bool
}

// packages lists every package of the workspace.
func packages(t *testing.T) []pkg {
	t.Helper()
	root := repoRoot(t)
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,Imports,GoFiles,Standard", "./...", "./schemas/...", "./sdk/...", "./test/...")
	cmd.Dir = root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("list the workspace's packages: %v", err)
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 10 {
		t.Fatalf("only %d packages were listed", len(all))
	}
	return all
}

func repoRoot(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil || len(bytes.TrimSpace(out)) == 0 {
		t.Fatalf("find go.work: %v", err)
	}
	return filepath.Dir(string(bytes.TrimSpace(out)))
}

const module = "github.com/berth-dev/berth/"

// rule: packages that match from may not import what matches banned.
type rule struct {
	from, banned, unless, reason string
}

var rules = []rule{
	{`^schemas/`, `^(sdk|internal|services|tools|test)/`, ``, "schemas is the contract and depends on nothing of ours"},
	{`^sdk/`, `^(internal|services|tools|test)/`, ``, "frontends import sdk; it sees only schemas"},
	{`^internal/`, `^(services|tools|test|sdk)/`, ``, "plumbing knows no service"},
	{`^services/`, `^(tools|test|sdk)/`, ``, "imports go one way: schemas, internal, services, tools"},
	{`^tools/`, `^test/`, ``, "tools do not depend on tests"},
	{`/internal/core(/|$)`, `^(internal|sdk|services|tools|test)/`, `/internal/core(/|$)`, "a core imports only the standard library and schemas"},
	{`/internal/core$`, `^(context|log|log/slog|os|net|net/http|math/rand|math/rand/v2|crypto/rand|sync)$`, ``, "a core has no context, logger, I/O, randomness or goroutine in it"},
}

// TestImportsGoOneWay fails on an import that the layout forbids, with the reason.
func TestImportsGoOneWay(t *testing.T) {
	for _, p := range packages(t) {
		from := strings.TrimPrefix(p.ImportPath, module)
		for _, imp := range p.Imports {
			target := strings.TrimPrefix(imp, module)
			if s := service(from); s != "" && service(target) != "" && service(target) != s {
				t.Errorf("%s imports %s: services never import each other", from, target)
			}
			for _, r := range rules {
				if regexp.MustCompile(r.from).MatchString(from) && regexp.MustCompile(r.banned).MatchString(target) &&
					(r.unless == "" || !regexp.MustCompile(r.unless).MatchString(target)) {
					t.Errorf("%s imports %s: %s", from, target, r.reason)
				}
			}
		}
	}
}

// TestCoresReadNoClock: time, randomness and new ids are arguments of a core.
func TestCoresReadNoClock(t *testing.T) {
	banned := regexp.MustCompile(`\btime\.(Now|Since|Until|After|AfterFunc|NewTimer|Tick|Sleep)\(|\btimestamppb\.Now\(|\bids\.New[A-Z]|\bgo func`)
	for _, p := range packages(t) {
		if !strings.HasSuffix(p.ImportPath, "/internal/core") {
			continue
		}
		for _, f := range p.GoFiles {
			raw, err := os.ReadFile(filepath.Join(p.Dir, f))
			if err != nil {
				t.Fatal(err)
			}
			for n, line := range strings.Split(string(raw), "\n") {
				code, _, _ := strings.Cut(line, "//")
				if banned.MatchString(code) {
					t.Errorf("%s/%s:%d reads the clock, makes an id or starts a goroutine: %s", p.ImportPath, f, n+1, strings.TrimSpace(line))
				}
			}
		}
	}
}

func service(path string) string {
	rest, ok := strings.CutPrefix(path, "services/")
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

// TestEveryPackageSaysWhatItGuarantees: one package comment per package.
func TestEveryPackageSaysWhatItGuarantees(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 && p.Doc == "" && !strings.Contains(p.ImportPath, "/schemas/gen/") {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}

var vague = regexp.MustCompile(`(^|/)(utils?|common|types|helpers?|misc)$`)

// TestNoPackageIsCalledUtils: a folder is named after a noun of the system.
func TestNoPackageIsCalledUtils(t *testing.T) {
	for _, p := range packages(t) {
		if vague.MatchString(p.ImportPath) {
			t.Errorf("%s says nothing about what it holds", p.ImportPath)
		}
	}
}
