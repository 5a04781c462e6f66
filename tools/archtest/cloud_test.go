package archtest

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// cloudClients are the packages that import the clouds' SDKs, with the main packages that have them in a
// build with the tag cloud.
var cloudClients = map[string][]string{
	"internal/blobstore/cloudstore": {"tools/berth", "services/hostagent/cmd/hostagent"},
	"services/credentials/cloudkms": {"tools/berth", "services/credentials/cmd/credentials"},
}

// cloudSDK matches a package that a default build must neither download nor link.
var cloudSDK = regexp.MustCompile(`^(github\.com/(aws|Azure|AzureAD|apache/arrow-go|envoyproxy|cncf/xds)/|cloud\.google\.com/|` +
	`gocloud\.dev/(blob/(s3|gcs|azure)blob|secrets/(awskms|gcpkms|azurekeyvault))$)`)

// TestDefaultBuildHasNoCloudSDK: what one machine does not need is neither downloaded nor linked.
func TestDefaultBuildHasNoCloudSDK(t *testing.T) {
	all := []string{"./tools/...", "./services/...", "./internal/...", "./test/..."}
	list := golist(t, append([]string{"-f", "{{.ImportPath}} {{join .Deps \" \"}}"}, all...)...)
	for _, line := range list {
		from, deps, _ := strings.Cut(line, " ")
		if _, ok := cloudClients[strings.TrimPrefix(from, module)]; ok {
			continue
		}
		for dep := range strings.FieldsSeq(deps) {
			if cloudSDK.MatchString(dep) {
				t.Errorf("%s depends on %s: only main packages import a cloud's SDK, in a file with the tag cloud (docs/adr/0038-cloud-clients.md)", from, dep)
				break
			}
		}
	}
}

// TestOnlyTheirOwnTestsLinkCloudSDKs: no other test program links them.
func TestOnlyTheirOwnTestsLinkCloudSDKs(t *testing.T) {
	for _, line := range golist(t, "-f", "{{.ImportPath}} {{join .TestImports \" \"}} {{join .XTestImports \" \"}}", "./...", "./test/...") {
		from, imports, _ := strings.Cut(strings.TrimPrefix(line, module), " ")
		for imp := range strings.FieldsSeq(imports) {
			_, client := cloudClients[strings.TrimPrefix(imp, module)]
			if (client || cloudSDK.MatchString(imp)) && strings.TrimPrefix(imp, module) != from {
				t.Errorf("tests of %s import %s: only the tests of the package itself do", from, imp)
			}
		}
	}
}

// TestTagCloudHasTheClients: a build with the tag has every client in the programs that open its URLs.
func TestTagCloudHasTheClients(t *testing.T) {
	for client, programs := range cloudClients {
		var got []string
		for _, line := range golist(t, "-tags", "cloud", "-f", "{{.ImportPath}} {{join .Imports \" \"}}", "./...") {
			from, imports, _ := strings.Cut(line, " ")
			if slices.Contains(strings.Fields(imports), module+client) {
				got = append(got, strings.TrimPrefix(from, module))
			}
		}
		slices.Sort(got)
		if want := slices.Sorted(slices.Values(programs)); !slices.Equal(got, want) {
			t.Errorf("%s is imported by %v, want %v", client, got, want)
		}
	}
}

func golist(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir, cmd.Stderr = repoRoot(t), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}
