package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"gopkg.in/yaml.v3"

	"github.com/berth-dev/berth/internal/yamldoc"
)

// node is a part of a file that knows its line.
type node struct{ *yaml.Node }

// readYAML reads the one YAML document of a file.
func readYAML(raw []byte) (node, error) {
	top, err := yamldoc.Root(raw, MaxFile)
	if err != nil {
		return node{}, err
	}
	root := node{top}
	return root, root.plain()
}

// fail says what is wrong, and where.
func (n node) fail(format string, args ...any) error {
	return fmt.Errorf("line %d: %s", n.Line, fmt.Sprintf(format, args...))
}

// plain refuses what stands for something else.
func (n node) plain() error {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return n.fail("anchors and aliases are not allowed")
	}
	if n.Style&yaml.TaggedStyle != 0 {
		return n.fail("tags are not allowed")
	}
	return nil
}

// fields reads a mapping with those keys and no others, each once.
func (n node) fields(known ...string) (map[string]node, error) {
	if n.Kind != yaml.MappingNode {
		return nil, n.fail("keys and values are expected here: %s", strings.Join(known, ", "))
	}
	out := map[string]node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := node{n.Content[i]}, node{n.Content[i+1]}
		if err := key.plain(); err != nil {
			return nil, err
		}
		if err := value.plain(); err != nil {
			return nil, err
		}
		if !slices.Contains(known, key.Value) || key.Kind != yaml.ScalarNode {
			return nil, key.fail("there is no key %s here; there are %s", short(key.Value), strings.Join(known, ", "))
		}
		if _, twice := out[key.Value]; twice {
			return nil, key.fail("%s is there twice", key.Value)
		}
		out[key.Value] = value
	}
	return out, nil
}

// items reads a list of at least one entry.
func (n node) items(what string, most int) (out []node, err error) {
	if n.Kind != yaml.SequenceNode {
		return nil, n.fail("%s is a list", what)
	}
	if len(n.Content) == 0 {
		return nil, n.fail("%s is an empty list, which nothing could match", what)
	}
	if len(n.Content) > most {
		return nil, n.fail("%s has %d entries; at most %d are read", what, len(n.Content), most)
	}
	for _, c := range n.Content {
		if err := (node{c}).plain(); err != nil {
			return nil, err
		}
		out = append(out, node{c})
	}
	return out, nil
}

// text reads one word.
func (n node) text(what string) (string, error) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Tag == "!!binary" || n.Value == "" {
		return "", n.fail("%s needs a value", what)
	}
	return n.Value, nil
}

// sentence reads a line that a person reads.
func (n node) sentence(what string, most int) (string, error) {
	s, err := n.text(what)
	if err != nil {
		return "", err
	}
	if s = strings.TrimSpace(s); s == "" || len(s) > most {
		return "", n.fail("%s has 1 to %d bytes", what, most)
	}
	for _, r := range s {
		if unicode.IsControl(r) || r == unicode.ReplacementChar {
			return "", n.fail("%s is one line without control characters", what)
		}
	}
	return s, nil
}

// truth reads true or false.
func (n node) truth(what string) (bool, error) {
	if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" || n.Value != "true" && n.Value != "false" {
		return false, n.fail("%s is true or false", what)
	}
	return n.Value == "true", nil
}

// whole reads a number without a fraction.
func (n node) whole(what string, least, most uint64) (uint64, error) {
	text, err := n.text(what)
	if err != nil {
		return 0, err
	}
	v, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n.Tag != "!!int" || v < least || v > most || text[0] == '0' && text != "0" {
		return 0, n.fail("%s is %s; it is a whole number from %d to %d", what, short(text), least, most)
	}
	return v, nil
}

// short is a value as it is told in an error: quoted, and not all of it when it is long.
func short(s string) string {
	if r := []rune(s); len(r) > 60 {
		s = string(r[:60]) + "..."
	}
	return strconv.QuoteToGraphic(s)
}
