package tierpolicy

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gopkg.in/yaml.v3"
)

// maxFile bounds what is read of one file.
const maxFile = 256 << 10

// document reads one YAML document of a file. Anchors and aliases are refused:
// what is written is what there is.
func document(file string, raw []byte) (*yaml.Node, error) {
	if len(raw) > maxFile {
		return nil, failure(file, 0, "it has %d bytes, at most %d are read", len(raw), maxFile)
	}
	var doc yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	if err := dec.Decode(&doc); err != nil {
		if err == io.EOF {
			return nil, failure(file, 0, "it is empty")
		}
		return nil, failure(file, 0, "%s", oneLine(strings.TrimPrefix(err.Error(), "yaml: ")))
	}
	if err := dec.Decode(new(yaml.Node)); err != io.EOF {
		return nil, failure(file, 0, "it holds more than one document")
	}
	if len(doc.Content) != 1 {
		return nil, failure(file, 0, "it is empty")
	}
	return doc.Content[0], nil
}

// failure is the one kind of error of this package: the file, the line, one sentence.
func failure(file string, line int, format string, args ...any) error {
	where := file
	if line > 0 {
		where += ":" + strconv.Itoa(line)
	}
	return errs.E("read tier policy", errkind.Invalid, "", where+": "+fmt.Sprintf(format, args...))
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// node is a part of a file that knows where it stands and what it is of.
type node struct {
	*yaml.Node
	file, of string
}

func (n node) fail(format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	if n.of != "" {
		text = n.of + ": " + text
	}
	return failure(n.file, n.Line, "%s", text)
}

// fields reads a mapping; a key that is not among known, or is there twice, is an error.
func (n node) fields(known ...string) (map[string]node, error) {
	if n.Kind != yaml.MappingNode {
		return nil, n.fail("a mapping with the keys %s is needed", strings.Join(known, ", "))
	}
	out := map[string]node{}
	err := n.pairs(func(key string, value node) error {
		for _, k := range known {
			if k == key {
				out[key] = value
				return nil
			}
		}
		return value.fail("%q is no key here; there are %s", key, strings.Join(known, ", "))
	})
	return out, err
}

// pairs calls f for every key of a mapping.
func (n node) pairs(f func(key string, value node) error) error {
	if n.Kind != yaml.MappingNode {
		return n.fail("a mapping is needed")
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], node{n.Content[i+1], n.file, n.of}
		if key.Kind != yaml.ScalarNode || key.Anchor != "" {
			return n.fail("a key must be a word")
		}
		if seen[key.Value] {
			return value.fail("%q is there twice", key.Value)
		}
		seen[key.Value] = true
		if err := value.plain(); err != nil {
			return err
		}
		if err := f(key.Value, value); err != nil {
			return err
		}
	}
	return nil
}

// plain refuses what stands for something else.
func (n node) plain() error {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return n.fail("anchors and aliases are not allowed")
	}
	return nil
}

// items reads a list.
func (n node) items() (out []node, err error) {
	if n.Kind != yaml.SequenceNode {
		return nil, n.fail("a list is needed")
	}
	for _, c := range n.Content {
		item := node{c, n.file, n.of}
		if err := item.plain(); err != nil {
			return nil, err
		}
		out = append(out, item)
	}
	return out, nil
}

// text reads a word or a sentence; of a number or a truth value, how it is written.
func (n node) text() (string, error) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Tag == "!!binary" {
		return "", n.fail("a text is needed")
	}
	return n.Value, nil
}

// sentence reads a line that a person reads.
func (n node) sentence(most int) (string, error) {
	s, err := n.text()
	if err != nil {
		return "", err
	}
	if s = strings.TrimSpace(s); s == "" || len(s) > most {
		return "", n.fail("it has %d bytes; 1 to %d are needed", len(s), most)
	}
	for _, r := range s {
		if unicode.IsControl(r) || r == unicode.ReplacementChar {
			return "", n.fail("it must be one line without control characters")
		}
	}
	return s, nil
}

// words reads a word, or a list of words.
func (n node) words() ([]string, error) {
	if n.Kind == yaml.ScalarNode {
		s, err := n.text()
		return []string{s}, err
	}
	items, err := n.items()
	if err != nil {
		return nil, err
	}
	out := []string{}
	for _, item := range items {
		s, err := item.text()
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// truth reads true or false.
func (n node) truth() (bool, error) {
	if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" {
		return false, n.fail("true or false is needed")
	}
	var v bool
	if err := n.Decode(&v); err != nil {
		return false, n.fail("true or false is needed")
	}
	return v, nil
}
