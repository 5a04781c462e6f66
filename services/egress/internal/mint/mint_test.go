package mint

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/services/egress/authority"
)

// cell is the root of a cell, which signs what it is asked to.
type cell struct {
	key   *ecdsa.PrivateKey
	root  *x509.Certificate
	asked atomic.Int64
	down  atomic.Bool
	// change alters what would be issued.
	change func(*x509.Certificate)
}

const week = 7 * 24 * time.Hour

func newCell(t testing.TB) *cell {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	tmpl := &x509.Certificate{Subject: pkix.Name{CommonName: "root"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(1000 * week),
		IsCA: true, BasicConstraintsValid: true, MaxPathLen: 1, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	root, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &cell{key: key, root: root}
}

func (c *cell) fetch(_ context.Context, public []byte) ([]byte, [][]byte, error) {
	c.asked.Add(1)
	if c.down.Load() {
		return nil, nil, errors.New("credentials is away")
	}
	pub, err := x509.ParsePKIXPublicKey(public)
	if err != nil {
		return nil, nil, err
	}
	now := time.Now()
	tmpl := &x509.Certificate{Subject: pkix.Name{CommonName: "h1"}, NotBefore: now.Add(-time.Minute), NotAfter: now.Add(week),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, PublicKey: pub}
	if c.change != nil {
		c.change(tmpl)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, c.root, tmpl.PublicKey, c.key)
	return der, [][]byte{c.root.Raw}, err
}

// ready starts an authority below a new root and waits for it.
func ready(t testing.TB) (*cell, *Authority) {
	t.Helper()
	c := newCell(t)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	a := New(ctx, c.fetch, time.Now, slog.New(slog.DiscardHandler))
	<-a.Ready()
	return c, a
}

func (a *Authority) current() *issuer {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.cur
}

func (c *cell) verify(cert *tls.Certificate, host string, at time.Time) error {
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(c.root)
	for _, der := range cert.Certificate[1:] {
		i, err := x509.ParseCertificate(der)
		if err != nil {
			return err
		}
		between.AddCert(i)
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		return err
	}
	_, err = leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: roots, Intermediates: between, CurrentTime: at,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	return err
}

func TestALeafIsForItsNameAloneAndForADay(t *testing.T) {
	c, a := ready(t)
	long := authority.Name(strings.Repeat(strings.Repeat("a", 40)+".", 5) + "example.com")
	for _, name := range []authority.Name{"api.example.com", "xn--bcher-kva.example", long} {
		cert, err := a.Leaf(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.verify(cert, string(name), time.Now()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, other := range []string{"example.com", "x." + string(name), "evil.test", "127.0.0.1", "apiXexample.com"} {
			if c.verify(cert, other, time.Now()) == nil {
				t.Errorf("the certificate of %s is good for %s", name, other)
			}
		}
		l := cert.Leaf
		if len(l.DNSNames) != 1 || l.DNSNames[0] != string(name) || len(l.IPAddresses)+len(l.URIs)+len(l.EmailAddresses) > 0 {
			t.Errorf("it names %v", l.DNSNames)
		}
		if life := l.NotAfter.Sub(l.NotBefore); life > 24*time.Hour {
			t.Errorf("it lives for %s", life)
		}
		if l.IsCA || l.KeyUsage != x509.KeyUsageDigitalSignature {
			t.Errorf("CA %v, usage %v", l.IsCA, l.KeyUsage)
		}
	}
	for _, name := range []authority.Name{"", "*.example.com", "a b.example"} {
		if _, err := a.Leaf(name); err == nil {
			t.Errorf("a certificate for %q", name)
		}
	}
}

// What a gate could issue below its own authority is good nowhere.
func TestNoAuthorityCanBeIssuedBelow(t *testing.T) {
	c, a := ready(t)
	by := a.current()
	key, err := newKey()
	if err != nil {
		t.Fatal(err)
	}
	sub := &x509.Certificate{Subject: pkix.Name{CommonName: "sub"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	subDER, err := x509.CreateCertificate(rand.Reader, sub, by.cert, &key.PublicKey, by.key)
	if err != nil {
		t.Fatal(err)
	}
	if sub, err = x509.ParseCertificate(subDER); err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{NotBefore: sub.NotBefore, NotAfter: sub.NotAfter, DNSNames: []string{"bank.example"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, leaf, sub, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.verify(&tls.Certificate{Certificate: [][]byte{der, subDER, by.cert.Raw}}, "bank.example", time.Now()); err == nil {
		t.Error("a certificate of an authority below the gate's is good")
	}
}

func TestAnAuthorityThatIsNoneOrMoreIsRefused(t *testing.T) {
	other, err := newKey()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*x509.Certificate){
		"it could issue others":     func(c *x509.Certificate) { c.MaxPathLenZero, c.MaxPathLen = false, 1 },
		"without a bound":           func(c *x509.Certificate) { c.MaxPathLenZero, c.MaxPathLen = false, -1 },
		"no authority":              func(c *x509.Certificate) { c.IsCA, c.MaxPathLenZero = false, false },
		"it may sign anything":      func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageDigitalSignature },
		"for another key":           func(c *x509.Certificate) { c.PublicKey = &other.PublicKey },
		"expired":                   func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) },
		"for clients, not servers":  func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} },
		"it begins in a week, only": func(c *x509.Certificate) { c.NotBefore = time.Now().Add(week / 2) },
	} {
		c := newCell(t)
		c.change = change
		a := &Authority{now: time.Now}
		if _, err := a.fetch(t.Context(), c.fetch); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	mine, foreign := newCell(t), newCell(t)
	a := &Authority{now: time.Now}
	if _, err := a.fetch(t.Context(), func(ctx context.Context, public []byte) ([]byte, [][]byte, error) {
		der, _, err := mine.fetch(ctx, public)
		return der, [][]byte{foreign.root.Raw}, err
	}); err == nil {
		t.Error("signed by none of the roots: taken")
	}
}

func TestWithoutAnAuthorityNothingIsOpened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCell(t)
		c.down.Store(true)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var said bytes.Buffer
		a := New(ctx, c.fetch, time.Now, slog.New(slog.NewTextHandler(&said, nil)))
		synctest.Wait()
		if _, err := a.Leaf("api.example.com"); err == nil || a.Roots() != nil || a.Err() == nil {
			t.Error("a certificate without an authority", err)
		}
		time.Sleep(time.Minute)
		if n := c.asked.Load(); n < 12 || n > 30 {
			t.Errorf("asked %d times in a minute", n)
		}
		synctest.Wait()
		if n := strings.Count(said.String(), "level=WARN"); n != 1 || !strings.Contains(said.String(), "credentials is away") || a.Left() != 0 {
			t.Errorf("a gate without an authority for %s says:\n%s", a.Left(), said.String())
		}
		c.down.Store(false)
		<-a.Ready()
		if _, err := a.Leaf("api.example.com"); err != nil || len(a.Roots()) == 0 || a.Err() != nil {
			t.Error(err, a.Err())
		}
		if strings.Count(said.String(), "level=INFO") != 1 || a.Left() < week-time.Minute {
			t.Errorf("%s left; it says:\n%s", a.Left(), said.String())
		}
	})
}

// Renewal is at half of the life; while it fails the old one serves to its end and not a moment longer.
func TestAnExpiredAuthorityRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCell(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		a := New(ctx, c.fetch, time.Now, slog.New(slog.DiscardHandler))
		<-a.Ready()
		first := a.current()
		time.Sleep(week/2 + time.Minute)
		synctest.Wait()
		if now := a.current(); now == first || now.key.Equal(first.key) || c.asked.Load() != 2 {
			t.Errorf("not renewed at half of its life, asked %d times", c.asked.Load())
		}
		c.down.Store(true)
		time.Sleep(time.Until(a.current().cert.NotAfter) - time.Minute)
		cert, err := a.Leaf("api.example.com")
		if err != nil || c.verify(cert, "api.example.com", time.Now()) != nil {
			t.Error("refused before its end", err)
		}
		if cert.Leaf.NotAfter.After(a.current().cert.NotAfter) {
			t.Error("a leaf outlives its authority")
		}
		time.Sleep(2 * time.Minute)
		if _, err := a.Leaf("api.example.com"); err == nil || a.Err() == nil {
			t.Error("an expired authority issues")
		}
		c.down.Store(false)
		time.Sleep(2 * time.Minute)
		if _, err := a.Leaf("api.example.com"); err != nil {
			t.Error("not repaired", err)
		}
	})
}

func TestALeafIsMadeOnceAndAgainBeforeItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCell(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		a := New(ctx, c.fetch, time.Now, slog.New(slog.DiscardHandler))
		<-a.Ready()
		leaf := func() *tls.Certificate {
			cert, err := a.Leaf("api.example.com")
			if err != nil {
				t.Fatal(err)
			}
			return cert
		}
		first := leaf()
		time.Sleep(11 * time.Hour)
		if leaf() != first {
			t.Error("made again though it was good")
		}
		time.Sleep(time.Hour)
		second := leaf()
		if second == first || second.PrivateKey != first.PrivateKey {
			t.Error("not made again, or with another key")
		}
		time.Sleep(13 * time.Hour)
		if third := leaf(); third.PrivateKey == first.PrivateKey {
			t.Error("a key that is older than a day")
		}
	})
}

func TestAThousandNamesAtOnce(t *testing.T) {
	c, a := ready(t)
	var wg sync.WaitGroup
	got := make([][4]*tls.Certificate, 1000)
	for i := range got {
		for j := range got[i] {
			wg.Go(func() {
				cert, err := a.Leaf(authority.Name(fmt.Sprintf("n%d.example.com", i)))
				if err != nil {
					t.Error(err)
				}
				got[i][j] = cert
			})
		}
	}
	wg.Wait()
	for i := range got {
		for _, cert := range got[i] {
			if cert != got[i][0] {
				t.Fatalf("name %d has two certificates", i)
			}
		}
		if err := c.verify(got[i][0], fmt.Sprintf("n%d.example.com", i), time.Now()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestMemoryIsBoundedAndErrorsAreNotRemembered(t *testing.T) {
	l := newLeaves(3)
	now := time.Now()
	made := func() (*tls.Certificate, error) {
		return &tls.Certificate{Leaf: &x509.Certificate{NotBefore: now, NotAfter: now.Add(24 * time.Hour)}}, nil
	}
	if _, err := l.get("a", now, func() (*tls.Certificate, error) { return nil, errors.New("no") }); err == nil || l.count() != 0 {
		t.Error(err, l.count())
	}
	a, _ := l.get("a", now, made)
	for _, n := range []authority.Name{"b", "c", "a", "d", "e"} {
		if _, err := l.get(n, now, made); err != nil {
			t.Fatal(err)
		}
	}
	if again, _ := l.get("a", now, made); again != a || l.count() != 3 {
		t.Errorf("the one that was used went, or %d are kept", l.count())
	}
}

// A real client accepts what a gate presents.
func TestAHandshake(t *testing.T) {
	_, a := ready(t)
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(a.Roots()) {
		t.Fatal("no roots")
	}
	for name, want := range map[string]bool{"api.example.com": true, "other.example.com": false} {
		client, server := net.Pipe()
		go func() {
			defer server.Close()
			_ = tls.Server(server, &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
				return a.Leaf("api.example.com")
			}}).Handshake()
		}()
		err := tls.Client(client, &tls.Config{RootCAs: pool, ServerName: name}).Handshake()
		client.Close()
		if (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func BenchmarkLeafNew(b *testing.B) {
	_, a := ready(b)
	n := 0
	for b.Loop() {
		n++
		if _, err := a.Leaf(authority.Name(fmt.Sprintf("n%d.example.com", n))); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLeafKnown(b *testing.B) {
	_, a := ready(b)
	for b.Loop() {
		if _, err := a.Leaf("api.example.com"); err != nil {
			b.Fatal(err)
		}
	}
}
