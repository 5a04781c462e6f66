package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Changes are what a new document of a scope changes.
type Changes struct {
	Contact *Change  `json:"contact,omitempty"`
	Added   []Change `json:"added"`
	Removed []Change `json:"removed"`
	Changed []Change `json:"changed"`
	// Moved: rules that are in both stand in another order, which decides which of several that allow counts.
	Moved bool `json:"moved"`
}

// Change of one rule, or of the contact; Old and New are the rule in a line.
type Change struct {
	Rule string `json:"rule,omitempty"`
	Old  string `json:"old,omitempty"`
	New  string `json:"new,omitempty"`
}

// Diff compares two documents; a nil one is that of a scope without a policy.
func Diff(old, now *Document) Changes {
	before, after := old.byName(), now.byName()
	c := Changes{Added: []Change{}, Removed: []Change{}, Changed: []Change{}}
	if o, n := old.contact(), now.contact(); o != n {
		c.Contact = &Change{Old: o, New: n}
	}
	var stayed, order []string
	for _, r := range old.rules() {
		if _, is := after[r.Name]; !is {
			c.Removed = append(c.Removed, Change{Rule: r.Name, Old: r.String()})
			continue
		}
		stayed = append(stayed, r.Name)
	}
	for _, r := range now.rules() {
		was, is := before[r.Name]
		if !is {
			c.Added = append(c.Added, Change{Rule: r.Name, New: r.String()})
			continue
		}
		order = append(order, r.Name)
		if was, is := was.String(), r.String(); was != is {
			c.Changed = append(c.Changed, Change{Rule: r.Name, Old: was, New: is})
		}
	}
	c.Moved = !slices.Equal(stayed, order)
	return c
}

// None reports whether nothing changes.
func (c Changes) None() bool {
	return c.Contact == nil && len(c.Added)+len(c.Removed)+len(c.Changed) == 0 && !c.Moved
}

// String is the changes as lines, each with + or - before it.
func (c Changes) String() string {
	var b strings.Builder
	line := func(sign, rule, text string) {
		if text != "" {
			fmt.Fprintf(&b, "%s %s: %s\n", sign, rule, text)
		}
	}
	if c.Contact != nil {
		line("-", "contact", c.Contact.Old)
		line("+", "contact", c.Contact.New)
	}
	for _, part := range [][]Change{c.Removed, c.Changed, c.Added} {
		for _, r := range part {
			line("-", r.Rule, r.Old)
			line("+", r.Rule, r.New)
		}
	}
	if c.Moved {
		b.WriteString("~ rules stand in another order\n")
	}
	return b.String()
}

func (d *Document) rules() []Rule {
	if d == nil {
		return nil
	}
	return d.Rules
}

func (d *Document) contact() string {
	if d == nil {
		return ""
	}
	return d.Contact
}

func (d *Document) byName() map[string]Rule {
	out := map[string]Rule{}
	for _, r := range d.rules() {
		out[r.Name] = r
	}
	return out
}
