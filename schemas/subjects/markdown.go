package subjects

import (
	"fmt"
	"strings"
	"time"
)

// Markdown renders the catalogue for the documentation.
func Markdown() string {
	var b strings.Builder
	b.WriteString("### Streams\n\n| stream | subjects | kept | at most | written | what |\n|---|---|---|---|---|---|\n")
	for _, s := range Streams {
		kept := "until handled"
		if s.Retention == Limits {
			kept = fmt.Sprintf("%d days", int(s.MaxAge/(24*time.Hour)))
		}
		full := "oldest goes"
		if s.DiscardNew {
			full = "new ones are refused"
		}
		written := "synced before the acknowledgement"
		if s.Async {
			written = "asynchronously"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %d MiB, then %s | %s | %s |\n", s.Name, code(s.Subjects), kept, s.MaxBytes/MiB, full, written, s.Doc)
	}
	b.WriteString("\n### Events\n\n| subject | owner | stream | what |\n|---|---|---|---|\n")
	for _, e := range Events {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", angle(e.Subject), e.Owner, e.Stream, e.Doc)
	}
	b.WriteString("\n### RPC methods (NATS micro endpoints)\n\n| subject | callers | what |\n|---|---|---|\n")
	for _, m := range Methods {
		who := make([]string, 0, len(m.Callers))
		for _, w := range m.Callers {
			who = append(who, string(w))
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", code(m.patterns()), strings.Join(who, ", "), m.Doc)
	}
	b.WriteString("\n### Data plane\n\n| subject | what |\n|---|---|\n")
	for _, x := range Box {
		fmt.Fprintf(&b, "| `berth.v1.box.<session>.<epoch>.%s` | %s |\n", x.Name, x.Doc)
	}
	b.WriteString("\n### Words (plain messages without a body, kept by no stream)\n\n| subject | said by | heard by | what |\n|---|---|---|---|\n")
	for _, w := range Words {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", angle(w.Subject), w.Owner, w.Heard, w.Doc)
	}
	b.WriteString("\n### Buckets\n\n| bucket | owner | history | at most | what |\n|---|---|---|---|---|\n")
	for _, k := range Buckets {
		fmt.Fprintf(&b, "| %s | %s | %d | %d MiB | %s |\n", k.Name, k.Owner, k.History, k.MaxBytes/MiB, k.Doc)
	}
	b.WriteString("\n### Object stores\n\n| store | read and written by | at most | what |\n|---|---|---|---|\n")
	for _, o := range ObjectStores {
		fmt.Fprintf(&b, "| %s | every host | %d GiB, then new ones are refused | %s |\n", o.Name, o.MaxBytes/GiB, o.Doc)
	}
	b.WriteString("\n### Durable consumers\n\n| consumer | stream | filters | ack wait | deliveries before BERTH_DEAD | what |\n|---|---|---|---|---|---|\n")
	for _, c := range Consumers {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %d | %s |\n", c.Durable, c.Stream, code(c.Filters), c.AckWait, c.MaxDeliver, c.Doc)
	}
	return b.String()
}

func (m Method) patterns() []string {
	base := "berth.v1.rpc." + m.Service + "."
	if PerHost(m.Service) {
		base += "<host>."
	}
	var one, two bool
	for _, w := range m.Callers {
		one = one || w != AnyFrontend
		two = two || w == AnyFrontend
	}
	var out []string
	if one {
		out = append(out, base+m.Name+".<caller>")
	}
	if two {
		out = append(out, base+m.Name+".<tenant>.<frontend>")
	}
	return out
}

func code(list []string) string { return "`" + strings.Join(list, "`, `") + "`" }

func angle(s string) string { return strings.NewReplacer("{", "<", "}", ">").Replace(s) }
