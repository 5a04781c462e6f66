package policy

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

// AllowanceFor is a rule, not yet in a document, that allows exactly what the request is: its host and port
// by its protocol, and with exactly its method and path too.
func AllowanceFor(r Request, exactly bool) Rule {
	name := "allow-" + strings.ReplaceAll(string(r.Name), ".", "-")
	if r.Port != 443 {
		name += "-" + strconv.Itoa(int(r.Port))
	}
	rule := Rule{Name: strings.Trim(name[:min(len(name), 56)], "-"), Hosts: []Pattern{{Name: r.Name}}, Ports: []uint16{r.Port}, Protocol: r.Protocol}
	if exactly && !r.opaque() {
		rule.Methods, rule.Paths = []string{r.Method}, []string{r.Path}
	}
	return rule
}

// Add puts a rule that allows hosts, ports, a protocol, methods and paths at the end of a document, which may
// be empty, and keeps its comments. The rule gets another name if the document has its name already.
func Add(document []byte, r Rule) ([]byte, Rule, error) {
	if len(bytes.TrimSpace(document)) == 0 {
		document = []byte("rules: []\n")
	}
	old, err := Parse(document)
	if err != nil {
		return nil, r, err
	}
	name := r.Name
	taken := func() bool { return slices.ContainsFunc(old.Rules, func(o Rule) bool { return o.Name == r.Name }) }
	for i := 2; taken(); i++ {
		r.Name = fmt.Sprintf("%s-%d", name, i)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(document, &doc); err != nil {
		return nil, r, err
	}
	var added yaml.Node
	if err := added.Encode(written(r)); err != nil {
		return nil, r, err
	}
	root := doc.Content[0]
	root.Style = 0
	list := rulesOf(root)
	list.Style = 0
	list.Content = append(list.Content, &added)
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(&doc); err != nil {
		return nil, r, err
	}
	now, err := Parse(out.Bytes())
	if err != nil {
		return nil, r, fmt.Errorf("the rule cannot be added: %w", err)
	}
	c := Diff(old, now)
	if len(c.Added) != 1 || len(c.Removed)+len(c.Changed) > 0 || c.Moved || c.Contact != nil {
		return nil, r, fmt.Errorf("the rule cannot be added to this document without changing it otherwise; edit it")
	}
	return out.Bytes(), now.Rules[len(now.Rules)-1], nil
}

// rulesOf is the list of a document that was read, made if it has none.
func rulesOf(root *yaml.Node) *yaml.Node {
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value == "rules" {
			return root.Content[i+1]
		}
	}
	list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	root.Content = append(root.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: "rules"}, list)
	return list
}

type writtenRule struct {
	Name  string       `yaml:"name"`
	Allow writtenMatch `yaml:"allow"`
}

type writtenMatch struct {
	Hosts    []string `yaml:"hosts,flow"`
	Ports    []uint16 `yaml:"ports,flow,omitempty"`
	Protocol string   `yaml:"protocol,omitempty"`
	Methods  []string `yaml:"methods,flow,omitempty"`
	Paths    []string `yaml:"paths,flow,omitempty"`
}

func written(r Rule) writtenRule {
	out := writtenRule{Name: r.Name, Allow: writtenMatch{Ports: r.Ports, Protocol: string(r.Protocol), Methods: r.Methods, Paths: r.Paths}}
	for _, h := range r.Hosts {
		out.Allow.Hosts = append(out.Allow.Hosts, h.String())
	}
	return out
}
