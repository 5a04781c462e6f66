package registry_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/registry"
)

// watches are the consumers that watch the registry.
func watches(t *testing.T, keeper *bus.Conn) []string {
	t.Helper()
	var reply struct {
		Consumers []string `json:"consumers"`
	}
	must(t, keeper.Read(bustest.Context(t), "CONSUMER.NAMES.KV_"+registry.BucketName, json.RawMessage("{}"), &reply))
	return reply.Consumers
}

// TestAWatchThatWasLost is begun anew, and what it missed is caught up with.
func TestAWatchThatWasLost(t *testing.T) {
	e := bustest.Start(t)
	conn, keeper := bustest.Connect(t, e, subjects.Service("identity")), bustest.Connect(t, e, subjects.Keeper())
	writer := open(t, bustest.Connect(t, e, subjects.Service("identity")), registry.Static{})
	s := open(t, conn, registry.Static{})
	for _, name := range watches(t, keeper) {
		must(t, keeper.API(bustest.Context(t), "CONSUMER.DELETE.KV_"+registry.BucketName+"."+name, nil, nil))
	}
	_, err := writer.PutTenant(bustest.Context(t), &identityv1.Tenant{Tenant: "acme"})
	must(t, err)
	until(t, s, "what was stored while nothing watched", func(s *registry.Snapshot) bool { _, ok := s.Tenant("acme"); return ok })
}

// TestABucketThatWasPutBack to an earlier state: what it does not hold any more counts no more.
func TestABucketThatWasPutBack(t *testing.T) {
	e := bustest.Start(t)
	conn, keeper := bustest.Connect(t, e, subjects.Service("identity")), bustest.Connect(t, e, subjects.Keeper())
	s := open(t, conn, registry.Static{})
	ctx := bustest.Context(t)
	for _, name := range []string{"acme", "globex"} {
		_, err := s.PutTenant(ctx, &identityv1.Tenant{Tenant: name})
		must(t, err)
	}
	must(t, keeper.API(ctx, "STREAM.DELETE.KV_"+registry.BucketName, nil, nil))
	_, err := bus.Reconcile(ctx, keeper, bus.Declared(1))
	must(t, err)
	b, err := conn.OpenBucket(ctx, registry.BucketName)
	must(t, err)
	_, err = b.Put(ctx, "tenant.acme", []byte(`{"tenant":"acme","plan":"large"}`))
	must(t, err)
	until(t, s, "the state of the bucket as it is now", func(s *registry.Snapshot) bool {
		acme, ok := s.Tenant("acme")
		_, gone := s.Tenant("globex")
		return ok && acme.GetPlan() == "large" && !gone
	})
}

// TestANewBucketWithAsManyRevisions as the watch has seen replaces what is known.
func TestANewBucketWithAsManyRevisions(t *testing.T) {
	e := bustest.Start(t)
	conn, keeper := bustest.Connect(t, e, subjects.Service("identity")), bustest.Connect(t, e, subjects.Keeper())
	s := open(t, conn, registry.Static{})
	ctx := bustest.Context(t)
	b, err := conn.OpenBucket(ctx, registry.BucketName)
	must(t, err)
	_, err = b.Put(ctx, "tenant.globex", []byte(`{"tenant":"globex"}`))
	must(t, err)
	until(t, s, "the watch has seen revision 1", func(s *registry.Snapshot) bool { _, ok := s.Tenant("globex"); return ok })
	must(t, keeper.API(ctx, "STREAM.DELETE.KV_"+registry.BucketName, nil, nil))
	_, err = bus.Reconcile(ctx, keeper, bus.Declared(1))
	must(t, err)
	_, err = b.Put(ctx, "tenant.acme", []byte(`{"tenant":"acme"}`))
	must(t, err)
	until(t, s, "the state of the new bucket", func(s *registry.Snapshot) bool {
		_, ok := s.Tenant("acme")
		_, gone := s.Tenant("globex")
		return ok && !gone
	})
}

// TestAnIdentityThatCannotReadTheRegistry does not begin: it would not know who is suspended.
func TestAnIdentityThatCannotReadTheRegistry(t *testing.T) {
	e := bustest.Start(t)
	conn, keeper := bustest.Connect(t, e, subjects.Service("identity")), bustest.Connect(t, e, subjects.Keeper())
	must(t, keeper.API(bustest.Context(t), "STREAM.DELETE.KV_"+registry.BucketName, nil, nil))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if s, err := registry.Open(ctx, ctx, conn, registry.Static{}, bustest.Log(t)); err == nil {
		cancel()
		s.Wait()
		t.Fatal("it began without the bucket")
	}
}
