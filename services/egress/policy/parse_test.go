package policy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestAFaultyPolicyIsRefusedWithItsLine: what is not complete and canonical is an error, never a guess.
func TestAFaultyPolicyIsRefusedWithItsLine(t *testing.T) {
	allow := func(inner string) string { return "rules:\n  - name: a\n    allow: {" + inner + "}\n" }
	for in, want := range map[string]string{
		"":                                 "the file is empty",
		"rules: [":                         "line 1: this is no YAML",
		"[]":                               "line 1: keys and values are expected here",
		"rules: []\n---\nrules: []":        "more than one document",
		"rule: []":                         `line 1: there is no key "rule" here`,
		"rules: 3":                         "line 1: rules is a list",
		"rules:\n":                         "line 1: rules is a list",
		"rules: []\nrules: []":             "line 2: rules is there twice",
		"contact: \"\\u0007\"":             "line 1: contact is one line",
		"rules: &a []":                     "anchors and aliases",
		"rules: !!seq [x]":                 "tags are not allowed",
		"rules:\n  - {}":                   "line 2: the rule has no name",
		"rules:\n  - name: A":              `"A" is no name of a rule`,
		"rules:\n  - name: a":              "line 2: rule a needs one of allow, deny and preset",
		"rules:\n  - {name: a, allow: {}}": "line 2: rule a names no hosts",
		allow("hosts: []"):                 "line 3: hosts is an empty list",
		allow("hosts: [example.com]") + "    deny: {hosts: [example.com]}": "needs one of allow, deny and preset",
		allow("hosts: [example.com], port: 1"):                             `there is no key "port" here`,
		allow("hosts: example.com"):                                        "hosts is a list",
		allow("hosts: [Example.com]"):                                      "line 3: \"Example.com\" is not how this name is written: write example.com",
		allow("hosts: [example.com.]"):                                     "write example.com",
		allow("hosts: [bücher.example]"):                                   "write xn--bcher-kva.example",
		allow("hosts: [127.0.0.1]"):                                        "is an address, not a host name",
		allow("hosts: [0x7f.1]"):                                           "is an address, not a host name",
		allow("hosts: ['*']"):                                              "a star stands only before a name",
		allow("hosts: ['*.com']"):                                          "at least two labels follow the star",
		allow("hosts: ['*.*.example.com']"):                                "a star stands only before a name",
		allow("hosts: ['a*.example.com']"):                                 "a star stands only before a name",
		allow("hosts: ['*.0.1']"):                                          "is an address",
		allow("hosts: [example.com, example.com]"):                         `"example.com" is there twice`,
		allow("hosts: [example.com], ports: []"):                           "ports is an empty list",
		allow("hosts: [example.com], ports: [0]"):                          "a whole number from 1 to 65535",
		allow("hosts: [example.com], ports: [65536]"):                      "a whole number from 1 to 65535",
		allow("hosts: [example.com], ports: ['443']"):                      "a whole number from 1 to 65535",
		allow("hosts: [example.com], ports: [0x1bb]"):                      "a whole number from 1 to 65535",
		allow("hosts: [example.com], protocol: udp"):                       "is no protocol",
		allow("hosts: [example.com], methods: [get]"):                      "is no method",
		allow("hosts: [example.com], methods: []"):                         "methods is an empty list",
		allow("hosts: [example.com], methods: [CONNECT]"):                  "CONNECT is no method of a request",
		allow("hosts: [example.com], paths: [v1]"):                         "does not begin with /",
		allow("hosts: [example.com], paths: [/a/../b]"):                    "write /b",
		allow("hosts: [example.com], paths: [/a%2fb]"):                     "write /a%2Fb",
		allow("hosts: [example.com], paths: [/a%2Fb]"):                     "is no path of a rule",
		allow("hosts: [example.com], paths: [//a]"):                        "is no path of a rule",
		allow("hosts: [example.com], paths: ['*']"):                        "is no path of a rule",
		allow("hosts: [example.com], paths: ['/a?b']"):                     "is no path",
		allow("hosts: [example.com], protocol: tls, paths: [/a]"):          "methods and paths need the protocol http or https",
		allow("hosts: [example.com], protocol: tcp"):                       "the protocol tcp needs ports",
		allow("hosts: ['*.example.com'], protocol: tcp, ports: [22]"):      "the protocol tcp needs exact hosts",
		"rules:\n  - {preset: pypi}\n  - {preset: pypi}":                   "there is a rule pypi/index already, on line 2",
		"rules:\n  - {preset: pipy}":                                       `"pipy" is no preset; there are anthropic,`,
		"rules:\n  - {preset: github}":                                     "is no preset",
		"rules:\n  - {preset: 'pypi:x'}":                                   "is no preset",
		"rules:\n  - {preset: 'github:a/b'}":                               "is no organisation",
		"rules:\n  - {preset: 'github:..'}":                                "is no organisation",
		"rules:\n  - {preset: pypi, inject: {secret: x}}":                  "takes no secret",
		"rules:\n  - {preset: pypi, addresses: [10.0.0.0/8]}":              "does not go with preset",
	} {
		if d, err := Parse([]byte(in)); err == nil || !strings.Contains(err.Error(), want) || d != nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s\n%v; want %s", in, err, want)
		}
	}
}

// TestFaultyTermsAreRefused: limits, secrets and address ranges.
func TestFaultyTermsAreRefused(t *testing.T) {
	for in, want := range map[string]string{
		"limits: {}":                                                        "limits names none",
		"limits: {burst: 3}":                                                "burst goes with requests_per_second",
		"limits: {requests_per_second: 0}":                                  "a number from 0.001",
		"limits: {requests_per_second: .nan}":                               "a number from 0.001",
		"limits: {requests_per_second: -1}":                                 "a number from 0.001",
		"limits: {bytes_per_day: 100}":                                      "a whole number with its unit",
		"limits: {bytes_per_day: 0B}":                                       "a whole number with its unit",
		"limits: {bytes_per_day: 1.5GiB}":                                   "a whole number with its unit",
		"limits: {bytes_per_day: 9999999TiB}":                               "too much",
		"limits: {connections: 0}":                                          "a whole number from 1",
		"inject: {header: X}":                                               "inject names no secret",
		"inject: {secret: A, header: X}":                                    "is no name of a secret",
		"inject: {secret: a}":                                               "inject needs one of header and query",
		"inject: {secret: a, header: X, query: y}":                          "inject needs one of header and query",
		"inject: {secret: a, header: Host}":                                 "cannot go into the header field Host",
		"inject: {secret: a, header: Proxy-Authorization}":                  "cannot go into the header field",
		"inject: {secret: a, header: \"X: y\"}":                             "is no name of a header field",
		"inject: {secret: a, header: X, format: none}":                      "is no format",
		"inject: {secret: a, header: X, format: '{secret}{secret}'}":        "is no format",
		"inject: {secret: a, header: X, format: \"{secret}\\r\\nHost: x\"}": "is no format",
		"inject: {secret: a, header: X, placeholder: short}":                "is no placeholder",
		"inject: [{secret: a, header: X}, {secret: b, header: x}]":          "two secrets go to one place",
		"inject: [{secret: a, header: X}, {secret: a, header: Y}]":          "two secrets have one placeholder",
		"addresses: [10.0.0.1]":                                             "is no range of addresses",
		"addresses: [10.0.0.1/8]":                                           "write 10.0.0.0/8",
		"addresses: [0.0.0.0/0]":                                            "is too wide",
		"addresses: ['::/0']":                                               "is too wide",
		"addresses: ['::ffff:10.0.0.0/104']":                                "write it as IPv4",
		"report_only: 1":                                                    "report_only is true or false",
		"refuse_credentials: 'true'":                                        "refuse_credentials is true or false",
	} {
		if _, err := Parse([]byte("rules:\n  - name: a\n    allow: {hosts: [example.com]}\n    " + in + "\n")); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "line ") {
			t.Errorf("%s\n%v; want %s", in, err, want)
		}
	}
	for in, want := range map[string]string{
		"{name: a, deny: {hosts: [example.com]}, inject: {secret: a, header: X}}":                     "belong to rules that allow",
		"{name: a, deny: {hosts: [example.com]}, limits: {connections: 1}}":                           "belong to rules that allow",
		"{name: a, allow: {hosts: ['*.example.com']}, inject: {secret: a, header: X}}":                "only for exact hosts",
		"{name: a, allow: {hosts: [a.example.com], protocol: http}, inject: {secret: a, header: X}}":  "only where the protocol is https",
		"{name: a, allow: {hosts: [a.example.com], protocol: tls}, refuse_credentials: true}":         "needs the protocol http or https",
		"{name: a, allow: {hosts: [a.example.com], protocol: tls}, limits: {requests_per_second: 1}}": "needs the protocol http or https",
	} {
		if _, err := Parse([]byte("rules:\n  - " + in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\n%v; want %s", in, err, want)
		}
	}
}

// TestEveryPresetIsAPolicy: and those of providers take a key.
func TestEveryPresetIsAPolicy(t *testing.T) {
	for _, name := range Presets() {
		text := "rules:\n  - preset: '" + strings.Replace(name, "ORGANISATION", "acme", 1) + "'\n"
		d, err := Parse([]byte(text))
		if err != nil || len(d.Rules) == 0 {
			t.Fatalf("%s: %v", name, err)
		}
		keyed, err := Parse([]byte(text + "    inject: {secret: key}\n"))
		provider := presets[strings.Split(name, ":")[0]][0].inject != Injection{}
		if (err == nil) != provider {
			t.Errorf("%s with a key: %v", name, err)
		}
		for _, r := range d.Rules {
			if !strings.Contains(r.Name, "/") || r.Deny || !provider && !strings.HasPrefix(name, "github") && len(r.Methods) == 0 {
				t.Errorf("%s: rule %s: %s", name, r.Name, r)
			}
		}
		if err == nil && (keyed.Rules[0].Inject[0].Secret != "key" || keyed.Rules[0].Inject[0].Placeholder != "BERTH_SECRET_KEY" || keyed.Rules[0].Inject[0].Header == "") {
			t.Errorf("%s: %+v", name, keyed.Rules[0].Inject)
		}
	}
}

// TestNothingAllowsNothing: a missing list, an empty one, and one of contact alone.
func TestNothingAllowsNothing(t *testing.T) {
	for _, text := range []string{"rules: []", "contact: x", "{}"} {
		d, err := Parse([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		p := Merge([]Layered{{layer("tenant"), 3, d}})
		got := p.Judge(Request{Name: "example.com", Port: 443, Protocol: HTTPS, Method: "GET", Path: "/"})
		if got.Allowed || got.Reason != NoRule || p.MayResolve("example.com") || got.Generation != 3 {
			t.Errorf("%s: %+v", text, got)
		}
	}
	for _, p := range []*Policy{nil, {}, Merge(nil), Merge([]Layered{{Scope: layer("cell")}})} {
		need, d := p.Need("example.com", 443, true)
		if got := p.Judge(Request{Name: "example.com", Port: 443, Protocol: TLS}); got.Reason != NoPolicy || got.Allowed || need != Refuse || d.Allowed || p.MayResolve("example.com") || p.Secrets() != nil || p.Allowances() != nil {
			t.Errorf("%+v: %+v %v", p, got, need)
		}
	}
}

// FuzzDocument: reading ends in a policy that reads again as it is, or in one sentence.
func FuzzDocument(f *testing.F) {
	files, _ := filepath.Glob("testdata/policies/*.yaml")
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("rules:\n- {name: a, allow: {hosts: [a.example]}, inject: [{secret: a, query: k}]}"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if cases, err := ParseCases(raw); err == nil {
			for _, c := range cases {
				if r := (*Policy)(nil).run(c); r.Decision.Allowed {
					t.Fatalf("no policy allows %+v", c)
				}
			}
		}
		d, err := Parse(raw)
		if err != nil {
			if d != nil || strings.Contains(err.Error(), "\n") {
				t.Fatalf("%q", err)
			}
			return
		}
		p := Merge([]Layered{{layer("cell"), 1, d}})
		for _, r := range d.Rules {
			if len(r.Hosts) == 0 || !r.Deny && (len(r.Ports) == 0 || r.Protocol == "") {
				t.Fatalf("rule %s: %s", r.Name, r)
			}
			for _, h := range r.Hosts {
				if h.Name == "" || h.Matches("unrelated.test") && !strings.HasSuffix("unrelated.test", string(h.Name)) {
					t.Fatalf("rule %s: %s", r.Name, h)
				}
			}
		}
		p.Allowances()
		if c := Diff(d, d); !c.None() {
			t.Fatalf("it differs from itself: %s", c)
		}
	})
}
