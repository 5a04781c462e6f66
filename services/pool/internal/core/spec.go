package core

import (
	"time"

	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
)

// NewSpec reads a declared pool. zone finds a time zone by its name.
func NewSpec(s *poolv1.Spec, zone func(string) (*time.Location, error)) (Spec, error) {
	return Spec{}, nil
}
