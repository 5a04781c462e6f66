package policy

import (
	"regexp"
	"slices"
	"strings"

	"github.com/berth-dev/berth/services/egress/authority"
)

// part of a preset: one rule that allows.
type part struct {
	name     string
	hosts    []string
	protocol Protocol // https if empty
	methods  []string
	paths    []string
	// inject says where a key of the provider goes, when the preset is given one; its secret is the rule's.
	inject Injection
}

var read = []string{"GET", "HEAD"}

// presets by name. {org} stands for the part behind the colon.
var presets = map[string][]part{
	"debian": {
		{name: "http", hosts: []string{"deb.debian.org", "security.debian.org"}, protocol: HTTP, methods: read},
		{name: "https", hosts: []string{"deb.debian.org", "security.debian.org"}, methods: read},
	},
	"pypi": {
		{name: "index", hosts: []string{"pypi.org"}, methods: read, paths: []string{"/simple", "/pypi"}},
		{name: "files", hosts: []string{"files.pythonhosted.org"}, methods: read},
	},
	"npm": {
		{name: "registry", hosts: []string{"registry.npmjs.org"}, methods: read},
		{name: "audit", hosts: []string{"registry.npmjs.org"}, methods: []string{"POST"}, paths: []string{"/-/npm/v1/security"}},
		{name: "node", hosts: []string{"nodejs.org"}, methods: read, paths: []string{"/dist", "/download/release"}},
	},
	"go": {
		{name: "proxy", hosts: []string{"proxy.golang.org", "sum.golang.org"}, methods: read},
		{name: "storage", hosts: []string{"storage.googleapis.com"}, methods: read, paths: []string{"/proxy-golang-org-prod"}},
		{name: "toolchain", hosts: []string{"dl.google.com"}, methods: read, paths: []string{"/go"}},
	},
	"crates": {
		{name: "index", hosts: []string{"index.crates.io"}, methods: read},
		{name: "files", hosts: []string{"static.crates.io"}, methods: read},
		{name: "api", hosts: []string{"crates.io"}, methods: read, paths: []string{"/api/v1/crates"}},
	},
	"github": {
		{name: "web", hosts: []string{"github.com"}, paths: []string{"/{org}"}},
		{name: "api", hosts: []string{"api.github.com"}, paths: []string{"/repos/{org}", "/orgs/{org}"}},
		{name: "archives", hosts: []string{"codeload.github.com"}, methods: read, paths: []string{"/{org}"}},
		{name: "raw", hosts: []string{"raw.githubusercontent.com"}, methods: read, paths: []string{"/{org}"}},
	},
	"anthropic": {{name: "api", hosts: []string{"api.anthropic.com"}, paths: []string{"/v1"}, inject: Injection{Header: "X-Api-Key", Format: "{secret}"}}},
	"openai":    {{name: "api", hosts: []string{"api.openai.com"}, paths: []string{"/v1"}, inject: Injection{Header: "Authorization", Format: "Bearer {secret}"}}},
	"gemini": {{name: "api", hosts: []string{"generativelanguage.googleapis.com"}, paths: []string{"/v1", "/v1beta", "/upload/v1beta"},
		inject: Injection{Header: "X-Goog-Api-Key", Format: "{secret}"}}},
	"mistral": {{name: "api", hosts: []string{"api.mistral.ai"}, paths: []string{"/v1"}, inject: Injection{Header: "Authorization", Format: "Bearer {secret}"}}},
}

var orgName = regexp.MustCompile(`^[A-Za-z0-9](-?[A-Za-z0-9]){0,38}$`)

// Presets are their names, sorted.
func Presets() []string {
	var out []string
	for name := range presets {
		if name == "github" {
			name = "github:ORGANISATION"
		}
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// readPreset makes the rules that a preset stands for, each named <rule>/<part>.
func readPreset(n node, f map[string]node) ([]Rule, error) {
	for _, key := range []string{"allow", "deny", "addresses"} {
		if v, ok := f[key]; ok {
			return nil, v.fail("%s does not go with preset", key)
		}
	}
	text, err := f["preset"].text("preset")
	if err != nil {
		return nil, err
	}
	kind, org, hasOrg := strings.Cut(text, ":")
	parts, ok := presets[kind]
	if !ok || hasOrg != (kind == "github") {
		return nil, f["preset"].fail("%s is no preset; there are %s", short(text), strings.Join(Presets(), ", "))
	}
	if hasOrg && !orgName.MatchString(org) {
		return nil, f["preset"].fail("%s is no organisation", short(org))
	}
	terms := Rule{Line: n.Line, Name: kind}
	if hasOrg {
		terms.Name += "-" + strings.ToLower(org)
	}
	if v, ok := f["name"]; ok {
		if terms.Name, err = readName(v); err != nil {
			return nil, err
		}
	}
	inject, hasInject := f["inject"]
	delete(f, "inject")
	if err := readTerms(f, &terms); err != nil {
		return nil, err
	}
	if hasInject {
		if parts[0].inject == (Injection{}) {
			return nil, inject.fail("the preset %s takes no secret; write a rule of your own", kind)
		}
		if terms.Inject, err = readInjections(inject, parts[0].inject); err != nil {
			return nil, err
		}
	}
	return expand(n, parts, terms, org)
}

func expand(n node, parts []part, terms Rule, org string) ([]Rule, error) {
	var out []Rule
	for _, p := range parts {
		r := terms
		r.Name, r.Protocol, r.Methods, r.Paths = terms.Name+"/"+p.name, p.protocol, slices.Clone(p.methods), nil
		for _, h := range p.hosts {
			name, err := authority.ParseStrict(h)
			if err != nil {
				return nil, n.fail("%s", err)
			}
			r.Hosts = append(r.Hosts, Pattern{Name: name})
		}
		for _, path := range p.paths {
			r.Paths = append(r.Paths, strings.ReplaceAll(path, "{org}", org))
			if small := strings.ReplaceAll(path, "{org}", strings.ToLower(org)); !slices.Contains(r.Paths, small) {
				r.Paths = append(r.Paths, small)
			}
		}
		if err := fit(n, &r); err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}
