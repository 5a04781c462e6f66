package scope

import (
	"testing"

	"google.golang.org/protobuf/proto"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

var key = string(ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", "user", "default"))

func TestScopesHaveOneKeyEach(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range []*egressv1.Scope{
		{Layer: egressv1.Layer_LAYER_CELL}, {Layer: egressv1.Layer_LAYER_PLAN, Name: "acme"}, {Layer: egressv1.Layer_LAYER_TENANT, Name: "acme"},
		{Layer: egressv1.Layer_LAYER_TEMPLATE, Name: "acme"}, {Layer: egressv1.Layer_LAYER_SESSION, Tenant: "acme", Name: key},
		{Layer: egressv1.Layer_LAYER_SESSION, Tenant: "other", Name: key},
	} {
		k, err := Key(s)
		if err != nil || seen[k] {
			t.Fatalf("%v: %q, %v", s, k, err)
		}
		seen[k] = true
		if back, err := Parse(k); err != nil || !proto.Equal(back, s) {
			t.Errorf("%q leads to %v, %v", k, back, err)
		}
	}
	for _, k := range Of(&egressv1.Binding{Session: &corev1.SessionRef{Tenant: "acme", Session: key}, Plan: "acme", Template: "acme"}) {
		if !seen[k] {
			t.Errorf("a session has the scope %q, which nobody can name", k)
		}
	}
}

func TestScopesThatAreNone(t *testing.T) {
	for _, s := range []*egressv1.Scope{nil, {}, {Layer: 99}, {Layer: egressv1.Layer_LAYER_CELL, Name: "x"}, {Layer: egressv1.Layer_LAYER_PLAN},
		{Layer: egressv1.Layer_LAYER_TENANT, Name: "a.b"}, {Layer: egressv1.Layer_LAYER_TENANT, Name: "a", Tenant: "b"}, {Layer: egressv1.Layer_LAYER_TENANT, Name: ">"},
		{Layer: egressv1.Layer_LAYER_SESSION, Name: key}, {Layer: egressv1.Layer_LAYER_SESSION, Tenant: "acme", Name: "default"}, {Layer: egressv1.Layer_LAYER_TENANT, Name: "none"}} {
		if k, err := Key(s); err == nil {
			t.Errorf("%v has the key %q", s, k)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("cell")
	f.Add("tenant.acme")
	f.Add("session.acme." + key)
	f.Fuzz(func(t *testing.T, k string) {
		s, err := Parse(k)
		if err != nil {
			return
		}
		if again, err := Key(s); err != nil || again != k {
			t.Fatalf("%q leads to %v, whose key is %q", k, s, again)
		}
	})
}
