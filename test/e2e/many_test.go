package e2e

import (
	"testing"

	"github.com/berth-dev/berth/internal/testsize"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// fewCPU is so little that each of three hosts on a machine of two cores takes several sessions.
const fewCPU = 600

// TestTheSameScenariosInManyProcesses runs on one cluster, one after the other, the scenarios that the
// other tests of this folder run in one process each. Why one of them is not run says its skip.
func TestTheSameScenariosInManyProcesses(t *testing.T) {
	_, url := fileStore(t)
	e := testenv.Cluster(t, "--config", diskFile(t, diskTerms{Store: url, CPU: fewCPU}))
	for _, s := range []struct {
		name string
		run  func(*testing.T, *testenv.Env)
		not  string // why it is not run
		long bool   // left to make test-long: one host's work, which more processes do not change
	}{
		{name: "conformance", run: conformance},
		{name: "files survive sleep", run: filesSurviveSleep},
		{name: "the place says what it is", run: placeSaysWhatItIs, long: true},
		{name: "the place is current after resume", run: placeIsCurrent, long: true},
		{name: "a full disk still wakes", run: fullDiskWakes, long: true},
		{name: "compute removed from outside", run: computeRemovedIsNoticed, long: true},
		{name: "out of memory", run: outOfMemory, long: true},
		{name: "checkpoint", run: checkpointHoldsAll},
		{name: "restore", run: restoreToEarlier},
		{name: "restore of a head that moved", run: restoreOfMovedHead, long: true},
		{name: "export and import", run: exportAndImport, long: true},
		{name: "hostile archive", run: hostileArchive, long: true},
		{name: "plain nats", run: plainNats},
		{name: "both doors", run: bothDoors},
		{name: "a whole life", run: wholeLife},
		{name: "deleted and erased", not: "it reads the files of one pool and one NATS server, and starts twice; that nothing is left on a lost host is in TestHandoff"},
		{name: "kill -9 of everything", not: "TestKillNineOfAClusterAdoptsLiveSandboxes does it, with a cluster of its own"},
		{name: "a machine dies, its disk is lost", not: "with several hosts that is a handoff: TestHandoff"},
		{name: "eviction, quota, lost pools", not: "one host's pool decides them, whoever else there is"},
		{name: "the store is away", not: "hosts do not differ in what they do then"},
		{name: "one open is one trace", not: "members write no common file of spans"},
		{name: "bad starts", not: "nothing is made; shapes of clusters are checked by tools/berth/cluster"},
	} {
		t.Run(s.name, func(t *testing.T) {
			if s.not != "" {
				t.Skip("not run in many processes: " + s.not)
			}
			if s.long {
				testsize.NeedLong(t, "it is one host's work, which the test in one process proves")
			}
			shared := e.For(t)
			t.Cleanup(func() { shared.ForgetAll(t) })
			s.run(t, shared)
		})
	}
}

// wholeLife is the shortest whole life of a session.
func wholeLife(t *testing.T, e *testenv.Env) {
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{Template: "container"})
	put(t, s, "/root/f", "kept")
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s = open(t, c, sdk.OpenOptions{Template: "container"})
	if got := content(t, s, "/root/f"); got != "kept" || s.Origin() != sdk.Resumed {
		t.Errorf("after a sleep the file says %q (%s)", got, s.Origin())
	}
	if err := c.DeleteSession(t.Context(), sdk.UserSession{}); err != nil {
		t.Fatal(err)
	}
	if s = open(t, c, sdk.OpenOptions{Template: "container"}); s.Origin() != sdk.Created {
		t.Errorf("after the delete it was %s", s.Origin())
	}
}

// bothDoors: a session that was opened by the durable door is joined by the direct one, and asked to
// sleep by the durable one.
func bothDoors(t *testing.T, e *testenv.Env) {
	c := e.Client("acme", "ann")
	queued := open(t, c, sdk.OpenOptions{Template: "container", ViaQueue: true})
	put(t, queued, "/root/f", "kept")
	direct := open(t, c, sdk.OpenOptions{Template: "container"})
	if direct.Key() != queued.Key() || direct.Epoch() != queued.Epoch() || direct.Origin() != sdk.Joined {
		t.Errorf("by the queue %s in epoch %s, directly %s in epoch %s, %s", queued.Key(), queued.Epoch(), direct.Key(), direct.Epoch(), direct.Origin())
	}
	if err := queued.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := open(t, c, sdk.OpenOptions{Template: "container", ViaQueue: true})
	if got := content(t, s, "/root/f"); got != "kept" || s.Origin() != sdk.Resumed {
		t.Errorf("after a sleep the file says %q (%s)", got, s.Origin())
	}
}
