module github.com/berth-dev/berth/schemas

go 1.26.0

require (
	github.com/google/go-cmp v0.7.0
	github.com/nats-io/nkeys v0.4.17
	golang.org/x/crypto v0.58.0
	google.golang.org/protobuf v1.36.12
	gopkg.in/yaml.v3 v3.0.1
	pgregory.net/rapid v1.3.0
)

require (
	github.com/kr/pretty v0.3.1 // indirect
	github.com/rogpeppe/go-internal v1.14.1 // indirect
	golang.org/x/sys v0.50.0 // indirect
	gopkg.in/check.v1 v1.0.0-20201130134442-10cb98267c6c // indirect
)
