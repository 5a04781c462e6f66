package replica

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/certs"
)

// issued is a replica's certificate in a file, as the scheduler is configured with.
func issued(t *testing.T, ca *certs.CA, path string, l certs.Leaf) *certs.Files {
	t.Helper()
	if err := ca.Keep(path, l, time.Now()); err != nil {
		t.Fatal(err)
	}
	f, err := certs.OpenFiles(path, path, ca.BundleFile(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// A certificate ends after 30 days, and a root is replaced one day: a group
// goes on, and a replica that starts with new ones is let in, without a restart
// of the others.
func TestCertificatesAreReplacedWhileAGroupRuns(t *testing.T) {
	ca, err := certs.OpenCA(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	dir, leaves := t.TempDir(), map[string]certs.Leaf{}
	g := newGroup(t, 3, func(c *Config) {
		l := certs.Leaf{Role: certs.RoleScheduler, Name: c.ID}
		path := filepath.Join(dir, c.ID+".pem")
		leaves[path] = l
		c.TLS = certs.Mutual(issued(t, ca, path, l))
	})
	apply(t, g.leader(), joinEntry())
	for range 2 {
		if err := ca.Rotate(time.Now()); err != nil {
			t.Fatal(err)
		}
		for path, l := range leaves {
			if err := ca.Keep(path, l, time.Now()); err != nil {
				t.Fatal(err)
			}
		}
		for _, id := range []string{"n1", "n2", "n3"} {
			g.stop(id)
			g.start(id)
			eventually(t, "the group decides", func() bool {
				_, err := g.leader().Apply(t.Context(), joinEntry())
				return err == nil
			})
		}
	}
}

// A host or a service may be called like a replica; its certificate is none.
func TestACertificateOfAnotherRoleIsNoReplicas(t *testing.T) {
	ca, err := certs.OpenCA(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	g := newGroup(t, 1, func(c *Config) {
		c.TLS = certs.Mutual(issued(t, ca, filepath.Join(dir, c.ID+".pem"), certs.Leaf{Role: certs.RoleScheduler, Name: c.ID}))
	})
	g.leader()
	host := certs.Mutual(issued(t, ca, filepath.Join(dir, "host.pem"), certs.Leaf{Role: certs.RoleHost, Name: "n1"}))
	if err := greetAs(t, host, "n1", g.cfg["n1"]); err == nil || !strings.Contains(err.Error(), "the certificate names") {
		t.Errorf("a host passes for a replica: %v", err)
	}
	other := certs.Mutual(issued(t, ca, filepath.Join(dir, "n3.pem"), certs.Leaf{Role: certs.RoleScheduler, Name: "n3"}))
	to := g.cfg["n1"]
	to.ID = "n2"
	if err := greetAs(t, other, "n3", to); err == nil || !strings.Contains(err.Error(), "not replica") {
		t.Errorf("n1 was taken for n2: %v", err)
	}
}
