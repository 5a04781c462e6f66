module github.com/berth-dev/berth/schemas

go 1.26.0

require (
	github.com/google/go-cmp v0.7.0
	github.com/nats-io/nkeys v0.4.17
	golang.org/x/crypto v0.52.0
	google.golang.org/protobuf v1.36.12
	gopkg.in/yaml.v3 v3.0.1
	pgregory.net/rapid v1.3.0
)

require golang.org/x/sys v0.45.0 // indirect
