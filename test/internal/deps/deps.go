// Package deps is scratch.
package deps

import (
	_ "github.com/nats-io/nats.go/jetstream"
	_ "github.com/nats-io/nkeys"
	_ "github.com/google/go-cmp/cmp"
	_ "pgregory.net/rapid"
	_ "golang.org/x/sys/unix"
	_ "github.com/containerd/containerd/v2/client"
	_ "google.golang.org/protobuf/proto"
)
