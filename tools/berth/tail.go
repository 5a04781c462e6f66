package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type tailCmd struct {
	Tenant   string        `help:"Only of this tenant." placeholder:"NAME"`
	Session  string        `help:"Only of this session: its key, or the beginning of it that tail prints." placeholder:"KEY"`
	Event    string        `help:"Only events of this name." placeholder:"NAME"`
	Hosts    bool          `help:"Events of hosts instead of those of sessions."`
	Pools    bool          `help:"Events of pools of warm sandboxes instead of those of sessions."`
	Audit    bool          `help:"The audit log instead: who asked for what, what was let out, issued and revoked."`
	Since    time.Duration `help:"Begin with the stored events of so long ago, for example 10m." placeholder:"DURATION"`
	NoFollow bool          `help:"End after the stored events; needs --since."`
	Client   string        `help:"A frontend's bus login instead of the operator's: it sees its tenant, from now on." placeholder:"NAME" env:"BERTH_CLIENT"`
}

func (c *tailCmd) Run(a *app) error {
	if c.NoFollow && c.Since <= 0 {
		return usage("--no-follow needs --since")
	}
	if c.Since < 0 {
		return usage("--since must be more than 0")
	}
	if (c.Hosts || c.Pools) && (c.Tenant != "" || c.Session != "") {
		return usage("--hosts and --pools go with neither --tenant nor --session")
	}
	if c.Hosts && c.Pools {
		return usage("--hosts and --pools are two selections; say one")
	}
	whole := c.Session
	if _, err := ids.ParseSessionKey(c.Session); c.Session != "" && err != nil {
		if !strings.HasPrefix(c.Session, "s") || !ids.IsToken(c.Session) {
			return usage("%q is not the beginning of a session key", c.Session)
		}
		whole = "" // filtered here
	}
	if c.Audit {
		return c.tailAudit(a, whole)
	}
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	events, err := cl.Events(a.ctx, sdk.EventFilter{Tenant: c.Tenant, Session: whole, Event: c.Event, Hosts: c.Hosts, Pools: c.Pools, Since: c.Since, Stop: c.NoFollow})
	if err != nil {
		return err
	}
	var seen once
	for e, err := range events {
		if err != nil {
			return err
		}
		if !strings.HasPrefix(e.Session, c.Session) || !seen.first(e) {
			continue
		}
		if !a.json {
			fmt.Fprintln(a.stdout, a.eventLine(e))
			continue
		}
		if err := a.eventJSON(e); err != nil {
			return err
		}
	}
	return nil
}

// onceMost is how many sessions and events once remembers at least.
const onceMost = 1 << 14

// once knows events that were printed: a new leader publishes again what the one before it may not have
// published. It forgets what it has not seen for long.
type once struct{ young, old map[string]uint64 }

// first reports whether e was not there before. A scheduler's event is older news when its revision is
// not above what was printed; revisions count on within a generation, and what tells of the end of one
// may come after events of the next.
func (o *once) first(e sdk.Event) bool {
	if b, ok := e.Body.(*schedulerv1.Event); ok && e.Revision > 0 {
		return o.newer(e.Tenant+" "+e.Session+" "+stamp(b.GetSession().GetGeneration()), e.Revision)
	}
	return e.ID == "" || o.newer(e.ID, 1)
}

func (o *once) newer(key string, n uint64) bool {
	last, ok := o.young[key]
	if !ok {
		last, ok = o.old[key]
	}
	if ok && n <= last {
		return false
	}
	if o.young == nil || len(o.young) >= onceMost {
		o.old, o.young = o.young, map[string]uint64{}
	}
	o.young[key] = n
	return true
}

func (c *tailCmd) connect(a *app) (*sdk.Client, error) {
	if c.Client == "" {
		return a.operator()
	}
	path, err := userFlags{Client: c.Client}.clientFile(a.dir)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("read the login: %w", err)
	}
	return dial(a.ctx, sdk.Config{ClientFile: path})
}

// eventJSON writes one event on one line.
func (a *app) eventJSON(e sdk.Event) error {
	out := eventOut{Time: e.Time.UTC(), Host: e.Host, Pool: e.Pool, Tenant: e.Tenant, Session: e.Session, Event: e.Name, Revision: e.Revision, State: string(e.State), RequestID: e.RequestID()}
	if e.Body != nil {
		raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(e.Body)
		if err != nil {
			return err
		}
		out.Body = raw
	}
	enc := json.NewEncoder(a.stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(out)
}

// Colours of events: green is ready, yellow is on the way, blue is rest, red
// is trouble.
var eventColour = map[string]string{
	"active": "32", "renewed": "32", "admitted": "33", "placed": "33", "resume": "33", "asleep": "34", "idle": "34", "deleted": "90", "paused": "35", "pause": "35",
	"restoring": "33", "saved": "32", "rewound": "35", "erased": "90", "unsaved": "31",
	"expiring": "35", "expire": "35", "failed": "31", "displaced": "31", "unplaceable": "31", "refused": "31", "quota": "31", "oom": "31", "exited": "31",
	"filled": "32", "claimed": "33", "exhausted": "35", "unhealthy": "31",
	"denied": "31", "allowed": "32",
	"joined": "32", "lost": "31", "draining": "35", "drained": "34", "removed": "90",
}

// eventLine is one event for a person.
func (a *app) eventLine(e sdk.Event) string {
	key := e.Session
	if len(key) > 9 {
		key = key[:9]
	}
	name := fmt.Sprintf("%-11s", e.Name)
	if c := eventColour[e.Name]; a.colour && c != "" {
		name = "\x1b[" + c + "m" + name + "\x1b[0m"
	}
	who := fmt.Sprintf("%-12s %s", e.Tenant, key)
	if name := or(e.Host, e.Pool); name != "" {
		who = fmt.Sprintf("%-22s", name)
	}
	line := fmt.Sprintf("%s  %s  %s  %s", e.Time.UTC().Format("15:04:05.000"), who, name, plain(eventText(e)))
	for len(line) > 0 && line[len(line)-1] == ' ' {
		line = line[:len(line)-1]
	}
	return line
}

// eventText says in a few words what happened.
func eventText(e sdk.Event) string {
	switch b := e.Body.(type) {
	case *schedulerv1.Event:
		return schedulerText(b)
	case *hostv1.Event:
		return hostText(b)
	case *identityv1.Attached:
		return attachedText(b)
	case *egressv1.Event:
		return deniedText(b)
	case *lifecyclev1.Resume:
		return "wake asked for with " + b.GetTerms().GetTemplate() + ", " + word(b.GetTerms().GetTier(), "TIER_")
	case *lifecyclev1.Refused:
		return b.GetFailure().GetReason()
	case *lifecyclev1.Idle:
		return "no activity for " + span(ms(b.GetIdle().AsDuration()))
	case *lifecyclev1.Expiring:
		return "expires at " + b.GetExpiresAt().AsTime().Format(time.RFC3339)
	case *schedulerv1.HostEvent:
		return hostEventText(b)
	case *poolv1.Event:
		return fmt.Sprintf("%s (%d of %d wait)", b.GetReason(), b.GetWarm(), b.GetGoal())
	case *hostv1.Facts:
		return fmt.Sprintf("%s, %s, %s of its pool are free", count(int(b.GetSandboxes()), "sandbox", "sandboxes"), count(int(b.GetDisks()), "disk", "disks"), bytesWord(b.GetDiskFreeBytes()))
	}
	return ""
}

// deniedText is the gate's sentence, and by which record an operator may allow it.
func deniedText(b *egressv1.Event) string {
	text := b.GetText()
	if b.GetTimes() > 1 {
		text += fmt.Sprintf(" (%d times)", b.GetTimes())
	}
	if (b.GetWhat() == "denied" || b.GetWhat() == "reset") && b.GetRecord() != "" {
		text += " [record " + b.GetRecord() + "]"
	}
	return text
}

// hostEventText says what became of a host.
func hostEventText(b *schedulerv1.HostEvent) string {
	switch b.GetWhat() {
	case "joined":
		return limitsOutOf(b.GetCapacity()).String()
	case "draining":
		return or(b.GetReason(), "takes no more sessions and hands over those that it has")
	case "drained":
		return or(b.GetReason(), "nothing is left on it")
	case "removed":
		return or(b.GetReason(), "for good")
	}
	return b.GetReason()
}

// activeText says on which host a session is ready, and what of its files is there.
func activeText(d *schedulerv1.Active) string {
	text := word(d.GetOrigin(), "ORIGIN_")
	if t := d.GetRestoredAsOf(); t != nil {
		text += " as of " + t.AsTime().Format(time.RFC3339)
	}
	text += " on " + d.GetHost()
	switch from := d.GetFromHost(); from {
	case "":
	case d.GetHost():
		text = "handed back: " + text
	default:
		text = "handed over from " + from + ": " + text
	}
	return text + " in " + msWord(ms(d.GetTiming().GetTotal().AsDuration()))
}

// hostText is the host's sentence, and how far a restore is.
func hostText(b *hostv1.Event) string {
	total := b.GetTotalBytes()
	if b.GetWhat() != "restoring" || total == 0 {
		return b.GetReason()
	}
	done := fmt.Sprintf("%d%%", uint64(float64(b.GetDoneBytes())/float64(total)*100))
	if b.GetReason() == "" {
		return bytesWord(b.GetDoneBytes()) + " of " + bytesWord(total) + " are back, " + done
	}
	return b.GetReason() + " (" + done + ")"
}

func schedulerText(b *schedulerv1.Event) string {
	switch d := b.GetDetail().(type) {
	case *schedulerv1.Event_Admitted:
		return fmt.Sprintf("%s of %s, %s, %s", d.Admitted.GetSessionName(), d.Admitted.GetActor().GetSubject(), d.Admitted.GetTerms().GetTemplate(), word(d.Admitted.GetTerms().GetTier(), "TIER_"))
	case *schedulerv1.Event_Placed:
		return "on " + d.Placed.GetHost() + ": " + d.Placed.GetReason() + planWord(d.Placed.GetPlan())
	case *schedulerv1.Event_Active:
		return activeText(d.Active)
	case *schedulerv1.Event_Asleep:
		return d.Asleep.GetReason() + ", manifest " + or(d.Asleep.GetManifest(), "none")
	case *schedulerv1.Event_Displaced:
		text := d.Displaced.GetReason()
		if !strings.Contains(text, d.Displaced.GetHost()) {
			text = "from " + d.Displaced.GetHost() + ": " + text
		}
		if d.Displaced.GetHandoff() {
			text += "; it is handed over"
		}
		return text
	case *schedulerv1.Event_Failed:
		return d.Failed.GetFailure().GetReason()
	case *schedulerv1.Event_Paused:
		return d.Paused.GetReason()
	case *schedulerv1.Event_Unplaceable:
		return d.Unplaceable.GetReason()
	case *schedulerv1.Event_Deleted:
		return d.Deleted.GetReason()
	case *schedulerv1.Event_Erased:
		return "nothing of it is left on " + or(strings.Join(d.Erased.GetHosts(), ", "), "any host")
	case *schedulerv1.Event_Rewound:
		if d.Rewound.GetSnapshot() == "" {
			return "the next open has the newest files after all"
		}
		return fmt.Sprintf("the next open brings back snapshot %s, as of %s", d.Rewound.GetSnapshot(), when(d.Rewound.GetAsOf().AsTime()))
	}
	return ""
}
