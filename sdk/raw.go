package sdk

import (
	"context"
	"encoding/json"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Sealed is a request that was sealed but not sent, for tools that speak on
// the bus themselves.
type Sealed struct {
	Subject   string          // where the direct door takes it
	Queue     string          // where the durable door takes it; empty for renew and status
	Body      json.RawMessage // a SealedRequest; send it with Content-Type: application/json
	RequestID string
	ReplySeed string // secret: opens the answer
	ProofSeed string // secret: an nkey seed that uses the grant in the answer
}

// Seal makes the sealed envelope of a request whose body is JSON: an
// OpenRequest, CloseRequest, DeleteRequest or StatusRequest of
// berth.identity.v1. Nothing is sent but the question for identity's key.
func (c *Client) Seal(ctx context.Context, verb string, body []byte, u UserSession) (Sealed, error) {
	op := "seal " + verb
	shape := map[string]protoreflect.ProtoMessage{"open": &identityv1.OpenRequest{}, "close": &identityv1.CloseRequest{},
		"delete": &identityv1.DeleteRequest{}, "status": &identityv1.StatusRequest{}}[verb]
	if shape == nil {
		return Sealed{}, invalid(op, "the verb must be open, close, delete or status")
	}
	if err := protojson.Unmarshal(body, shape); err != nil {
		return Sealed{}, invalid(op, "the body is not a request of that verb: %v", err)
	}
	id, err := requestIDOr(u.RequestID)
	if err != nil {
		return Sealed{}, wrap(op, err)
	}
	reply, err := newKey()
	if err != nil {
		return Sealed{}, wrap(op, err)
	}
	proof, err := nkeys.CreateUser()
	if err != nil {
		return Sealed{}, wrap(op, err)
	}
	out := Sealed{Subject: subjects.RPC("identity", verb, c.me), RequestID: string(id)}
	if verb != "status" {
		out.Queue = subjects.Request(c.me.Tenant, c.me.Frontend, verb)
	}
	pub, err := proofKey(proof)
	if err != nil {
		return Sealed{}, wrap(op, err)
	}
	req, err := c.sealedRequest(ctx, ask{op: op, verb: verb, id: ids.RequestID(id), user: u.User, proof: pub, json: body}, reply)
	if err != nil {
		return Sealed{}, wrap(op, err)
	}
	if out.Body, err = protojson.Marshal(req); err != nil {
		return Sealed{}, wrap(op, err)
	}
	out.ReplySeed, err = reply.Seed()
	if err != nil {
		return Sealed{}, wrap(op, err)
	}
	seed, err := proof.Seed()
	out.ProofSeed = string(seed)
	return out, wrap(op, err)
}

// proofKey returns the Ed25519 key below an nkey.
func proofKey(kp nkeys.KeyPair) ([]byte, error) {
	pub, err := kp.PublicKey()
	if err != nil {
		return nil, err
	}
	return nkeys.Decode(nkeys.PrefixByteUser, []byte(pub))
}

// Unseal opens the answer to a sealed request: answer is the SealedReply as
// JSON, the result a Reply as JSON. A failure that the platform answered is
// in the result, not an error.
func Unseal(answer []byte, replySeed string) ([]byte, error) {
	const op = "unseal"
	key, err := seal.ParseSeed(replySeed)
	if err != nil {
		return nil, invalid(op, "the key is no curve seed")
	}
	msg := &nats.Msg{Data: answer, Header: nats.Header{headerContentType: []string{contentJSON}}}
	s := &identityv1.SealedReply{}
	if err := decode(msg, s); err != nil {
		return nil, invalid(op, "the answer is not a sealed reply in JSON: %v", err)
	}
	if len(s.GetSealed()) == 0 {
		return nil, failed(op, s.GetFailure())
	}
	r := &identityv1.Reply{}
	if err := openSealed(s.GetSealed(), s.GetSender(), key.Open, r); err != nil {
		return nil, invalid(op, "the answer was not sealed to this key")
	}
	out, err := protojson.MarshalOptions{Multiline: true, Indent: "  "}.Marshal(r)
	return out, wrap(op, err)
}
