package envelope

import (
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/identity/internal/core"
)

// verbs that have a body; another one has none.
var verbs = []string{core.Open, core.Close, core.Delete, core.Renew, core.Status, core.Frontends, core.RevokeFrontend,
	core.AdminSessions, core.AdminAttach, core.AdminSuspend, "nosuch"}

// silent fails when a refusal is no refusal of bad input, or repeats what came in.
func silent(t *testing.T, err error, in string) {
	t.Helper()
	if err == nil {
		return
	}
	if k := errs.Kind(err); k != errkind.Invalid && k != errkind.TooLarge {
		t.Errorf("kind %v", k)
	}
	if strings.Contains(err.Error(), "\n") || len(in) > 40 && strings.Contains(err.Error(), in) {
		t.Errorf("%.200q", err)
	}
}

// FuzzBody: a body of any verb and content type is read or refused, and the
// refusal says nothing of it.
func FuzzBody(f *testing.F) {
	f.Add([]byte(`{"sessionName":"work","sessionName":"other"}`), JSON, byte(0))
	f.Add([]byte(`{"grant":"eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.","proof":"!"}`), JSON, byte(3))
	f.Add(encode(f, &identityv1.OpenRequest{SessionName: "work", Template: "python"}), Protobuf, byte(0))
	f.Add(encode(f, &identityv1.AdminAttachRequest{Reason: "asked by the user"}), "", byte(8))
	f.Add([]byte("\x0a\xff\xff\xff\xff\x0f"), "application/json; charset=x", byte(5))
	f.Fuzz(func(t *testing.T, raw []byte, contentType string, n byte) {
		verb := verbs[int(n)%len(verbs)]
		b, err := Body(verb, &identityv1.Envelope{Verb: verb, Body: raw, ContentType: contentType})
		silent(t, err, string(raw))
		if err == nil && b.Fault != "" {
			t.Errorf("a fault without an error: %q", b.Fault)
		}
		in, err := OperatorAttach(raw)
		silent(t, err, string(raw))
		if err == nil && unknown(in.ProtoReflect()) {
			t.Error("an unknown field passed")
		}
	})
}

// FuzzRequest: the same of what is on the bus.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"sealed":"eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl"}`), JSON)
	f.Add([]byte(`{"sealed":"eA==","sealed":"eQ=="}`), JSON)
	f.Add(encode(f, &identityv1.SealedRequest{Sealed: []byte("x")}), Protobuf)
	f.Fuzz(func(t *testing.T, raw []byte, contentType string) {
		req, err := Request(raw, contentType)
		silent(t, err, string(raw))
		if err == nil && len(req.GetSealed()) == 0 {
			t.Error("a request without an envelope passed")
		}
	})
}
