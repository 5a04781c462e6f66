// Package envelope takes requests of frontends apart. It guarantees that
// nothing unknown passes: a field that the contract does not have, at any
// depth, in protobuf or JSON, is refused, and so is anything larger than its
// bound, before it is decoded. It judges nothing else, and no error of it
// quotes what came in.
package envelope

import (
	"bytes"
	"mime"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/identity/internal/core"
)

// MaxRequest bounds a sealed request as it is on the bus, in bytes.
const MaxRequest = 64 << 10

// Content types of requests and bodies; the empty one is Protobuf.
const (
	Protobuf = "application/protobuf"
	JSON     = "application/json"
)

// IsJSON reports whether a content type is JSON; other types than the two
// are refused.
func IsJSON(contentType string) (bool, error) {
	if contentType == "" {
		return false, nil
	}
	media, _, err := mime.ParseMediaType(contentType)
	switch {
	case err == nil && media == JSON:
		return true, nil
	case err == nil && (media == Protobuf || media == "application/x-protobuf"):
		return false, nil
	}
	return false, errs.E("", errkind.Invalid, "", "the content type is neither "+Protobuf+" nor "+JSON)
}

// Request reads what is on the bus.
func Request(data []byte, contentType string) (*identityv1.SealedRequest, error) {
	if len(data) > MaxRequest {
		return nil, errs.Errorf("", errkind.TooLarge, "the request is %d bytes long, at most %d are allowed", len(data), MaxRequest)
	}
	asJSON, err := IsJSON(contentType)
	if err != nil {
		return nil, err
	}
	req := &identityv1.SealedRequest{}
	if err := strict(data, asJSON, req, "request"); err != nil {
		return nil, err
	}
	if len(req.GetSealed()) == 0 {
		return nil, errs.E("", errkind.Invalid, "", "the request holds no sealed envelope")
	}
	return req, nil
}

// Parse reads an opened envelope. JSON is told from protobuf by its first
// byte, which no protobuf envelope has; the answer is written the same way.
func Parse(plain []byte) (e *identityv1.Envelope, asJSON bool, err error) {
	asJSON = bytes.HasPrefix(plain, []byte("{"))
	e = &identityv1.Envelope{}
	if err := strict(plain, asJSON, e, "envelope"); err != nil {
		return nil, asJSON, err
	}
	return e, asJSON, nil
}

// Body decodes the body that a verb takes.
func Body(verb string, e *identityv1.Envelope) (core.Body, error) {
	var b core.Body
	var into proto.Message
	switch verb {
	case core.Open:
		b.Open = &identityv1.OpenRequest{}
		into = b.Open
	case core.Close:
		b.Close = &identityv1.CloseRequest{}
		into = b.Close
	case core.Delete:
		b.Delete = &identityv1.DeleteRequest{}
		into = b.Delete
	case core.Renew:
		b.Renew = &identityv1.RenewRequest{}
		into = b.Renew
	case core.Status:
		b.Status = &identityv1.StatusRequest{}
		into = b.Status
	case core.Frontends:
		b.Frontends = &identityv1.FrontendsRequest{}
		into = b.Frontends
	case core.RevokeFrontend:
		b.RevokeFrontend = &identityv1.RevokeFrontendRequest{}
		into = b.RevokeFrontend
	case core.AdminSessions:
		b.AdminSessions = &identityv1.AdminSessionsRequest{}
		into = b.AdminSessions
	case core.AdminAttach:
		b.AdminAttach = &identityv1.AdminAttachRequest{}
		into = b.AdminAttach
	case core.AdminSuspend:
		b.AdminSuspend = &identityv1.AdminSuspendRequest{}
		into = b.AdminSuspend
	default:
		return b, nil // core refuses the verb
	}
	asJSON, err := IsJSON(e.GetContentType())
	if err != nil {
		return b, err
	}
	if asJSON && len(e.GetBody()) == 0 {
		return b, nil
	}
	return b, strict(e.GetBody(), asJSON, into, "body")
}

// OperatorAttach reads the opened request of an operator, in protobuf.
func OperatorAttach(plain []byte) (*identityv1.OperatorAttach, error) {
	in := &identityv1.OperatorAttach{}
	return in, strict(plain, false, in, "request")
}

// strict decodes and refuses what it does not know.
func strict(data []byte, asJSON bool, into proto.Message, what string) error {
	if asJSON {
		if err := (protojson.UnmarshalOptions{DiscardUnknown: false}).Unmarshal(data, into); err != nil {
			return errs.Errorf("", errkind.Invalid, "the %s is not the JSON form of %s, or has a field that it does not know", what, name(into))
		}
		return nil
	}
	if err := proto.Unmarshal(data, into); err != nil {
		return errs.Errorf("", errkind.Invalid, "the %s is not the protobuf form of %s", what, name(into))
	}
	if unknown(into.ProtoReflect()) {
		return errs.Errorf("", errkind.Invalid, "the %s has a field that %s does not know", what, name(into))
	}
	return nil
}

func name(m proto.Message) string { return string(m.ProtoReflect().Descriptor().FullName()) }

// unknown reports whether m holds an unknown field at any depth.
func unknown(m protoreflect.Message) bool {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	found := false
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			if f.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
					found = found || unknown(v.Message())
					return !found
				})
			}
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				found = found || unknown(v.List().Get(i).Message())
			}
		default:
			found = unknown(v.Message())
		}
		return !found
	})
	return found
}
