package bus

import (
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats-server/v2/server"
)

// Permissions is what one identity may say and hear. Whatever is not listed
// is refused by the server.
type Permissions struct {
	Publish     []string
	DenyPublish []string
	Subscribe   []string
	Responses   bool // may answer each request it receives, once, within five minutes
}

const responseTime = 5 * time.Minute

// PermissionsOf derives an identity's permissions from the catalogue.
func PermissionsOf(c subjects.Caller) Permissions {
	p := &Permissions{Subscribe: []string{c.Inbox() + ".>"}}
	p.events(c)
	p.calls(c)
	if hearsServing(c) {
		p.sub(subjects.Serving("*"))
	}
	if callsHosts(c) {
		p.sub(subjects.ServingHost("*"))
	}
	switch c.Role {
	case subjects.RoleService:
		p.service(c)
	case subjects.RoleHost:
		p.host(c)
	case subjects.RoleGate:
		p.gate(c)
	case subjects.RoleFrontend:
		p.frontend(c)
	case subjects.RoleOperator:
		p.operator()
	case subjects.RoleKeeper:
		p.keeper()
	case subjects.RoleCallout:
		p.serves("logins", c)
		p.sub(CalloutSubject)
	case subjects.RoleWarden:
		p.pub("$SYS.REQ.SERVER.PING.CONNZ", "$SYS.REQ.SERVER.*.CONNZ", "$SYS.REQ.SERVER.*.KICK")
	}
	slices.Sort(p.Publish)
	slices.Sort(p.Subscribe)
	p.Publish = slices.Compact(p.Publish)
	p.Subscribe = slices.Compact(p.Subscribe)
	return *p
}

func (p *Permissions) pub(s ...string) { p.Publish = append(p.Publish, s...) }
func (p *Permissions) sub(s ...string) { p.Subscribe = append(p.Subscribe, s...) }

// events lets c publish the events that it owns.
func (p *Permissions) events(c subjects.Caller) {
	for _, e := range subjects.Events {
		own := e.Owner == c.Service && c.Role == subjects.RoleService ||
			e.Owner == "every service" && c.Role == subjects.RoleService ||
			e.Owner == "hostagent" && c.Role == subjects.RoleHost ||
			e.Owner == "gate" && c.Role == subjects.RoleGate ||
			e.Owner == "frontend" && c.Role == subjects.RoleFrontend
		if own {
			p.pub(subjects.Wildcard(fill(e.Subject, c)))
		}
	}
}

// fill puts the caller's own names into a pattern; what stays is a wildcard.
func fill(pattern string, c subjects.Caller) string {
	switch c.Role {
	case subjects.RoleService:
		pattern = strings.ReplaceAll(pattern, "{service}", c.Service)
	case subjects.RoleHost:
		pattern = strings.ReplaceAll(pattern, "{host}", string(c.Host))
	case subjects.RoleFrontend:
		pattern = strings.ReplaceAll(pattern, "{tenant}", string(c.Tenant))
		pattern = strings.ReplaceAll(pattern, "{frontend}", string(c.Frontend))
	}
	return pattern
}

// calls lets c call the methods that name it, with its own token only.
func (p *Permissions) calls(c subjects.Caller) {
	for _, m := range subjects.Methods {
		if !m.Allows(c) {
			continue
		}
		base := subjects.Prefix + "rpc." + m.Service + "."
		if subjects.PerHost(m.Service) {
			base += m.CallersHost(c) + "."
		}
		p.pub(base + m.Name + "." + c.Token())
	}
}

// serves lets c serve its methods as NATS micro endpoints.
func (p *Permissions) serves(service string, c subjects.Caller) {
	for _, m := range subjects.Methods {
		if m.Service == service {
			p.sub(m.Endpoints(c.Host)...)
		}
	}
	for _, verb := range []string{"PING", "INFO", "STATS"} {
		p.sub("$SRV."+verb, "$SRV."+verb+"."+service, "$SRV."+verb+"."+service+".*")
	}
	p.Responses = true
}

func (p *Permissions) service(c subjects.Caller) {
	p.serves(c.Service, c)
	p.pub("$JS.API.INFO", subjects.Serving(c.Service))
	for _, d := range subjects.Consumers {
		if d.Owner == c.Service {
			name := d.Stream + "." + d.Durable
			p.pub("$JS.API.CONSUMER.MSG.NEXT."+name, "$JS.API.CONSUMER.INFO."+name,
				"$JS.ACK."+name+".>", "$JS.ACK.*.*."+name+".>")
		}
	}
	for _, b := range subjects.Buckets {
		if b.Owner == c.Service {
			p.bucket(b.Name)
		}
	}
	p.pub("$JS.API.STREAM.MSG.GET.BERTH_DEAD", "$JS.API.STREAM.MSG.DELETE.BERTH_DEAD")
	switch c.Service {
	case "identity":
		p.pub("_INBOX.>") // answers of the durable door, which are no replies to NATS
		p.DenyPublish = serviceInboxes()
	case "lifecycle":
		p.pub("$JS.API.STREAM.PURGE.BERTH_TIMERS", "$JS.API.STREAM.INFO.BERTH_TIMERS") // cancels timers, finds lost ones
	}
}

func serviceInboxes() []string {
	out := []string{subjects.Operator().Inbox() + ".>", subjects.Keeper().Inbox() + ".>"}
	for _, s := range subjects.Services {
		out = append(out, subjects.Service(s).Inbox()+".>")
	}
	return out
}

func (p *Permissions) bucket(name string) {
	kv := "KV_" + name
	p.pub("$KV."+name+".>",
		"$JS.API.STREAM.INFO."+kv, "$JS.API.STREAM.PURGE."+kv,
		"$JS.API.STREAM.MSG.GET."+kv, "$JS.API.STREAM.MSG.DELETE."+kv,
		"$JS.API.DIRECT.GET."+kv, "$JS.API.DIRECT.GET."+kv+".>",
		"$JS.API.CONSUMER.CREATE."+kv+".>", "$JS.API.CONSUMER.DELETE."+kv+".*", "$JS.API.CONSUMER.INFO."+kv+".*",
		"$JS.FC."+kv+".>")
}

func (p *Permissions) host(c subjects.Caller) {
	p.serves("host", c)
	p.pub(subjects.ServingHost(c.Host))
	for _, b := range subjects.Box {
		p.sub(subjects.Prefix + "box.*.*." + b.Name)
	}
	p.pub("_INBOX.*.box.*") // frames of the data plane
	for _, o := range subjects.ObjectStores {
		p.objectStore(o.Name)
	}
}

// gate serves its own host and reads the policies; it writes none.
func (p *Permissions) gate(c subjects.Caller) {
	p.serves("gate", c)
	kv := "KV_BERTH_EGRESS"
	p.pub("$JS.API.INFO", "$JS.API.STREAM.INFO."+kv, "$JS.API.DIRECT.GET."+kv, "$JS.API.DIRECT.GET."+kv+".>",
		"$JS.API.CONSUMER.CREATE."+kv+".>", "$JS.API.CONSUMER.DELETE."+kv+".*", "$JS.API.CONSUMER.INFO."+kv+".*", "$JS.FC."+kv+".>")
}

// objectStore is what natsblob needs: no consumers, and no stream but this.
func (p *Permissions) objectStore(name string) {
	obj := "OBJ_" + name
	p.pub("$O."+name+".C.*", "$O."+name+".M.*",
		"$JS.API.STREAM.INFO."+obj, "$JS.API.STREAM.PURGE."+obj,
		"$JS.API.STREAM.MSG.GET."+obj, "$JS.API.DIRECT.GET."+obj)
}

func (p *Permissions) frontend(c subjects.Caller) {
	for _, b := range subjects.Box {
		p.pub(subjects.Prefix + "box.*.*." + b.Name)
	}
	if !subjects.IsUserFrontend(c.Frontend) { // a user hears its own sessions; see hearing
		p.sub(subjects.Prefix + "session." + string(c.Tenant) + ".*.*")
	}
}

// operator reads every stream but the sealed requests' content-free state and
// touches no service's consumer.
func (p *Permissions) operator() {
	p.pub("$SRV.>", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST")
	p.sub("$JS.EVENT.ADVISORY.>")
	for _, b := range subjects.Box { // with a grant of identity.operator_attach
		p.pub(subjects.Prefix + "box.*.*." + b.Name)
	}
	for _, s := range subjects.Streams {
		p.pub("$JS.API.STREAM.INFO."+s.Name, "$JS.API.CONSUMER.LIST."+s.Name,
			"$JS.API.CONSUMER.NAMES."+s.Name, "$JS.API.CONSUMER.INFO."+s.Name+".*")
		if s.Retention == subjects.WorkQueue {
			continue
		}
		p.sub(s.Subjects...)
		p.pub("$JS.API.CONSUMER.CREATE."+s.Name+".>", "$JS.API.CONSUMER.MSG.NEXT."+s.Name+".*",
			"$JS.API.CONSUMER.DELETE."+s.Name+".*", "$JS.ACK."+s.Name+".>", "$JS.ACK.*.*."+s.Name+".>",
			"$JS.API.STREAM.MSG.GET."+s.Name, "$JS.API.DIRECT.GET."+s.Name, "$JS.API.DIRECT.GET."+s.Name+".>",
			"$JS.FC."+s.Name+".>")
	}
	p.pub("$JS.API.STREAM.MSG.DELETE.BERTH_DEAD")
	for _, d := range subjects.Consumers {
		name := d.Stream + "." + d.Durable
		p.DenyPublish = append(p.DenyPublish, "$JS.API.CONSUMER.CREATE."+name, "$JS.API.CONSUMER.CREATE."+name+".>",
			"$JS.API.CONSUMER.MSG.NEXT."+name, "$JS.API.CONSUMER.DELETE."+name,
			"$JS.ACK."+name+".>", "$JS.ACK.*.*."+name+".>")
	}
}

func (p *Permissions) keeper() {
	p.serves("bus", subjects.Keeper())
	p.pub("$JS.API.>")
	p.sub("$JS.EVENT.ADVISORY.>")
}

// server is the form that nats-server takes. To the server an empty list allows everything.
func (p Permissions) server() *server.Permissions {
	out := &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: p.Publish, Deny: p.DenyPublish},
		Subscribe: &server.SubjectPermission{Allow: p.Subscribe},
	}
	if len(p.Publish) == 0 {
		out.Publish.Deny = []string{">"}
	}
	if len(p.Subscribe) == 0 {
		out.Subscribe.Deny = []string{">"}
	}
	if p.Responses {
		out.Response = &server.ResponsePermission{MaxMsgs: 1, Expires: responseTime}
	}
	return out
}
