// Package deps is scratch.
package deps

import (
	_ "google.golang.org/protobuf/proto"
	_ "pgregory.net/rapid"
	_ "gopkg.in/yaml.v3"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/nats-io/nkeys"
)
