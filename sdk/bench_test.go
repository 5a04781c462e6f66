package sdk_test

import (
	"context"
	"testing"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

// BenchmarkExec is the SDK's and the bus's share of an exec of true.
func BenchmarkExec(b *testing.B) {
	srv := sdktest.Start(b)
	s, err := srv.Client(b, "acme").Open(context.Background(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann"))})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := s.Run(context.Background(), sdk.Command("true")); err != nil {
			b.Fatal(err)
		}
	}
}
