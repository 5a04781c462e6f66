package sdktest

import (
	"testing"

	"github.com/berth-dev/berth/sdk"
)

func TestConformance(t *testing.T) {
	Conformance(t, func(t *testing.T) Env {
		s := Start(t)
		tokens := map[string]sdk.TokenSource{}
		op, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: s.OperatorFile()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(op.Close)
		lose := func(key string) func() {
			s.LoseHost(key)
			return func() { s.HandOver(key) }
		}
		return Env{LoseHost: lose, Operator: op, Client: s.Client(t, "acme"), User: func(name string) sdk.TokenSource {
			if tokens[name] == nil {
				tokens[name] = sdk.Token(s.Token("acme", name))
			}
			return tokens[name]
		}}
	})
}
