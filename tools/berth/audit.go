package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

type auditCmd struct {
	Egress auditEgressCmd `cmd:"" help:"What a session's sandbox was let reach, and what not."`
}

type auditEgressCmd struct {
	target
	Since  time.Duration `help:"Records of so long ago until now; default: 1h." default:"1h" placeholder:"DURATION"`
	Denied bool          `help:"Only what was denied, reset or failed."`
	Follow bool          `help:"Go on with those that come."`
}

func (c *auditEgressCmd) Run(a *app) error {
	if c.Since <= 0 {
		return usage("--since must be more than 0")
	}
	cl, rec, err := c.find(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	ref := rec.GetSession()
	all, err := cl.Audit(a.ctx, sdk.AuditFilter{Service: "egress", Tenant: ref.GetTenant(), Session: ref.GetSession(), Since: c.Since, Stop: !c.Follow})
	if err != nil {
		return err
	}
	var seen once
	n := 0
	for r, err := range all {
		if err != nil {
			return err
		}
		b, ok := r.Body.(*egressv1.Record)
		if !ok || c.Denied && b.GetVerdict() == egressv1.Verdict_VERDICT_ALLOWED || r.ID != "" && !seen.newer(r.ID, 1) {
			continue
		}
		n++
		if err := a.printAudit(r, true); err != nil {
			return err
		}
	}
	if n == 0 && !a.json && !c.Follow {
		fmt.Fprintf(a.stdout, "nothing in the last %s\n", span(ms(c.Since)))
	}
	return nil
}

// tailAudit follows the audit log.
func (c *tailCmd) tailAudit(a *app, whole string) error {
	if c.Hosts || c.Pools || c.Event != "" || c.Client != "" {
		return usage("--audit goes with none of --hosts, --pools, --event and --client")
	}
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	all, err := op.Audit(a.ctx, sdk.AuditFilter{Tenant: c.Tenant, Session: whole, Since: c.Since, Stop: c.NoFollow})
	if err != nil {
		return err
	}
	var seen once
	for r, err := range all {
		if err != nil {
			return err
		}
		if !strings.HasPrefix(r.Session, c.Session) || r.ID != "" && !seen.newer(r.ID, 1) {
			continue
		}
		if err := a.printAudit(r, false); err != nil {
			return err
		}
	}
	return nil
}

// auditOut is one record on one line.
type auditOut struct {
	Time    time.Time       `json:"time"`
	Service string          `json:"service"`
	Tenant  string          `json:"tenant,omitempty"`
	Session string          `json:"session,omitempty"`
	ID      string          `json:"id,omitempty"`
	Body    json.RawMessage `json:"body,omitempty"`
}

// printAudit writes one record on one line; own: of one session that is known.
func (a *app) printAudit(r sdk.AuditRecord, own bool) error {
	if !a.json {
		fmt.Fprintln(a.stdout, a.auditLine(r, own))
		return nil
	}
	out := auditOut{Time: auditTime(r), Service: r.Service, Tenant: r.Tenant, Session: r.Session, ID: r.ID}
	if r.Body != nil {
		raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(r.Body)
		if err != nil {
			return err
		}
		out.Body = raw
	}
	enc := json.NewEncoder(a.stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(out)
}

// auditTime is when it happened; of traffic, when it began.
func auditTime(r sdk.AuditRecord) time.Time {
	if b, ok := r.Body.(*egressv1.Record); ok && b.GetBegan().IsValid() && b.GetBegan().GetSeconds() > 0 {
		return b.GetBegan().AsTime()
	}
	return r.Time.UTC()
}

// Colours of verdicts.
var verdictColour = map[string]string{"allowed": "32", "denied": "31", "reset": "35", "failed": "33"}

func (a *app) auditLine(r sdk.AuditRecord, own bool) string {
	line := auditTime(r).Format("15:04:05.000")
	if own {
		line = auditTime(r).Format(time.DateTime)
	} else {
		key := r.Session
		if len(key) > 9 {
			key = key[:9]
		}
		line += fmt.Sprintf("  %-12s %-9s  %-11s", or(r.Tenant, "-"), or(key, "-"), r.Service)
	}
	word, text := auditText(r.Body)
	shown := fmt.Sprintf("%-8s", word)
	if c := verdictColour[word]; a.colour && c != "" {
		shown = "\x1b[" + c + "m" + shown + "\x1b[0m"
	}
	return strings.TrimRight(line+"  "+shown+"  "+plain(text), " ")
}

// auditText is a record in a word and a line.
func auditText(body proto.Message) (string, string) {
	switch b := body.(type) {
	case *egressv1.Record:
		return word(b.GetVerdict(), "VERDICT_"), egressText(b)
	case *identityv1.Audit:
		text := b.GetVerb() + " of " + actorWord(b.GetActor())
		if about := b.GetAbout(); about != nil {
			text += " about " + actorWord(about)
		}
		if b.GetAdmitted() {
			return "admitted", text
		}
		return "rejected", text + ": " + b.GetFailure().GetReason()
	case *credentialsv1.Audit:
		text := "for " + actorWord(b.GetActor())
		if b.GetActor() == nil {
			text = ""
		}
		if b.GetReason() != "" {
			text = strings.TrimSpace(text + " " + b.GetReason())
		}
		return b.GetWhat(), text
	}
	return "", ""
}

func actorWord(a *corev1.Actor) string { return or(a.GetSubject(), or(a.GetFrontend(), "somebody")) }

// egressText is one connection or request.
func egressText(b *egressv1.Record) string {
	q := policy.Request{Name: authority.Name(b.GetAuthority()), Port: uint16(b.GetPort()), Protocol: policy.Protocol(b.GetProtocol()), Method: b.GetMethod(), Path: b.GetPath()}
	parts := []string{q.String()} // only to be read: the name may be none
	if b.GetAddress() != "" {
		parts = append(parts, "at "+b.GetAddress())
	}
	if b.GetStatus() != 0 {
		parts = append(parts, "status "+strconv.Itoa(int(b.GetStatus())))
	}
	if b.GetBytesOut()+b.GetBytesIn() > 0 {
		parts = append(parts, bytesWord(b.GetBytesOut())+" out, "+bytesWord(b.GetBytesIn())+" in")
	}
	if b.GetRule() != "" {
		parts = append(parts, "rule "+b.GetRule()+" ("+policy.LayerName(b.GetLayer())+" "+strconv.FormatUint(b.GetPolicyGeneration(), 10)+")")
	}
	if b.GetVerdict() != egressv1.Verdict_VERDICT_ALLOWED {
		parts = append(parts, "reason "+b.GetReason())
	}
	if b.GetReported() != "" {
		parts = append(parts, "report-only "+b.GetReported())
	}
	if b.GetInjected() != "" {
		parts = append(parts, "secret "+b.GetInjected())
	}
	if b.GetTimes() > 1 {
		parts = append(parts, strconv.FormatUint(b.GetTimes(), 10)+" times")
	}
	if b.GetVerdict() != egressv1.Verdict_VERDICT_ALLOWED && b.GetId() != "" {
		parts = append(parts, "record "+b.GetId())
	}
	return strings.Join(parts, ", ")
}
