package certs

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// maxPEM bounds what is read of a file of certificates.
const maxPEM = 1 << 20

// Files is a Source of PEM files, which are looked at again at every use.
type Files struct {
	cert, key, ca string
	log           *slog.Logger

	mu    sync.Mutex
	seen  [3]stamp
	pair  *tls.Certificate
	roots *x509.CertPool
	said  string
}

// OpenFiles reads a certificate with its chain, its key, which may be in the
// same file, and the roots. Without cert and key nothing is shown; without ca
// nobody is trusted but by the roots of the machine.
func OpenFiles(cert, key, ca string, log *slog.Logger) (*Files, error) {
	if log == nil {
		log = slog.Default()
	}
	f := &Files{cert: cert, key: key, ca: ca, log: log}
	if (cert == "") != (key == "") {
		return nil, errs.E("read certificates", errkind.Invalid, "", "a certificate and its key are needed, or neither")
	}
	seen, err := f.stamps()
	if err == nil {
		err = f.load(seen)
	}
	if err != nil {
		return nil, errs.E("read certificates", errkind.Invalid, "", err)
	}
	return f, nil
}

// Certificate implements Source.
func (f *Files) Certificate() (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refresh()
	return f.pair, nil
}

// Roots implements Source.
func (f *Files) Roots() (*x509.CertPool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refresh()
	return f.roots, nil
}

// refresh reads files that changed. What cannot be read yet is tried again at
// the next use, and what was read before stays in use.
func (f *Files) refresh() {
	seen, err := f.stamps()
	if err == nil && seen == f.seen {
		return
	}
	if err == nil {
		err = f.load(seen)
	}
	if err == nil {
		f.said = ""
		f.log.Info("certificates were read again", "cert", f.cert, "ca", f.ca)
		return
	}
	if text := err.Error(); text != f.said {
		f.said = text
		f.log.Warn("changed certificates cannot be read, and those of before stay in use", "error", err)
	}
}

func (f *Files) load(seen [3]stamp) error {
	var pair *tls.Certificate
	var roots *x509.CertPool
	if f.cert != "" {
		cert, err := readPEM(f.cert)
		if err != nil {
			return err
		}
		key, err := readPEM(f.key)
		if err != nil {
			return err
		}
		if pair, err = Pair(cert, key); err != nil {
			return fmt.Errorf("%s: %w", f.cert, err)
		}
	}
	if f.ca != "" {
		raw, err := readPEM(f.ca)
		if err != nil {
			return err
		}
		if roots, err = Pool(raw); err != nil {
			return fmt.Errorf("%s: %w", f.ca, err)
		}
	}
	f.seen, f.pair, f.roots = seen, pair, roots
	return nil
}

// Pair reads a certificate with its chain and its key.
func Pair(cert, key []byte) (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("it holds no certificate with its key: %w", err)
	}
	if pair.Leaf == nil {
		if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
			return nil, fmt.Errorf("it holds no certificate: %w", err)
		}
	}
	return &pair, nil
}

// Pool reads roots.
func Pool(pem []byte) (*x509.CertPool, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errors.New("it holds no certificate")
	}
	return roots, nil
}

// stamp tells one content of a file from another.
type stamp struct {
	at   time.Time
	size int64
	node uint64
}

func (f *Files) stamps() (out [3]stamp, err error) {
	for i, path := range []string{f.cert, f.key, f.ca} {
		if path == "" {
			continue
		}
		if out[i], err = stampOf(path); err != nil {
			return out, err
		}
	}
	return out, nil
}

func readPEM(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var out bytes.Buffer
	if _, err := out.ReadFrom(&limited{file, maxPEM}); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return out.Bytes(), nil
}

type limited struct {
	f    *os.File
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, fmt.Errorf("it is larger than %d bytes", maxPEM)
	}
	n, err := l.f.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}
