package core

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/script"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// TestDecisions runs testdata/*.txt: what happens, a line of dashes, and what is decided. Run with
// -rewrite to accept what the code says now.
func TestDecisions(t *testing.T) {
	script.Run(t, func(t *testing.T) func(string) string {
		b := &bench{t: t, spec: Spec{Template: "py", Tier: gvisor, Ceiling: 10, InFlight: 2, MaxAge: 24 * time.Hour, Share: 0.5}}
		return b.step
	})
}

// bench is a world that a script drives.
type bench struct {
	t    *testing.T
	spec Spec
	w    *world
	d    Demand
}

func (b *bench) step(line string) string {
	words := strings.Fields(line)
	args := map[string]string{}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		args[k] = v
	}
	switch words[0] {
	case "goal", "demand":
		return b.goal(words[0], args)
	case "hosts":
		b.w = newWorld(b.spec, number(b.t, words[1]))
		return b.plan()
	case "pool":
		b.declare(args)
		if b.w == nil {
			return "declared\n"
		}
		return b.plan()
	case "host":
		b.set(b.w.host(words[1]), args)
		return b.plan()
	case "plan":
		return b.plan()
	case "template":
		b.w.tpl = Template{Digest: words[1], Image: args["image"], Memory: uint64(number(b.t, or(args["memory"], "0")))}
		b.lead().Declare(b.spec, b.w.tpl)
		return b.plan()
	case "leader":
		b.w.elect()
		return b.plan()
	case "removed":
		b.lead().Remove()
		return b.plan()
	case "run":
		return b.run(words[1])
	case "claim":
		for range number(b.t, or(args["n"], "1")) {
			b.w.claim(words[1])
		}
		return b.there()
	case "ask", "settle", "granted":
		return b.desk(words, args)
	case "status":
		return b.status()
	}
	b.t.Fatalf("%q is not known to the script", line)
	return ""
}

func (b *bench) lead() *leader { return b.w.leaders[len(b.w.leaders)-1] }

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

func number(t *testing.T, s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (b *bench) duration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		b.t.Fatal(err)
	}
	return d
}

func (b *bench) declare(args map[string]string) {
	s := &b.spec
	for k, v := range args {
		switch k {
		case "minimum":
			s.Minimum = number(b.t, v)
		case "ceiling":
			s.Ceiling = number(b.t, v)
		case "in_flight":
			s.InFlight = number(b.t, v)
		case "max_age":
			s.MaxAge = b.duration(v)
		case "wait":
			s.Wait = b.duration(v)
		case "ratio":
			s.Ratio, _ = strconv.ParseFloat(v, 64)
		case "share":
			s.Share, _ = strconv.ParseFloat(v, 64)
		case "zones":
			s.Zones = strings.Split(v, ",")
		case "schedule":
			s.Schedule = append(s.Schedule, b.slot(v))
		default:
			b.t.Fatalf("the script sets %q", k)
		}
	}
	if b.w != nil {
		b.w.spec = b.spec
		b.lead().Declare(b.spec, b.w.tpl)
	}
}

// slot reads days/from-to/zone/minimum, minutes since midnight.
func (b *bench) slot(v string) Slot {
	p := strings.Split(v, "/")
	from, to, _ := strings.Cut(p[1], "-")
	out := Slot{From: number(b.t, from), To: number(b.t, to), Minimum: number(b.t, p[3]), Zone: time.FixedZone(p[2], map[string]int{"plus2": 7200}[p[2]])}
	for _, d := range p[0] {
		out.Days = append(out.Days, time.Weekday(d-'0'))
	}
	return out
}

func (b *bench) set(h *fakeHost, args map[string]string) {
	for k, v := range args {
		switch k {
		case h.id:
		case "draining":
			h.drain = v == "yes"
		case "silent":
			h.silent = v == "yes"
		case "lost":
			if h.lost = v == "yes"; h.lost {
				restart(h)
			}
		case "restarted":
			restart(h)
		case "unwell":
			h.unwell = v
		case "fail":
			h.fail = v
		case "zone":
			h.zone = v
		case "image":
			h.images = []string{v}
		case "free":
			h.free = uint64(number(b.t, v))
		case "active":
			h.active = number(b.t, v)
		case "tier":
			h.tiers = []corev1.Tier{corev1.Tier(corev1.Tier_value["TIER_"+strings.ToUpper(v)])}
		case "stale":
			h.there[slices.Sorted(maps.Keys(h.there))[0]].Stale = v
		default:
			b.t.Fatalf("the script sets %q of a host", k)
		}
	}
}

// goal of a demand that "demand" set, without a world.
func (b *bench) goal(verb string, args map[string]string) string {
	now := epoch0.Add(b.duration(or(args["now"], "0s")))
	if verb == "demand" {
		short, _ := strconv.ParseFloat(or(args["short"], "0"), 64)
		b.d = Demand{Short: short, At: now, PrepareTime: b.duration(or(args["prepare"], "0s"))}
		for range number(b.t, or(args["weeks"], "0")) {
			b.d.Running = Running{Hour: now.Unix() / 3600, Seen: time.Hour, Claims: uint64(number(b.t, args["hourly"]))}
			b.d.closeHour()
		}
		b.d.Running = Running{}
		return "noted\n"
	}
	g := Want(b.spec, b.d, number(b.t, or(args["active"], "0")), now)
	return fmt.Sprintf("%d: %s\n", g.N, g.Reason)
}

// plan is what would be done now.
func (b *bench) plan() string {
	b.w.ask(b.lead())
	return show(b.lead().Plan(b.w.now), b.lead().caps)
}

func show(p Plan, caps Caps) string {
	var out strings.Builder
	fmt.Fprintf(&out, "goal %d: %s\n", p.Goal.N, p.Goal.Reason)
	if p.Lacking > 0 {
		fmt.Fprintf(&out, "lacking %d\n", p.Lacking)
	}
	if p.CapsChanged {
		fmt.Fprintf(&out, "caps %v -> %v\n", map[string]int(caps), map[string]int(p.Caps))
	}
	for _, line := range Words(p.Steps) {
		out.WriteString(line + "\n")
	}
	if p.Unhealthy != "" {
		out.WriteString("unhealthy: " + p.Unhealthy + "\n")
	}
	if p.Filled {
		out.WriteString("filled\n")
	}
	return out.String()
}

// run lets a time go by, and tells what was done in which second.
func (b *bench) run(d string) string {
	var out strings.Builder
	start := b.w.now
	for b.w.now.Sub(start) < b.duration(d) {
		names, before := b.w.names, b.all()
		b.w.second(b.lead())
		if after := b.all(); names != b.w.names || !slices.Equal(before, after) {
			fmt.Fprintf(&out, "%s: %d sent;", b.w.now.Sub(start).Round(time.Second), b.w.names-names)
			for _, id := range after {
				if !slices.Contains(before, id) {
					out.WriteString(" +" + id)
				}
			}
			for _, id := range before {
				if !slices.Contains(after, id) {
					out.WriteString(" -" + id)
				}
			}
			out.WriteByte('\n')
		}
	}
	return out.String() + b.there()
}

func (b *bench) all() (out []string) {
	for _, h := range b.w.hosts {
		for _, id := range slices.Sorted(maps.Keys(h.there)) {
			out = append(out, h.id+"/"+string(id))
		}
	}
	return out
}

func (b *bench) there() string {
	var out []string
	for _, h := range b.w.hosts {
		out = append(out, fmt.Sprintf("%s %d", h.id, len(h.there)))
	}
	return strings.Join(out, ", ") + "\n"
}

// desk: ask TENANT SESSION HOST,HOST; settle SESSION [claimed=HOST]; granted.
func (b *bench) desk(words []string, args map[string]string) string {
	l := b.lead()
	var out strings.Builder
	tell := func(a Answer) {
		fmt.Fprintf(&out, "%s: %s %s\n", a.Reservation, []string{"waits", "reserved", "exhausted", "over share"}[a.Verdict], a.Host)
	}
	switch words[0] {
	case "ask":
		tell(l.Reserve(Ask{Tenant: words[1], Session: words[2], Attempt: "1", Hosts: strings.Split(words[3], ",")}, b.w.now))
	case "settle":
		s := Settled{Reservation: words[1] + ".1", Host: args["claimed"]}
		if s.Host != "" {
			s.Warm = b.w.claim(s.Host)
		}
		l.Settle(s, b.w.now)
	}
	answers, _ := l.Granted(b.w.now)
	for _, a := range answers {
		tell(a)
	}
	if out.Len() == 0 {
		return "nothing\n"
	}
	return strings.ReplaceAll(out.String(), " \n", "\n")
}

func (b *bench) status() string {
	s := b.lead().Status(b.w.now)
	var out strings.Builder
	fmt.Fprintf(&out, "goal %d, warm %d, preparing %d, reserved %d, stale %d, active %d, hits %d of %d, %d bytes\n",
		s.Goal, s.Warm, s.Preparing, s.Reserved, s.Stale, s.Active, s.Hits, s.Wakes, s.IdleMemoryBytes)
	for _, h := range s.Hosts {
		fmt.Fprintf(&out, "%s %s: warm %d, preparing %d, stale %d, cap %d %s\n", h.Host, h.Zone, h.Warm, h.Preparing, h.Stale, h.Cap, h.Reason)
	}
	for _, p := range s.Plan {
		out.WriteString(p + "\n")
	}
	return strings.ReplaceAll(out.String(), " \n", "\n")
}
