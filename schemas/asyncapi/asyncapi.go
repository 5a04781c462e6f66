// Package asyncapi renders the subject catalogue as an AsyncAPI 3 document. It
// guarantees that every event, RPC method, word and data-plane subject of the
// catalogue has a message type of the contract, so that schemas/asyncapi.yaml
// cannot drift from the code: a test renders it anew and compares.
package asyncapi

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/proto"
	"gopkg.in/yaml.v3"
)

// eventBodies gives the message of each event, by owner and name or by stream.
var eventBodies = map[string]proto.Message{
	"BERTH_REQUESTS":     &identityv1.SealedRequest{},
	"lifecycle resume":   &lifecyclev1.Resume{},
	"lifecycle idle":     &lifecyclev1.Idle{},
	"lifecycle expiring": &lifecyclev1.Expiring{},
	"lifecycle expire":   &lifecyclev1.Expire{},
	"lifecycle refused":  &lifecyclev1.Refused{},
	"scheduler session":  &schedulerv1.Event{},
	"scheduler host":     &schedulerv1.HostEvent{},
	"hostagent session":  &hostv1.Event{},
	"identity session":   &identityv1.Attached{},
	"hostagent facts":    &hostv1.Facts{},
	"pool pool":          &poolv1.Event{},
	"BERTH_TIMERS":       &lifecyclev1.Timer{},
	"audit identity":     &identityv1.Audit{},
	"audit credentials":  &credentialsv1.Audit{},
	"BERTH_USAGE":        &hostv1.UsageSample{},
	"gate session":       &egressv1.Event{},
	"audit gate":         &egressv1.Record{},
}

type call struct{ req, resp proto.Message }

var sealed = call{&identityv1.SealedRequest{}, &identityv1.SealedReply{}}

// methodBodies gives request and answer of each RPC method. A method that is
// missing here is served by the bus itself and has no protobuf body.
var methodBodies = map[string]call{
	"identity open": sealed, "identity close": sealed, "identity delete": sealed,
	"identity renew": sealed, "identity status": sealed,
	"identity frontends": sealed, "identity revoke_frontend": sealed,
	"identity admin_sessions": sealed, "identity admin_attach": sealed, "identity admin_suspend": sealed,
	"identity tenants":          {&identityv1.TenantsRequest{}, &identityv1.TenantsReply{}},
	"identity tenant_put":       {&identityv1.TenantPutRequest{}, &identityv1.TenantPutReply{}},
	"identity issuer_put":       {&identityv1.IssuerPutRequest{}, &identityv1.IssuerPutReply{}},
	"identity issuer_test":      {&identityv1.IssuerTestRequest{}, &identityv1.IssuerTestReply{}},
	"identity login_put":        {&identityv1.LoginPutRequest{}, &identityv1.LoginPutReply{}},
	"identity suspend":          {&identityv1.SuspendRequest{}, &identityv1.SuspendReply{}},
	"identity operator_attach":  {&identityv1.OperatorAttachRequest{}, &identityv1.OperatorAttachReply{}},
	"credentials end_grants":    {&credentialsv1.EndGrantsRequest{}, &credentialsv1.EndGrantsReply{}},
	"identity keys":             {&identityv1.KeysRequest{}, &identityv1.KeysReply{}},
	"lifecycle open":            {&lifecyclev1.OpenRequest{}, &lifecyclev1.OpenReply{}},
	"lifecycle close":           {&lifecyclev1.CloseRequest{}, &lifecyclev1.CloseReply{}},
	"lifecycle delete":          {&lifecyclev1.DeleteRequest{}, &lifecyclev1.DeleteReply{}},
	"lifecycle status":          {&schedulerv1.ListRequest{}, &schedulerv1.ListReply{}},
	"lifecycle tier_policy":     {&lifecyclev1.TierPolicyRequest{}, &lifecyclev1.TierPolicyReply{}},
	"scheduler wake":            {&schedulerv1.WakeRequest{}, &schedulerv1.WakeReply{}},
	"scheduler sleep":           {&schedulerv1.SleepRequest{}, &schedulerv1.SleepReply{}},
	"scheduler delete":          {&schedulerv1.DeleteRequest{}, &schedulerv1.DeleteReply{}},
	"scheduler join":            {&schedulerv1.JoinRequest{}, &schedulerv1.JoinReply{}},
	"scheduler lease":           {&schedulerv1.LeaseRequest{}, &schedulerv1.LeaseReply{}},
	"scheduler commit_manifest": {&schedulerv1.CommitManifestRequest{}, &schedulerv1.CommitManifestReply{}},
	"scheduler report":          {&schedulerv1.ReportRequest{}, &schedulerv1.ReportReply{}},
	"scheduler show":            {&schedulerv1.ShowRequest{}, &schedulerv1.ShowReply{}},
	"scheduler list":            {&schedulerv1.ListRequest{}, &schedulerv1.ListReply{}},
	"scheduler restore":         {&schedulerv1.RestoreRequest{}, &schedulerv1.RestoreReply{}},
	"scheduler hosts":           {&schedulerv1.HostsRequest{}, &schedulerv1.HostsReply{}},
	"scheduler drain":           {&schedulerv1.DrainRequest{}, &schedulerv1.DrainReply{}},
	"scheduler remove_host":     {&schedulerv1.RemoveHostRequest{}, &schedulerv1.RemoveHostReply{}},
	"scheduler explain":         {&schedulerv1.ExplainRequest{}, &schedulerv1.ExplainReply{}},
	"scheduler peers":           {&schedulerv1.PeersRequest{}, &schedulerv1.PeersReply{}},
	"scheduler add_peer":        {&schedulerv1.AddPeerRequest{}, &schedulerv1.PeersReply{}},
	"scheduler remove_peer":     {&schedulerv1.RemovePeerRequest{}, &schedulerv1.PeersReply{}},
	"scheduler transfer":        {&schedulerv1.TransferRequest{}, &schedulerv1.PeersReply{}},
	"credentials mint":          {&credentialsv1.MintRequest{}, &credentialsv1.MintReply{}},
	"credentials renew":         {&credentialsv1.RenewRequest{}, &credentialsv1.RenewReply{}},
	"credentials revoke":        {&credentialsv1.RevokeRequest{}, &credentialsv1.RevokeReply{}},
	"credentials datakey":       {&credentialsv1.DataKeyRequest{}, &credentialsv1.DataKeyReply{}},
	"credentials jwks":          {&credentialsv1.JwksRequest{}, &credentialsv1.JwksReply{}},
	"credentials egress_ca":     {&credentialsv1.EgressCARequest{}, &credentialsv1.EgressCAReply{}},
	"credentials secret_put":    {&credentialsv1.SecretPutRequest{}, &credentialsv1.SecretPutReply{}},
	"credentials secrets":       {&credentialsv1.SecretsRequest{}, &credentialsv1.SecretsReply{}},
	"credentials secret_remove": {&credentialsv1.SecretRemoveRequest{}, &credentialsv1.SecretRemoveReply{}},
	"credentials reveal":        {&credentialsv1.RevealRequest{}, &credentialsv1.RevealReply{}},
	"egress apply":              {&egressv1.ApplyRequest{}, &egressv1.ApplyReply{}},
	"egress policies":           {&egressv1.PoliciesRequest{}, &egressv1.PoliciesReply{}},
	"egress remove":             {&egressv1.RemovePolicyRequest{}, &egressv1.RemovePolicyReply{}},
	"gate bind":                 {&egressv1.BindRequest{}, &egressv1.BindReply{}},
	"gate unbind":               {&egressv1.UnbindRequest{}, &egressv1.UnbindReply{}},
	"gate sync":                 {&egressv1.SyncRequest{}, &egressv1.SyncReply{}},
	"host notice":               {&egressv1.NoticeRequest{}, &egressv1.NoticeReply{}},
	"pool reserve":              {&poolv1.ReserveRequest{}, &poolv1.ReserveReply{}},
	"pool settle":               {&poolv1.SettleRequest{}, &poolv1.SettleReply{}},
	"pool apply":                {&poolv1.ApplyRequest{}, &poolv1.ApplyReply{}},
	"pool show":                 {&poolv1.ShowRequest{}, &poolv1.ShowReply{}},
	"pool remove":               {&poolv1.RemoveRequest{}, &poolv1.RemoveReply{}},
	"host prepare":              {&hostv1.PrepareRequest{}, &hostv1.PrepareReply{}},
	"host retire":               {&hostv1.RetireRequest{}, &hostv1.RetireReply{}},
	"host warm":                 {&hostv1.WarmRequest{}, &hostv1.WarmReply{}},
	"host wake":                 {&hostv1.WakeRequest{}, &hostv1.WakeReply{}},
	"host sleep":                {&hostv1.SleepRequest{}, &hostv1.SleepReply{}},
	"host delete":               {&hostv1.DeleteRequest{}, &hostv1.DeleteReply{}},
	"host activity":             {&hostv1.ActivityRequest{}, &hostv1.ActivityReply{}},
	"host inventory":            {&hostv1.InventoryRequest{}, &hostv1.InventoryReply{}},
	"host snapshots":            {&hostv1.SnapshotsRequest{}, &hostv1.SnapshotsReply{}},
	"host verify":               {&hostv1.VerifyRequest{}, &hostv1.VerifyReply{}},
	"host grow":                 {&hostv1.GrowRequest{}, &hostv1.GrowReply{}},
}

var boxBodies = map[string]call{
	"open": {&boxv1.OpenRequest{}, &boxv1.SealedOpenReply{}},
	"in":   {&boxv1.Frame{}, nil},
}

// reserved events are in the catalogue and have no publisher in this release.
var reserved = map[string]bool{"lifecycle pause": true}

// EventBody returns the message type of an event, nil for reserved events and dead letters.
func EventBody(e subjects.Event) proto.Message {
	kind := e.Owner + " session"
	switch {
	case strings.HasPrefix(e.Subject, "berth.v1.host."):
		kind = e.Owner + " host"
	case strings.HasPrefix(e.Subject, "berth.v1.pool."):
		kind = e.Owner + " pool"
	case strings.HasPrefix(e.Subject, "berth.v1.audit."):
		kind = "audit " + e.Owner
	}
	for _, key := range []string{e.Owner + " " + e.Name, e.Stream, kind} {
		if m, ok := eventBodies[key]; ok {
			return m
		}
	}
	return nil
}

type node = map[string]any

// Document renders the catalogue.
func Document() ([]byte, error) {
	channels, operations, messages := node{}, node{}, node{}
	message := func(m proto.Message) node {
		full := string(m.ProtoReflect().Descriptor().FullName())
		messages[full] = node{
			"name":        full,
			"contentType": "application/protobuf",
			"payload": node{"schemaFormat": "application/vnd.google.protobuf;version=3",
				"schema": node{"$ref": "./proto/" + m.ProtoReflect().Descriptor().ParentFile().Path() + "#" + full}},
		}
		return node{"$ref": "#/components/messages/" + full}
	}
	for _, e := range subjects.Events {
		m := EventBody(e)
		if m == nil {
			continue
		}
		id := identifier(e.Subject)
		channels[id] = channel(e.Subject, e.Doc, node{"body": message(m)}, e.Stream)
		operations["publish."+id] = node{"action": "send", "channel": ref(id), "summary": e.Owner + ": " + e.Doc}
	}
	for _, m := range subjects.Methods {
		c, ok := methodBodies[m.Service+" "+m.Name]
		if !ok {
			continue
		}
		addCall(channels, operations, message, methodSubject(m), m.Doc, c)
	}
	for _, b := range subjects.Box {
		addCall(channels, operations, message, "berth.v1.box.{session}.{epoch}."+b.Name, b.Doc, boxBodies[b.Name])
	}
	if len(subjects.Words) > 0 {
		messages["word"] = node{"name": "word", "title": "A message without a body", "payload": node{"type": "null"}}
	}
	for _, w := range subjects.Words {
		id := identifier(w.Subject)
		channels[id] = channel(w.Subject, w.Doc, node{"body": node{"$ref": "#/components/messages/word"}}, "")
		operations["publish."+id] = node{"action": "send", "channel": ref(id), "summary": w.Owner + ": " + w.Doc}
	}
	doc := node{
		"asyncapi": "3.0.0",
		"info": node{"title": "Berth", "version": "1",
			"description": "Generated from schemas/subjects by `make gen`. Bodies are protobuf, or the same message as protojson where the content type is application/json. Headers follow the CloudEvents NATS binding in binary mode."},
		"defaultContentType": "application/protobuf",
		"servers":            node{"nats": node{"host": "127.0.0.1:4222", "protocol": "nats", "description": "NATS JetStream over TLS 1.3; every login is an nkey or a user's token, and is checked when it happens."}},
		"channels":           channels, "operations": operations,
		"components": node{"messages": messages},
	}
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(doc); err != nil {
		return nil, fmt.Errorf("encode the AsyncAPI document: %w", err)
	}
	return out.Bytes(), nil
}

func addCall(channels, operations node, message func(proto.Message) node, subject, doc string, c call) {
	id := identifier(subject)
	bodies := node{"request": message(c.req)}
	op := node{"action": "receive", "channel": ref(id), "summary": doc,
		"messages": []any{node{"$ref": "#/channels/" + id + "/messages/request"}}}
	if c.resp != nil {
		bodies["answer"] = message(c.resp)
		op["reply"] = node{"address": node{"location": "$message.header#/reply"}, "channel": ref(id),
			"messages": []any{node{"$ref": "#/channels/" + id + "/messages/answer"}}}
	}
	channels[id] = channel(subject, doc, bodies, "")
	operations["handle."+id] = op
}

func methodSubject(m subjects.Method) string {
	switch {
	case m.Service == "host":
		return "berth.v1.rpc.host.{host}." + m.Name + ".{caller}"
	case m.Service == "identity":
		return "berth.v1.rpc.identity." + m.Name + ".{tenant}.{frontend}"
	}
	return "berth.v1.rpc." + m.Service + "." + m.Name + ".{caller}"
}

func ref(id string) node { return node{"$ref": "#/channels/" + id} }

var token = regexp.MustCompile(`\{(\w+)\}`)

func channel(subject, doc string, messages node, stream string) node {
	params := node{}
	for _, m := range token.FindAllStringSubmatch(subject, -1) {
		params[m[1]] = node{"description": "one subject token"}
	}
	c := node{"address": subject, "description": doc, "messages": messages}
	if len(params) > 0 {
		c["parameters"] = params
	}
	if stream != "" {
		c["x-stream"] = stream
	}
	return c
}

func identifier(subject string) string {
	return strings.NewReplacer("berth.v1.", "", "{", "", "}", "").Replace(subject)
}
