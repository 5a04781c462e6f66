package registry

import (
	"fmt"
	"testing"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// The bucket is everybody's: when it is full, nobody can be suspended any more.
func TestAdministratorsOfOneTenantCannotFillTheRegistry(t *testing.T) {
	user := func(tenant string, n int) *identityv1.Suspension {
		return &identityv1.Suspension{Tenant: tenant, Issuer: "https://idp", Subject: fmt.Sprint(n)}
	}
	s := &Store{entries: map[string]entry{}}
	for n := range mostByAdministrators {
		if err := s.roomFor(user("acme", n)); err != nil {
			t.Fatalf("user %d: %v", n, err)
		}
		s.entries[keyOfSuspension(user("acme", n))] = entry{rev: uint64(n) + 1} // lifted: it takes room all the same
	}
	if err := s.roomFor(user("acme", mostByAdministrators)); !errs.Is(err, errkind.Refused) {
		t.Errorf("one more: %v", err)
	}
	if err := s.roomFor(user("acme", 1)); err != nil {
		t.Errorf("one that was suspended before: %v", err)
	}
	if err := s.roomFor(user("acme-2", 1)); err != nil {
		t.Errorf("another tenant's: %v", err)
	}
}
