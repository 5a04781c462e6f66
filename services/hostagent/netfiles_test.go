package hostagent

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pavlo-v-chernykh/keystore-go/v4"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
)

func testRoot(t *testing.T, name string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	must(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// noSystemRoots has this machine trust nothing.
func noSystemRoots(t *testing.T, instead ...string) {
	was := systemRoots
	systemRoots = instead
	t.Cleanup(func() { systemRoots = was })
}

// TestNewRootsReachSandboxesThatAreThere: a file that is bound over another is not seen under a new name.
func TestNewRootsReachSandboxesThatAreThere(t *testing.T) {
	dir := t.TempDir()
	own, extra, cell := testRoot(t, "own"), testRoot(t, "extra"), testRoot(t, "cell")
	noSystemRoots(t, filepath.Join(dir, "own.pem"))
	must(t, os.WriteFile(filepath.Join(dir, "own.pem"), own, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "extra.pem"), extra, 0o600))
	f, err := openNetFiles(filepath.Join(dir, "files"), filepath.Join(dir, "run"), []string{filepath.Join(dir, "extra.pem")}, testLog())
	must(t, err)
	run := filepath.Join(dir, "run", "b1")
	must(t, f.furnish(run))
	held, err := os.Open(filepath.Join(run, "trust.pem"))
	must(t, err)
	defer held.Close()
	must(t, f.trustAlso(cell))
	var got bytes.Buffer
	_, err = got.ReadFrom(held)
	must(t, err)
	if got.String() != string(own)+string(cell)+string(extra) {
		t.Errorf("trusted is %s", got.String())
	}
	java, err := os.Open(filepath.Join(run, "trust.jks"))
	must(t, err)
	defer java.Close()
	ks := keystore.New()
	must(t, ks.Load(java, []byte("changeit")))
	if n := len(ks.Aliases()); n != 3 {
		t.Errorf("%d in the Java store", n)
	}
	must(t, os.WriteFile(filepath.Join(run, "egress.json"), []byte(`{"said":1}`), 0o600))
	must(t, f.furnish(run))
	if b, _ := os.ReadFile(filepath.Join(run, "egress.json")); string(b) != `{"said":1}` {
		t.Errorf("what the gate said is lost: %s", b)
	}
	if err := f.trustAlso([]byte("no certificate")); err == nil {
		t.Error("roots without a certificate are trusted")
	}
	again, err := openNetFiles(filepath.Join(dir, "files"), filepath.Join(dir, "run"), nil, testLog())
	must(t, err)
	if !bytes.Equal(again.roots, cell) {
		t.Error("the next process does not know the cell's roots")
	}
	if b, _ := os.ReadFile(filepath.Join(run, "trust.pem")); string(b) != string(own)+string(cell) {
		t.Errorf("a shorter text is %s", b)
	}
	if st, err := os.Stat(filepath.Join(run, "trust.pem")); err != nil || st.Mode().Perm() != 0o644 {
		t.Errorf("%v %v", st.Mode(), err)
	}
}

// TestSandboxesHaveNoFileInCommon: by the locks of one they could talk.
func TestSandboxesHaveNoFileInCommon(t *testing.T) {
	dir, cell := t.TempDir(), testRoot(t, "cell")
	noSystemRoots(t)
	f, err := openNetFiles(filepath.Join(dir, "files"), filepath.Join(dir, "run"), nil, testLog())
	must(t, err)
	a, b, none := filepath.Join(dir, "run", "a"), filepath.Join(dir, "run", "b"), filepath.Join(dir, "run", "none")
	must(t, os.MkdirAll(none, 0o755))
	must(t, f.furnish(a))
	must(t, f.trustAlso(cell))
	must(t, f.furnish(b))
	for _, name := range sharedFiles {
		var all []os.FileInfo
		for _, d := range []string{a, b, filepath.Join(dir, "files")} {
			st, err := os.Stat(filepath.Join(d, name))
			must(t, err)
			for _, other := range all {
				if os.SameFile(st, other) {
					t.Errorf("%s is one file in two folders", name)
				}
			}
			all = append(all, st)
		}
		x, _ := os.ReadFile(filepath.Join(a, name))
		if y, _ := os.ReadFile(filepath.Join(b, name)); !bytes.Equal(x, y) || len(x) == 0 {
			t.Errorf("%s differs", name)
		}
	}
	if left, _ := os.ReadDir(none); len(left) > 0 {
		t.Errorf("a sandbox without a network got %v", left)
	}
}

// TestAHostWithoutRootsGivesTheCellsAlone, and a configured file that is none is refused.
func TestAHostWithoutRootsGivesTheCellsAlone(t *testing.T) {
	dir, cell := t.TempDir(), testRoot(t, "cell")
	noSystemRoots(t)
	f, err := openNetFiles(filepath.Join(dir, "files"), filepath.Join(dir, "run"), nil, testLog())
	must(t, err)
	must(t, f.trustAlso(cell))
	if b, _ := os.ReadFile(filepath.Join(dir, "files", "trust.pem")); !bytes.Equal(b, cell) {
		t.Errorf("%s", b)
	}
	none := filepath.Join(dir, "none.pem")
	must(t, os.WriteFile(none, []byte("nothing"), 0o600))
	if _, err := openNetFiles(filepath.Join(dir, "files"), filepath.Join(dir, "run"), []string{none}, testLog()); err == nil {
		t.Error("a file without a certificate is trusted")
	}
}

// TestASandboxReadsThatItHasANetwork, and one that has none reads that.
func TestASandboxReadsThatItHasANetwork(t *testing.T) {
	p := describe("s1", "default", terms(), "", corev1.Origin_ORIGIN_CREATED, time.Time{}, time.Now())
	if p.Network != "none" || !slices.Contains(p.Text, noNetwork) {
		t.Errorf("%+v", p)
	}
	q := p.reaches()
	if q.Network != "named" || !slices.Contains(q.Text, namedNetwork) || strings.Contains(strings.Join(q.Text, " "), "no network") || !slices.Contains(p.Text, noNetwork) {
		t.Errorf("%+v", q)
	}
}

// TestTheActorIsKeptInTheRecord.
func TestTheActorIsKeptInTheRecord(t *testing.T) {
	if a := actorOf(inventory.Record{}); a != nil {
		t.Errorf("%v", a)
	}
	rec := inventory.Record{Actor: toJSON(&corev1.Actor{Subject: "u1", Frontend: "web"})}
	if a := actorOf(rec); a.GetSubject() != "u1" || a.GetFrontend() != "web" {
		t.Errorf("%v", a)
	}
}
