package envelope

import (
	"bytes"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/identity/internal/core"
)

func encode(t testing.TB, m proto.Message) []byte {
	t.Helper()
	raw, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// extra appends a field that no message of the contract has.
func extra(raw []byte) []byte {
	return protowire.AppendVarint(protowire.AppendTag(bytes.Clone(raw), 1999, protowire.VarintType), 1)
}

func TestUnknownFieldsAreRefusedAtAnyDepth(t *testing.T) {
	req := encode(t, &identityv1.SealedRequest{Sealed: []byte("x")})
	risk := encode(t, &identityv1.RiskFacts{ToolAccess: true})
	nested := protowire.AppendBytes(protowire.AppendTag(nil, 4, protowire.BytesType), extra(risk))
	body := func(ct string, raw []byte) error {
		_, err := Body(core.Open, &identityv1.Envelope{ContentType: ct, Body: raw})
		return err
	}
	_, errRequest := Request(extra(req), "")
	_, errJSON := Request([]byte(`{"sealed":"eA==","admin":true}`), JSON)
	_, _, errEnvelope := Parse(extra(encode(t, &identityv1.Envelope{Verb: "open"})))
	_, _, errEnvelopeJSON := Parse([]byte(`{"verb":"open","admin":true}`))
	for name, err := range map[string]error{
		"request": errRequest, "request as JSON": errJSON, "envelope": errEnvelope, "envelope as JSON": errEnvelopeJSON,
		"body": body("", extra(nil)), "below the body": body(Protobuf, nested),
		"body as JSON": body(JSON, []byte(`{"admin":1}`)), "below the body as JSON": body(JSON, []byte(`{"risk":{"admin":1}}`)),
	} {
		if !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := body(Protobuf, protowire.AppendBytes(protowire.AppendTag(nil, 4, protowire.BytesType), risk)); err != nil {
		t.Errorf("the same without it: %v", err)
	}
}

func TestBothForms(t *testing.T) {
	want := &identityv1.Envelope{Verb: "open", RequestId: "r1", Body: []byte(`{"sessionName":"work"}`), ContentType: "application/json; charset=utf-8"}
	asJSON, err := protojson.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	for _, plain := range [][]byte{encode(t, want), asJSON} {
		got, isJSON, err := Parse(plain)
		if err != nil || !proto.Equal(got, want) || isJSON != (plain[0] == '{') {
			t.Fatalf("%v, %v, %v", got, isJSON, err)
		}
		b, err := Body(core.Open, got)
		if err != nil || b.Open.GetSessionName() != "work" {
			t.Errorf("%v, %v", b, err)
		}
	}
}

func TestBounds(t *testing.T) {
	_, err := Request(make([]byte, MaxRequest+1), "")
	if !errs.Is(err, errkind.TooLarge) {
		t.Error(err)
	}
	for _, ct := range []string{"text/plain", "application/cloudevents+json", ";", strings.Repeat("a", 1000)} {
		if _, err := Request(nil, ct); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%.20s: %v", ct, err)
		}
	}
	if _, err := Request(nil, ""); !errs.Is(err, errkind.Invalid) {
		t.Error("a request without an envelope passed")
	}
}

func FuzzEnvelope(f *testing.F) {
	f.Add(encode(f, &identityv1.Envelope{Verb: "open", Body: []byte("x"), ContentType: JSON}), "open")
	f.Add([]byte(`{"verb":"open","body":"e30="}`), "close")
	f.Add(extra(nil), "renew")
	f.Fuzz(func(t *testing.T, raw []byte, verb string) {
		_, _ = Request(raw, "")
		_, _ = Request(raw, JSON)
		e, asJSON, err := Parse(raw)
		if err != nil {
			if errs.Kind(err) != errkind.Invalid {
				t.Errorf("kind %v", errs.Kind(err))
			}
			return
		}
		if !asJSON {
			// Nothing was lost: what was read says all that was written.
			again, _, err := Parse(encode(t, e))
			if err != nil || !proto.Equal(again, e) {
				t.Errorf("not the same when read again: %v", err)
			}
		}
		_, _ = Body(verb, e)
	})
}
