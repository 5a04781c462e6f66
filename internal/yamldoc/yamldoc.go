// Package yamldoc reads files of one YAML document that people write. It guarantees that a file which is too
// long, empty, no YAML or more than one document is refused in one line, with its line where there is one.
package yamldoc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"gopkg.in/yaml.v3"
)

// errEmpty: there is no document.
var errEmpty = errors.New("the file is empty")

// Root is the root of the one document of a file of at most so many bytes.
func Root(raw []byte, most int) (*yaml.Node, error) {
	if len(raw) > most {
		return nil, fmt.Errorf("the file has %d bytes; at most %d are read", len(raw), most)
	}
	var doc, second yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	if err := dec.Decode(&doc); err == io.EOF {
		return nil, errEmpty
	} else if err != nil {
		return nil, unreadable(err)
	}
	switch err := dec.Decode(&second); {
	case err == nil:
		return nil, fmt.Errorf("line %d: the file holds more than one document", second.Line)
	case err != io.EOF:
		return nil, unreadable(err)
	}
	if len(doc.Content) != 1 {
		return nil, errEmpty
	}
	return doc.Content[0], nil
}

// unreadable is YAML's own word, in one line.
func unreadable(err error) error {
	text := strings.Join(strings.Fields(strings.TrimPrefix(err.Error(), "yaml: ")), " ")
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		if line, what, ok := strings.Cut(rest, ": "); ok {
			return fmt.Errorf("line %s: this is no YAML: %s", line, what)
		}
	}
	return fmt.Errorf("this is no YAML: %s", text)
}
