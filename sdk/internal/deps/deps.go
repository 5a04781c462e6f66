// Package deps is scratch.
package deps

import (
	_ "github.com/nats-io/nats.go"
	_ "github.com/nats-io/nats.go/jetstream"
	_ "github.com/nats-io/nats.go/micro"
	_ "github.com/nats-io/nats-server/v2/server"
	_ "github.com/nats-io/nkeys"
	_ "github.com/go-jose/go-jose/v4"
	_ "go.opentelemetry.io/otel/trace"
	_ "google.golang.org/protobuf/proto"
)
