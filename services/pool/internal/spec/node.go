package spec

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"gopkg.in/yaml.v3"

	"github.com/berth-dev/berth/internal/yamldoc"
)

// node is a part of the file that knows its line.
type node struct{ *yaml.Node }

// document reads the one YAML document of a file.
func document(raw []byte) (node, error) {
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

// items reads a list.
func (n node) items(most int) (out []node, err error) {
	if n.Kind != yaml.SequenceNode {
		return nil, n.fail("a list is expected here")
	}
	if len(n.Content) > most {
		return nil, n.fail("the list has %d entries; at most %d are read", len(n.Content), most)
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
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Value == "" {
		return "", n.fail("%s needs a value", what)
	}
	return n.Value, nil
}

// short is a value as it is told in an error: quoted, and not all of it when it is long.
func short(s string) string {
	if r := []rune(s); len(r) > 40 {
		s = string(r[:40]) + "..."
	}
	return strconv.QuoteToGraphic(s)
}

// reader reads values of a mapping until the first that is wrong. A key that is not there changes nothing.
type reader struct {
	f   map[string]node
	err error
}

func (r *reader) value(key string) (node, string, bool) {
	n, ok := r.f[key]
	if !ok || r.err != nil {
		return n, "", false
	}
	text, err := n.text(key)
	r.err = err
	return n, text, err == nil
}

// whole reads a number without a fraction.
func (r *reader) whole(key string, least, most uint32, to *uint32) {
	n, text, ok := r.value(key)
	if !ok {
		return
	}
	v, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n.Tag != "!!int" || v < uint64(least) || v > uint64(most) {
		r.err = n.fail("%s is %s; it is a whole number from %d to %d", key, short(text), least, most)
		return
	}
	*to = uint32(v)
}

// fraction reads a number from 0.
func (r *reader) fraction(key string, most float64, to *float64) {
	n, text, ok := r.value(key)
	if !ok {
		return
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || n.Tag != "!!int" && n.Tag != "!!float" || math.IsNaN(v) || v < 0 || v > most {
		r.err = n.fail("%s is %s; it is a number from 0 to %v", key, short(text), most)
		return
	}
	*to = math.Abs(v)
}

// duration reads a time with its unit.
func (r *reader) duration(key string, least, most time.Duration, to **durationpb.Duration) {
	n, text, ok := r.value(key)
	if !ok {
		return
	}
	v, err := time.ParseDuration(text)
	if err != nil || v < least || v > most {
		r.err = n.fail("%s is %s; it is a time with its unit from %s to %s, as in 90s, 200ms or 12h", key, short(text), brief(least), brief(most))
		return
	}
	*to = durationpb.New(v)
}

func brief(d time.Duration) string {
	if d >= time.Hour && d%time.Hour == 0 {
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	if d >= time.Minute && d%time.Minute == 0 {
		return fmt.Sprintf("%dm", d/time.Minute)
	}
	return d.String()
}

// clock reads a time of the day as minutes since midnight.
func (r *reader) clock(key string, most uint32, to *uint32) {
	n, text, ok := r.value(key)
	if !ok {
		return
	}
	v, good := minutes(text)
	if !good || v > most {
		r.err = n.fail("%s is %s; it is a time of the day as in \"08:30\"", key, short(text))
		return
	}
	*to = v
}

func minutes(text string) (uint32, bool) {
	if len(text) != 5 || text[2] != ':' {
		return 0, false
	}
	h, err1 := strconv.ParseUint(text[:2], 10, 8)
	m, err2 := strconv.ParseUint(text[3:], 10, 8)
	return uint32(h*60 + m), err1 == nil && err2 == nil && h <= 24 && m < 60
}
