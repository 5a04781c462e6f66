// Package spec reads files of pools. It guarantees that a file is either understood whole, with every
// default filled in, or refused with one sentence that names the line; that it costs no more than its
// size to find out; and that nothing in it stands for something else: no anchors, aliases or tags.
package spec

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // a host may have no time zones

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/pool/internal/core"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Bounds of what a file may ask for.
const (
	MaxFile     = 64 << 10
	MaxPools    = 256
	MaxCeiling  = 10000
	MaxInFlight = 64
	MaxRatio    = 10
	MaxAge      = 30 * 24 * time.Hour
	MinAge      = time.Minute
	MaxWait     = 10 * time.Second
	MaxZones    = 16
	MaxSchedule = 32
)

// What a pool is that says nothing about it. The ceiling has no default.
const (
	DefaultInFlight = 2
	DefaultMaxAge   = 24 * time.Hour
	DefaultShare    = 0.5
)

// strength orders the tiers that can be compared, weakest first. The others stand for themselves alone.
var strength = []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_KATA, corev1.Tier_TIER_MICROVM}

// Parse reads a file of pools. templates are all that there are, with their tiers.
func Parse(file []byte, templates map[string]corev1.Tier) ([]*poolv1.Spec, error) {
	root, err := document(file)
	if err != nil {
		return nil, err
	}
	top, err := root.fields("pools")
	if err != nil {
		return nil, err
	}
	list, ok := top["pools"]
	if !ok {
		return nil, root.fail("the file has no pools")
	}
	items, err := list.items(MaxPools)
	if err != nil {
		return nil, err
	}
	var out []*poolv1.Spec
	at := map[string]int{}
	for _, item := range items {
		s, err := readPool(item, templates)
		if err != nil {
			return nil, err
		}
		if line, twice := at[s.Template]; twice {
			return nil, item.fail("template %s has a pool already, on line %d", s.Template, line)
		}
		at[s.Template] = item.Line
		out = append(out, s)
	}
	return out, nil
}

var poolKeys = []string{"template", "tier", "minimum", "ratio", "ceiling", "in_flight", "max_age", "wait", "share", "zones", "schedule"}

// readPool reads one pool; what it does not say is the default.
func readPool(n node, templates map[string]corev1.Tier) (*poolv1.Spec, error) {
	f, err := n.fields(poolKeys...)
	if err != nil {
		return nil, err
	}
	s := &poolv1.Spec{InFlight: DefaultInFlight, Share: DefaultShare,
		MaxAge: durationpb.New(DefaultMaxAge), Wait: durationpb.New(0)}
	if err := readTemplate(n, f, templates, s); err != nil {
		return nil, err
	}
	if _, ok := f["ceiling"]; !ok {
		return nil, n.fail("the pool of %s has no ceiling", s.Template)
	}
	r := reader{f: f}
	r.whole("ceiling", 1, MaxCeiling, &s.Ceiling)
	r.whole("minimum", 0, MaxCeiling, &s.Minimum)
	r.whole("in_flight", 1, MaxInFlight, &s.InFlight)
	r.fraction("ratio", MaxRatio, &s.Ratio)
	r.fraction("share", 1, &s.Share)
	r.duration("max_age", MinAge, MaxAge, &s.MaxAge)
	r.duration("wait", 0, MaxWait, &s.Wait)
	if r.err != nil {
		return nil, r.err
	}
	if s.Share == 0 {
		return nil, f["share"].fail("share is 0; no tenant could have any")
	}
	if s.Minimum > s.Ceiling {
		return nil, f["minimum"].fail("minimum is %d, above the ceiling of %d", s.Minimum, s.Ceiling)
	}
	if s.Zones, err = readZones(f); err != nil {
		return nil, err
	}
	s.Schedule, err = readSchedule(f, s.Ceiling)
	return s, err
}

// readTemplate reads the template's name, and the tier, which is the template's own or a stronger one.
func readTemplate(n node, f map[string]node, templates map[string]corev1.Tier, s *poolv1.Spec) error {
	name, ok := f["template"]
	if !ok {
		return n.fail("the pool names no template")
	}
	text, err := name.text("template")
	if err != nil {
		return err
	}
	own, known := templates[text]
	if _, err := ids.ParseTemplate(text); err != nil || !known {
		return name.fail("there is no template %s; there are %s", short(text), strings.Join(slices.Sorted(maps.Keys(templates)), ", "))
	}
	s.Template, s.Tier = text, own
	tier, ok := f["tier"]
	if !ok {
		return nil
	}
	word, err := tier.text("tier")
	if err != nil {
		return err
	}
	t, ok := corev1.Tier_value["TIER_"+strings.ToUpper(word)]
	if !ok || t == 0 || word != strings.ToLower(word) {
		return tier.fail("there is no tier %s; there are %s", short(word), strings.Join(tierWords(), ", "))
	}
	s.Tier = corev1.Tier(t)
	if s.Tier != own && (!slices.Contains(strength, own) || slices.Index(strength, s.Tier) < slices.Index(strength, own)) {
		return tier.fail("sessions of template %s have at least tier %s; a pool of tier %s would serve none", text, core.TierWord(own), word)
	}
	return nil
}

func tierWords() (out []string) {
	for i := int32(1); i < int32(len(corev1.Tier_name)); i++ {
		out = append(out, core.TierWord(corev1.Tier(i)))
	}
	return out
}

func readZones(f map[string]node) ([]string, error) {
	n, ok := f["zones"]
	if !ok {
		return nil, nil
	}
	items, err := n.items(MaxZones)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, item := range items {
		zone, err := item.text("zone")
		if err != nil {
			return nil, err
		}
		switch {
		case len(zone) > 64 || strings.ContainsFunc(zone, func(r rune) bool { return r <= ' ' || r > '~' }):
			return nil, item.fail("%s is no name of a zone", short(zone))
		case slices.Contains(out, zone):
			return nil, item.fail("zone %s is there twice", zone)
		}
		out = append(out, zone)
	}
	return out, nil
}

func readSchedule(f map[string]node, ceiling uint32) ([]*poolv1.Schedule, error) {
	n, ok := f["schedule"]
	if !ok {
		return nil, nil
	}
	items, err := n.items(MaxSchedule)
	if err != nil {
		return nil, err
	}
	var out []*poolv1.Schedule
	for _, item := range items {
		s, err := readSlot(item, ceiling)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

func readSlot(n node, ceiling uint32) (*poolv1.Schedule, error) {
	f, err := n.fields("days", "from", "to", "time_zone", "minimum")
	if err != nil {
		return nil, err
	}
	for _, key := range []string{"from", "to", "minimum"} {
		if _, ok := f[key]; !ok {
			return nil, n.fail("this part of the schedule has no %s", key)
		}
	}
	s := &poolv1.Schedule{}
	r := reader{f: f}
	r.whole("minimum", 0, MaxCeiling, &s.Minimum)
	r.clock("from", 24*60-1, &s.From)
	r.clock("to", 24*60, &s.To)
	if r.err != nil {
		return nil, r.err
	}
	if s.Minimum > ceiling {
		return nil, f["minimum"].fail("the schedule's minimum is %d, above the ceiling of %d", s.Minimum, ceiling)
	}
	if s.From == s.To {
		return nil, f["to"].fail("from and to are the same; a whole day is 00:00 to 24:00")
	}
	if s.Days, err = readDays(f); err != nil {
		return nil, err
	}
	zone, ok := f["time_zone"]
	if !ok {
		return s, nil
	}
	if s.TimeZone, err = zone.text("time_zone"); err != nil {
		return nil, err
	}
	if _, err := loadZone(s.TimeZone); err != nil {
		return nil, zone.fail("there is no time zone %s; one is named as in Europe/Berlin", short(s.TimeZone))
	}
	return s, nil
}

// loadZone finds a time zone by its name. Local is whatever the machine has, and so no answer.
func loadZone(name string) (*time.Location, error) {
	if name == "" || name == "Local" || len(name) > 64 {
		return nil, fmt.Errorf("no time zone is called %q", name)
	}
	return time.LoadLocation(name)
}

var dayNames = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

func readDays(f map[string]node) ([]uint32, error) {
	n, ok := f["days"]
	if !ok {
		return nil, nil
	}
	items, err := n.items(len(dayNames))
	if err != nil {
		return nil, err
	}
	var out []uint32
	for _, item := range items {
		word, err := item.text("day")
		if err != nil {
			return nil, err
		}
		day := slices.Index(dayNames, word)
		if day < 0 {
			return nil, item.fail("there is no day %s; there are %s", short(word), strings.Join(dayNames, ", "))
		}
		if slices.Contains(out, uint32(day)) {
			return nil, item.fail("%s is there twice", word)
		}
		out = append(out, uint32(day))
	}
	if len(out) == 0 {
		return nil, n.fail("days names no day; leave it out for every day")
	}
	return out, nil
}
