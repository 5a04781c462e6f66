package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// table writes rows with aligned columns; a first row is the heading.
func table(w io.Writer, rows [][]string) {
	var widths []int
	for _, r := range rows {
		for i, cell := range r {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, r := range rows {
		var b strings.Builder
		for i, cell := range r {
			b.WriteString(cell)
			if i < len(r)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+2))
			}
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
}

// fields writes names and values below each other; empty values are left out.
func (a *app) fields(pairs ...string) {
	var rows [][]string
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			rows = append(rows, []string{pairs[i], plain(pairs[i+1])})
		}
	}
	table(a.stdout, rows)
}

// plain keeps what others wrote from moving the cursor.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '\uFFFD'
		}
		return r
	}, s)
}

func bytesWord(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") + " " + units[i]
}

// count writes "1 file" and "2 files".
func count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + more
}

func (c copyOut) String() string {
	return count(c.Files, "file", "files") + ", " + count(c.Dirs, "directory", "directories") + ", " + bytesWord(uint64(c.Bytes))
}

func (l limitsOut) String() string {
	return fmt.Sprintf("%.4g CPU, %s memory, %d processes, %s disk", float64(l.CPUMillis)/1000, bytesWord(l.MemoryBytes), l.PIDs, bytesWord(l.DiskBytes))
}

// span writes a duration in the largest unit that is not a fraction.
func span(ms float64) string {
	d := time.Duration(ms * float64(time.Millisecond))
	if d >= 48*time.Hour && d%(24*time.Hour) == 0 {
		return strconv.Itoa(int(d/(24*time.Hour))) + " days"
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func msWord(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) + " ms" }

func (a *app) renderOpen(o openOut) {
	origin := map[string]string{"created": "created: a blank disk", "resumed": "resumed: the newest disk, whole", "joined": "joined: it was awake"}[o.Origin]
	if o.RestoredAsOf != nil {
		origin = "restored as of " + o.RestoredAsOf.Format(time.RFC3339)
	}
	a.fields("session", o.Session, "name", o.Name, "origin", or(origin, o.Origin), "host", o.Host, "epoch", o.Epoch,
		"tier", o.Place.Tier, "template", o.Place.Template, "limits", o.Place.Limits.String(), "persists", o.Place.Persists,
		"idle", "falls asleep after "+span(o.Place.IdleMS), "network", o.Place.Network, "image", o.Place.ImageDigest,
		"ready in", msWord(o.Timing.TotalMS))
}

func (a *app) renderList(l listOut) {
	rows := [][]string{{"SESSION", "NAME", "TENANT", "USER", "STATE", "TIER", "HOST", "CHANGED", "NOTE"}}
	for _, s := range l.Sessions {
		rows = append(rows, []string{s.Session, s.Name, s.Tenant, or(plain(s.User), "-"), s.State, s.Tier, or(s.Host, "-"), s.ChangedAt.UTC().Format(time.DateTime), plain(sessionNote(s))})
	}
	if len(l.Sessions) == 0 {
		fmt.Fprintln(a.stdout, "no sessions")
		return
	}
	table(a.stdout, rows)
}

// sessionNote says what of a session is not as it should be.
func sessionNote(s sessionOut) string {
	var notes []string
	if s.HandoffFrom != "" {
		notes = append(notes, "handed over from "+s.HandoffFrom)
	}
	if s.Waiting != "" {
		notes = append(notes, "waits: "+s.Waiting)
	}
	if s.Unsaved && s.NewestHost != "" && s.NewestHost != s.Host {
		notes = append(notes, "newest files on "+s.NewestHost)
	}
	return strings.Join(notes, "; ")
}

func (a *app) renderShow(s showOut) {
	failure := ""
	if s.Failure != nil {
		failure = s.Failure.Reason + " (" + s.Failure.Kind + ")"
	}
	restore, unsaved := "", ""
	if s.Restore != "" {
		restore = "the next open brings back snapshot " + s.Restore
	}
	if s.Unsaved {
		unsaved = "what was written after the manifest is on the disk of host " + or(s.NewestHost, s.Host) + " only"
	}
	handoff, awake := "", ""
	if s.HandoffFrom != "" {
		handoff = "from host " + s.HandoffFrom
	}
	if s.HandoffUntil != nil {
		handoff += ", tried until " + when(*s.HandoffUntil)
	}
	if s.MaxAwake > 0 {
		awake = fmt.Sprintf("at most %d of the tenant at once", s.MaxAwake)
	}
	a.fields("session", s.Session, "name", s.Name, "tenant", s.Tenant, "user", s.User, "issuer", s.Issuer, "frontend", s.Frontend,
		"state", s.State, "failure", failure, "host", s.Host, "generation", s.Generation, "epoch", s.Epoch,
		"revision", strconv.FormatUint(s.Revision, 10), "manifest", s.Manifest, "restore", restore, "unsaved", unsaved, "waits", s.Waiting, "handoff", handoff,
		"plan", s.Plan, "priority", strconv.FormatUint(uint64(s.Priority), 10), "zones", strings.Join(s.Zones, ", "), "awake", awake, "template", s.Template,
		"tier", s.Tier+reasonWord(s.TierReason), "limits", s.Limits.String(), "persistence", s.Persistence,
		"idle", span(s.IdleMS), "retention", span(s.RetentionMS), "snapshots", snapshotsWord(s.Snapshots), "created", s.CreatedAt.UTC().Format(time.RFC3339),
		"changed", s.ChangedAt.UTC().Format(time.RFC3339))
	a.renderWake(s)
}

// renderWake draws the steps of the last wake.
func (a *app) renderWake(s showOut) {
	if len(s.LastWake.Steps) == 0 {
		return
	}
	origin := or(s.Origin, "unknown")
	if s.RestoredAsOf != nil {
		origin += " as of " + when(*s.RestoredAsOf)
	}
	fmt.Fprintf(a.stdout, "\nlast wake (%s), %s in all\n", origin, msWord(s.LastWake.TotalMS))
	rows := [][]string{{"  STEP", pad("START", 10), pad("TOOK", 10), ""}}
	steps := slices.Clone(s.LastWake.Steps)
	slices.SortStableFunc(steps, func(x, y stepOut) int {
		switch {
		case x.StartMS < y.StartMS:
			return -1
		case x.StartMS > y.StartMS:
			return 1
		}
		return 0
	})
	for _, st := range steps {
		rows = append(rows, []string{"  " + plain(st.Name), pad(msWord(st.StartMS), 10), pad(msWord(st.TookMS), 10), bar(st, s.LastWake.TotalMS)})
	}
	table(a.stdout, rows)
}

func reasonWord(r string) string {
	if r == "" {
		return ""
	}
	return " (" + r + ")"
}

func pad(s string, n int) string { return strings.Repeat(" ", max(0, n-len(s))) + s }

// bar draws when a step ran, on a line of 32 characters.
func bar(s stepOut, total float64) string {
	const width = 32
	if total <= 0 {
		return ""
	}
	from := min(int(s.StartMS/total*width), width-1)
	n := max(1, min(int(s.TookMS/total*width+0.5), width-from))
	return strings.Repeat(" ", max(0, from)) + strings.Repeat("=", n)
}

func (a *app) renderDead(d deadListOut) {
	if len(d.Messages) == 0 {
		fmt.Fprintln(a.stdout, "no dead messages")
		return
	}
	rows := [][]string{{"NUMBER", "DIED", "CONSUMER", "TRIES", "SUBJECT", "REASON"}}
	for _, m := range d.Messages {
		rows = append(rows, []string{strconv.FormatUint(m.Sequence, 10), m.Died.UTC().Format(time.DateTime), m.Consumer, strconv.Itoa(m.Deliveries), plain(m.Subject), plain(m.Reason)})
	}
	table(a.stdout, rows)
}

func (a *app) renderDeadOne(m deadOut) {
	a.fields("number", strconv.FormatUint(m.Sequence, 10), "service", m.Service, "consumer", m.Consumer, "reason", m.Reason,
		"subject", m.Subject, "tries", strconv.Itoa(m.Deliveries), "stored", m.Stored.UTC().Format(time.RFC3339), "died", m.Died.UTC().Format(time.RFC3339))
	keys := make([]string, 0, len(m.Header))
	for k := range m.Header {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		fmt.Fprintf(a.stdout, "header  %s: %s\n", plain(k), plain(strings.Join(m.Header[k], ", ")))
	}
	fmt.Fprintf(a.stdout, "body    %d bytes: %.200q\n", len(m.Body), m.Body)
}
