package credentials

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/errkind"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials/internal/platform"
	"github.com/berth-dev/berth/services/credentials/internal/vault"
)

// vault opens the bucket of secrets with the world's key file.
func (s *secrets) vault(t *testing.T) *vault.Vault {
	t.Helper()
	key, err := platform.Open(t.Context(), "", filepath.Join(s.dir, "credentials-platform.json"))
	if err != nil {
		t.Fatal(err)
	}
	v, err := vault.Open(t.Context(), bustest.Connect(t, s.bus, subjects.Service("credentials")), "BERTH_SECRETS", key)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func gateKey(t *testing.T) (*ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	return key, der
}

func (s *secrets) ca(t *testing.T, gate *bus.Conn) (*x509.Certificate, [][]byte) {
	t.Helper()
	key, der := gateKey(t)
	reply, err := call[*credentialsv1.EgressCAReply](t, gate, "egress_ca", &credentialsv1.EgressCARequest{PublicKey: der})
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(reply.GetCertificate())
	if err != nil {
		t.Fatal(err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		t.Error("it is for another key")
	}
	return cert, reply.GetRoots()
}

func TestGatesGetAnAuthorityBelowTheOneRoot(t *testing.T) {
	s := newSecrets(t, "")
	one, roots := s.ca(t, s.gate)
	two, again := s.ca(t, s.other)
	if len(roots) != 1 || len(again) != 1 || !bytes.Equal(roots[0], again[0]) {
		t.Fatalf("%d and %d roots, or two that differ", len(roots), len(again))
	}
	s.stop()
	s.run(t)
	_, later := s.ca(t, s.gate)
	if !bytes.Equal(later[0], roots[0]) {
		t.Error("a restart made another root")
	}
	root, err := x509.ParseCertificate(roots[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*x509.Certificate{one, two} {
		if err := c.CheckSignatureFrom(root); err != nil {
			t.Error(err)
		}
		if !c.IsCA || !c.MaxPathLenZero || c.MaxPathLen != 0 || c.NotAfter.Sub(time.Now()) > 7*24*time.Hour {
			t.Errorf("%+v", c)
		}
	}
	if one.Subject.CommonName == two.Subject.CommonName {
		t.Error("two hosts have one name")
	}
}

func TestReplicasAgreeOnTheFirstRoot(t *testing.T) {
	s := newSecrets(t, "")
	var (
		mu   sync.Mutex
		seen = map[string]bool{}
		wg   sync.WaitGroup
	)
	for range 6 {
		r := rootStore{vault: s.vault(t)}
		wg.Go(func() {
			all, err := r.roots(t.Context(), time.Now())
			if err != nil || len(all) != 1 {
				t.Error(len(all), err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			seen[string(all[0].Cert.Raw)] = true
		})
	}
	wg.Wait()
	if len(seen) != 1 {
		t.Errorf("%d roots", len(seen))
	}
	_, roots := s.ca(t, s.gate)
	if !seen[string(roots[0])] {
		t.Error("the service has another one")
	}
}

// The next root is told with the first one before it signs, and a number that was destroyed is not used again.
func TestASecondRootIsCarriedBesideTheFirst(t *testing.T) {
	s := newSecrets(t, "")
	v := s.vault(t)
	r := rootStore{vault: v}
	first, err := r.roots(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	late := first[0].Cert.NotAfter.Add(-200 * 24 * time.Hour)
	for range 2 {
		all, err := r.roots(t.Context(), late)
		if err != nil || len(all) != 2 || !all[0].Cert.Equal(first[0].Cert) || !all[1].From.After(late) {
			t.Fatalf("%v, %v", all, err)
		}
	}
	_, roots := s.ca(t, s.gate)
	if len(roots) != 2 || !bytes.Equal(roots[0], first[0].Cert.Raw) {
		t.Errorf("%d roots, or the one that signs is not the first", len(roots))
	}
	for _, name := range []string{"root.1", "root.2"} {
		if err := v.Destroy(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	all, err := r.roots(t.Context(), time.Now())
	if err != nil || len(all) != 1 || all[0].String() != "Berth egress root 3" {
		t.Errorf("%v, %v", all, err)
	}
}

func TestTheRootsPrivateKeyIsNeverInTheClear(t *testing.T) {
	s := newSecrets(t, "")
	_, roots := s.ca(t, s.gate)
	r := rootStore{vault: s.vault(t)}
	all, err := r.roots(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	raw, err := all[0].Encode()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(all[0].Cert.Raw, roots[0]) || found(t, s.store, raw[len(raw)/2:]) || found(t, s.store, raw[:len(raw)/2]) {
		t.Error("it is in a file of the bus")
	}
}

func TestNobodyButAGateGetsAnAuthority(t *testing.T) {
	s := newSecrets(t, "")
	_, der := gateKey(t)
	for _, c := range []*bus.Conn{s.host, s.op, s.identity} {
		_, err := call[*credentialsv1.EgressCAReply](t, c, "egress_ca", &credentialsv1.EgressCARequest{PublicKey: der})
		wantKind(t, err, errkind.Denied)
	}
	_, err := call[*credentialsv1.EgressCAReply](t, s.gate, "egress_ca", &credentialsv1.EgressCARequest{PublicKey: []byte("key")})
	wantKind(t, err, errkind.Invalid)
}
