package stack

import (
	"path/filepath"
	"testing"

	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/sdk"
)

// TestAnOperatorIsGivenAGrantByTheWholePlatform: identity, scheduler and credentials as they are. That a host
// takes it is proved where there is a process behind: services/hostagent.
func TestAnOperatorIsGivenAGrantByTheWholePlatform(t *testing.T) {
	info, stop := start(t, t.TempDir())
	defer stop()
	s, err := connect(t, info, "acme", "ann").Open(t.Context(), sdk.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	op, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: filepath.Join(info.Clients, subjects.Operator().Name()+".json")})
	if err != nil {
		t.Fatal(err)
	}
	defer op.Close()
	ask := sdk.Attach{Tenant: "acme", Key: s.Key(), Issuer: info.Issuer + "/acme", Subject: "ann", Generation: s.Generation(), Reason: "ticket 7"}
	looks, err := op.OperatorAttach(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	defer looks.Detach()
	if err := looks.Reopen(t.Context()); err == nil {
		t.Error("the operator opens the user's session")
	}
}
