package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
)

type sessionExplainCmd struct{ target }

func (c *sessionExplainCmd) Run(a *app) error {
	op, rec, err := c.find(a)
	if err != nil {
		return err
	}
	defer op.Close()
	ref := rec.GetSession()
	reply := &schedulerv1.ExplainReply{}
	if err := op.Call(a.ctx, "scheduler", "explain", &schedulerv1.ExplainRequest{Tenant: ref.GetTenant(), Session: ref.GetSession()}, reply); err != nil {
		return err
	}
	// The answer of scheduler is worth more than the memory of the bus: a node may be away.
	last := map[string]sdk.Event{}
	for _, name := range []string{"admitted", "placed"} {
		e, err := op.LastEvent(a.ctx, ref.GetTenant(), ref.GetSession(), name)
		if err != nil && !errors.Is(err, sdk.ErrNotFound) {
			fmt.Fprintf(a.stderr, "berth: the last placement cannot be read: %v\n", err)
			break
		}
		last[name] = e
	}
	all, err := hosts(a.ctx, op)
	if err != nil {
		fmt.Fprintf(a.stderr, "berth: the hosts cannot be read: %v\n", err)
	}
	out := explainOutOf(reply, last["admitted"], last["placed"], all)
	return a.print(out, func() { a.renderExplain(out) })
}

type explainOut struct {
	showOut
	// Summary is the whole of it in sentences, the most important first.
	Summary []string `json:"summary"`
	// Decision says why the last open got its isolation tier.
	Decision *decisionOut `json:"tier_decision,omitempty"`
	Placed   *placedOut   `json:"placed,omitempty"`
	Now      *planOut     `json:"now,omitempty"`

	at *hostOut // the host that it needs or is on, where that is known
}

// placedOut is the last placement.
type placedOut struct {
	At        time.Time `json:"at"`
	Epoch     string    `json:"epoch"`
	Host      string    `json:"host"`
	Reason    string    `json:"reason"`
	RequestID string    `json:"request_id,omitempty"`
	// WaitedMS is from the last open that waited for it.
	WaitedMS float64  `json:"waited_ms,omitempty"`
	Plan     *planOut `json:"plan,omitempty"`
}

// planOut is a plan of placement: every host that was looked at, best first.
type planOut struct {
	Host   string    `json:"host"`
	Reason string    `json:"reason"`
	Rows   []planRow `json:"rows"`
	More   uint32    `json:"more"`
}

type planRow struct {
	Host    string   `json:"host"`
	Refused string   `json:"refused,omitempty"`
	Ranks   []string `json:"ranks"`
}

// explainOutOf puts together what scheduler says and what the last events of the session say.
func explainOutOf(r *schedulerv1.ExplainReply, admitted, placed sdk.Event, all []*schedulerv1.HostRecord) explainOut {
	out := explainOut{showOut: showOutOf(r.GetRecord()), Now: planOutOf(r.GetNow())}
	of := func(e sdk.Event) *schedulerv1.Event { // nil for a session of that name that was before this one
		if b, ok := e.Body.(*schedulerv1.Event); ok && stamp(b.GetSession().GetGeneration()) == out.Generation {
			return b
		}
		return nil
	}
	out.Decision = decisionOutOf(of(admitted).GetAdmitted().GetTierDecision())
	if p := of(placed).GetPlaced(); p != nil {
		out.Placed = &placedOut{At: placed.Time.UTC(), Epoch: stamp(of(placed).GetSession().GetEpoch()), Host: p.GetHost(), Reason: p.GetReason(),
			RequestID: p.GetRequestId(), Plan: planOutOf(p.GetPlan())}
		// A handoff that nobody asked for did not wait since the last open.
		if of(admitted).GetAdmitted() != nil && p.GetRequestId() != "" {
			out.Placed.WaitedMS = max(ms(placed.Time.Sub(admitted.Time)), 0)
		}
	}
	needs := out.Host
	if out.Unsaved && out.State != "active" && out.State != "waking" {
		needs = or(out.NewestHost, out.Host)
	}
	for _, h := range all {
		if h.GetHost() == needs {
			at := hostOutOf(h)
			out.at = &at
		}
	}
	out.Summary = summary(out)
	return out
}

func planOutOf(p *schedulerv1.Placement) *planOut {
	if p == nil {
		return nil
	}
	out := &planOut{Host: p.GetHost(), Reason: p.GetReason(), Rows: []planRow{}, More: p.GetMore()}
	for _, r := range p.GetRows() {
		out.Rows = append(out.Rows, planRow{r.GetHost(), r.GetRefused(), append([]string{}, r.GetRanks()...)})
	}
	return out
}

// summary says in sentences what an operator wants to know first.
func summary(x explainOut) []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	since := when(x.ChangedAt)
	switch {
	case x.HandoffFrom != "" && x.State != "active":
		text := fmt.Sprintf("It is being handed over from %s; until then it is %s.", x.HandoffFrom, x.State)
		if x.HandoffUntil != nil {
			text += " That is tried until " + when(*x.HandoffUntil) + "; after that " + nextOpen(x) + "."
		}
		say("%s", text)
	case x.State == "active":
		say("It is awake on %s since %s.", x.Host, since)
	case x.State == "waking":
		say("It is waking on %s since %s.", or(x.Host, "(none yet)"), since)
	case x.State == "sleeping":
		say("It is going to sleep on %s since %s; an open now waits for that.", x.Host, since)
	case x.State == "asleep":
		say("It sleeps since %s; %s.", since, nextOpen(x))
	case x.State == "failed" && x.Failure != nil:
		say("It failed at %s: %s. Its next open tries again.", since, strings.TrimRight(x.Failure.Reason, "."))
	default:
		say("It is %s since %s.", x.State, since)
	}
	if x.Waiting != "" {
		say("It waits: %s.", strings.TrimRight(x.Waiting, "."))
	}
	if x.Unsaved {
		say("%s", unsavedSentence(x.showOut))
	}
	if word := hostTrouble(x); word != "" {
		say("%s", word)
	}
	if x.Placed != nil {
		say("It was last placed on %s at %s: %s.", x.Placed.Host, when(x.Placed.At), strings.TrimRight(x.Placed.Reason, "."))
		if x.Placed.WaitedMS > longWait {
			say("The last open waited %.1f s for that place.", x.Placed.WaitedMS/1000)
		}
	}
	for _, s := range tierSentences(x.Decision) {
		say("%s", s)
	}
	if step, ok := slowest(x.LastWake); ok {
		say("Its last wake took %s in all; the longest step was %s with %s.", msWord(x.LastWake.TotalMS), step.Name, msWord(step.TookMS))
	}
	if x.RestoredAsOf != nil {
		say("That wake brought back its files as of %s.", when(*x.RestoredAsOf))
	}
	switch {
	case x.Now == nil || x.State == "active":
	case x.Now.Host == "":
		say("A wake now would get no host: %s.", strings.TrimRight(x.Now.Reason, "."))
	default:
		say("A wake now would get %s: %s.", x.Now.Host, strings.TrimRight(x.Now.Reason, "."))
	}
	return out
}

const (
	longWait = 500 // ms that an open waits for a place without a word
	// lowLease is the default lease of 9 s less 4 s: it is renewed every 3 s, so one renewal is missing.
	lowLease = 5000
)

// nextOpen says what the next open does with a session that sleeps.
func nextOpen(x explainOut) string {
	if x.Unsaved && x.Manifest == "" && x.at != nil && x.at.State == "lost" {
		return "it can wake only once " + x.at.Host + " is back"
	}
	return "its next open wakes it"
}

// hostTrouble says that the host that it is on, or needs, is lost or about to be; empty: it is not.
func hostTrouble(x explainOut) string {
	rests := x.State != "active" && x.State != "waking" && x.State != "sleeping"
	switch {
	case x.at == nil || rests && !x.Unsaved:
		return ""
	case x.at.Lost:
		return "Host " + x.at.Host + " is lost: its lease ran out."
	case !x.at.Alive:
		return "Host " + x.at.Host + " holds no lease now."
	case x.at.LeaseLeftMS < lowLease:
		return fmt.Sprintf("The lease of host %s runs down: %.1f s are left of it; unless it is renewed, the host is lost then.", x.at.Host, x.at.LeaseLeftMS/1000)
	}
	return ""
}

// unsavedSentence says what is on one host alone, and what that means.
func unsavedSentence(x showOut) string {
	host := or(x.NewestHost, x.Host)
	if x.Manifest == "" {
		return "It was never saved: all of its files are on " + host + " alone, and it can wake only there."
	}
	return "What was written after snapshot " + x.Manifest + " is on " + host + " alone: it wakes there, or, once that host is lost, elsewhere as of the snapshot."
}

// slowest is the step of a wake that took longest, without those that mostly wait for another step
// that is listed too.
func slowest(t timingOut) (best stepOut, ok bool) {
	for _, s := range t.Steps {
		whole := false
		for _, o := range t.Steps {
			within := o.StartMS >= s.StartMS && o.StartMS+o.TookMS <= s.StartMS+s.TookMS && o.TookMS < s.TookMS
			whole = whole || within && o.TookMS*2 > s.TookMS
		}
		if !whole && (!ok || s.TookMS > best.TookMS) {
			best, ok = s, true
		}
	}
	return best, ok
}

func (a *app) renderExplain(x explainOut) {
	fmt.Fprintf(a.stdout, "session %s: %s of %s, tenant %s, plan %s\n", x.Session, plain(x.Name), plain(or(x.User, "nobody known")), x.Tenant, x.Plan)
	for _, s := range x.Summary {
		fmt.Fprintf(a.stdout, "- %s\n", plain(s))
	}
	if x.Placed != nil && x.Placed.Plan != nil {
		fmt.Fprintf(a.stdout, "\nwhy %s, at %s\n", x.Placed.Host, when(x.Placed.At))
		a.renderPlan(*x.Placed.Plan)
	}
	a.renderDecision(x.Decision)
	a.renderWake(x.showOut)
	if x.Now != nil {
		fmt.Fprintln(a.stdout, map[bool]string{false: "\na wake now", true: "\nif it had to wake now"}[x.State == "active"])
		a.renderPlan(*x.Now)
	}
}

// renderDecision prints the facts that the tier policy saw.
func (a *app) renderDecision(d *decisionOut) {
	if d == nil {
		return
	}
	fmt.Fprintln(a.stdout, "\nwhat the tier policy saw")
	var rows [][]string
	for _, k := range slices.Sorted(maps.Keys(d.Facts)) {
		note := ""
		if slices.Contains(d.Unknown, k) {
			note = "not told, or no word of the policy; counted as the riskiest"
		}
		rows = append(rows, []string{"  " + plain(k), plain(d.Facts[k]), note})
	}
	table(a.stdout, rows)
}

func (a *app) renderPlan(p planOut) {
	rows := [][]string{{"  HOST", "", "FOR IT, OR WHY NOT"}}
	for _, r := range p.Rows {
		verdict, why := "may", or(strings.Join(r.Ranks, ", "), "-")
		switch {
		case r.Refused != "":
			verdict, why = "may not", r.Refused
		case r.Host == p.Host:
			verdict = "taken"
		}
		rows = append(rows, []string{"  " + r.Host, verdict, plain(why)})
	}
	if len(p.Rows) == 0 {
		fmt.Fprintln(a.stdout, "  no hosts")
		return
	}
	table(a.stdout, rows)
	if p.More > 0 {
		fmt.Fprintf(a.stdout, "  and %d more\n", p.More)
	}
}

// planWord is a plan in a few words.
func planWord(p *schedulerv1.Placement) string {
	may, not := 0, 0
	for _, r := range p.GetRows() {
		switch {
		case r.GetRefused() != "":
			not++
		case r.GetHost() != p.GetHost():
			may++
		}
	}
	if may+not == 0 {
		return ""
	}
	return fmt.Sprintf(" (%d more may, %d may not)", may, not)
}
