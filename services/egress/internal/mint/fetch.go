package mint

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

const (
	fetchWait = 10 * time.Second
	firstWait = 200 * time.Millisecond
	// Nothing can be opened without an authority; with one there is time.
	maxWaitNone = 5 * time.Second
	maxWait     = time.Minute
	maxRoots    = 8
)

// keep fetches an authority and renews it until ctx ends.
func (a *Authority) keep(ctx context.Context, fetch Fetch) {
	pause := firstWait
	for {
		next, err := a.fetch(ctx, fetch)
		wait := pause
		if err != nil {
			pause = min(2*pause, a.longest())
		} else {
			pause, wait = firstWait, a.halfLife(next)
		}
		a.take(next, err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// take puts a new authority in force.
func (a *Authority) take(next *issuer, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tell(a.fault, err, next)
	a.fault = err
	if err != nil {
		return
	}
	if a.cur == nil {
		defer close(a.ready)
	}
	a.cur = next
}

// tell logs how the fetching is when that changes. The lock is held.
func (a *Authority) tell(was, err error, next *issuer) {
	switch {
	case err == nil && (was != nil || a.cur == nil):
		a.log.Info("the gate has an authority to open TLS with", "until", next.cert.NotAfter.UTC())
	case err == nil || was != nil && was.Error() == err.Error():
	case a.cur == nil:
		a.log.Warn("the gate has no authority: what a rule has opened is refused", "error", err)
	default:
		a.log.Warn("the gate's authority is not renewed", "until", a.cur.cert.NotAfter.UTC(), "error", err)
	}
}

func (a *Authority) longest() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cur == nil || !a.now().Before(a.cur.cert.NotAfter) {
		return maxWaitNone
	}
	return maxWait
}

// halfLife is the time until half of an authority's life is over.
func (a *Authority) halfLife(i *issuer) time.Duration {
	life := i.cert.NotAfter.Sub(i.cert.NotBefore)
	return max(i.cert.NotBefore.Add(life/2).Sub(a.now()), firstWait)
}

func (a *Authority) fetch(ctx context.Context, fetch Fetch) (*issuer, error) {
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, fetchWait)
	defer cancel()
	der, roots, err := fetch(ctx, public)
	if err != nil {
		return nil, fmt.Errorf("fetch an authority: %w", err)
	}
	out, err := checked(key, der, roots, a.now())
	if err != nil {
		return nil, fmt.Errorf("fetch an authority: %w", err)
	}
	return out, nil
}

// checked is the authority if it is one for key, below one of the roots, valid now, and issues no other.
func checked(key *ecdsa.PrivateKey, der []byte, roots [][]byte, now time.Time) (*issuer, error) {
	if len(roots) == 0 || len(roots) > maxRoots {
		return nil, fmt.Errorf("it came with %d roots", len(roots))
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, errors.New("the certificate cannot be read")
	}
	pool, all := x509.NewCertPool(), []*x509.Certificate(nil)
	for _, r := range roots {
		root, err := x509.ParseCertificate(r)
		if err != nil || !root.IsCA {
			return nil, errors.New("a root cannot be read, or is none")
		}
		pool.AddCert(root)
		all = append(all, root)
	}
	switch public, ok := cert.PublicKey.(*ecdsa.PublicKey); {
	case !ok || !public.Equal(&key.PublicKey):
		return nil, errors.New("the certificate is for another key")
	case !cert.IsCA || cert.KeyUsage != x509.KeyUsageCertSign:
		return nil, errors.New("the certificate is for no authority, or for more than that")
	case cert.MaxPathLen != 0 || !cert.MaxPathLenZero:
		return nil, errors.New("the authority could issue others")
	}
	_, err = cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	if err != nil {
		return nil, fmt.Errorf("the certificate is not good: %w", err)
	}
	return &issuer{key: key, cert: cert, roots: inPEM(all)}, nil
}
