package sdktest

import (
	"testing"

	"github.com/berth-dev/berth/sdk"
)

func TestConformance(t *testing.T) {
	Conformance(t, func(t *testing.T) Env {
		s := Start(t)
		tokens := map[string]sdk.TokenSource{}
		return Env{Client: s.Client(t, "acme"), User: func(name string) sdk.TokenSource {
			if tokens[name] == nil {
				tokens[name] = sdk.Token(s.Token("acme", name))
			}
			return tokens[name]
		}}
	})
}
