package hostagent

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/pavlo-v-chernykh/keystore-go/v4"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// Files of the run folder of a sandbox with a network.
const (
	resolvFile = "resolv.conf"
	trustFile  = "trust.pem"
	javaFile   = "trust.jks"
	noticeFile = "egress.json" // the gate's words; replaced by renaming
)

// sharedFiles are one file per host each, of which every run folder has a hard link.
var sharedFiles = []string{resolvFile, trustFile, javaFile}

// netOver says what of them lies over the files of an image. What an image lacks stays missing.
var netOver = []driver.Over{
	{From: resolvFile, To: "/etc/resolv.conf"},
	{From: trustFile, To: "/etc/ssl/certs/ca-certificates.crt"},
	{From: trustFile, To: "/etc/ssl/cert.pem"},
	{From: trustFile, To: "/etc/pki/tls/certs/ca-bundle.crt"},
	{From: javaFile, To: "/etc/ssl/certs/java/cacerts"},
}

// trustVariables tell programs that bring roots of their own which ones to trust.
var trustVariables = []string{
	"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE", "PIP_CERT", "AWS_CA_BUNDLE",
}

// netEnv is what each exec of a sandbox with a network gets.
func netEnv() (out []string) {
	for _, name := range trustVariables {
		out = append(out, name+"=/run/berth/"+trustFile)
	}
	return out
}

// systemRoots is where this machine's own roots may be.
var systemRoots = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"}

// netFiles are the files that all sandboxes of a host have in common.
type netFiles struct {
	dir   string
	extra []string // PEM files

	mu    sync.Mutex
	roots []byte // of the cell
}

// rootsFile keeps the cell's roots for the next process.
const rootsFile = "roots.pem"

// javaPassword opens a Java key store without secrets, by long custom.
var javaPassword = []byte("changeit")

func openNetFiles(dir string, extra []string, log *slog.Logger) (*netFiles, error) {
	const op = "open the files of networks"
	f := &netFiles{dir: dir, extra: extra}
	if err := makeRunFolder(dir); err != nil {
		return nil, errs.E(op, errkind.Internal, dir, err)
	}
	roots, err := os.ReadFile(filepath.Join(dir, rootsFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errs.E(op, errkind.Internal, dir, err)
	}
	f.roots = roots
	resolv := fmt.Sprintf("nameserver %s\nnameserver %s\n", network.Gateway4, network.Gateway6)
	if err := errors.Join(writeInPlace(filepath.Join(dir, resolvFile), []byte(resolv)), f.write()); err != nil {
		return nil, errs.E(op, errkind.Internal, dir, err)
	}
	if _, known := machineRoots(); !known {
		log.Warn("this machine has no roots of its own: sandboxes trust the cell's alone, besides those of their image")
	}
	return f, nil
}

// machineRoots are the certificates that this machine trusts.
func machineRoots() (out []byte, known bool) {
	for _, path := range systemRoots {
		if b, err := os.ReadFile(path); err == nil && len(b) > 0 {
			return b, true
		}
	}
	return nil, false
}

// trustAlso has sandboxes trust these roots of the cell from now on, also those that are there.
func (f *netFiles) trustAlso(roots []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(roots) == 0 || bytes.Equal(roots, f.roots) {
		return nil
	}
	if len(certificates(roots)) == 0 {
		return errs.E("trust the cell's roots", errkind.Invalid, "", "there is no certificate in them")
	}
	if err := writeInPlace(filepath.Join(f.dir, rootsFile), roots); err != nil {
		return err
	}
	f.roots = roots
	return f.write()
}

// write writes what is trusted. mu is held, or nobody else is there.
func (f *netFiles) write() error {
	all, _ := machineRoots()
	parts := [][]byte{all, f.roots}
	for _, path := range f.extra {
		b, err := os.ReadFile(path)
		if err == nil && len(certificates(b)) == 0 {
			err = errors.New("there is no certificate in it")
		}
		if err != nil {
			return fmt.Errorf("trust %s: %w", path, err)
		}
		parts = append(parts, b)
	}
	var text bytes.Buffer
	for _, p := range parts {
		if len(p) > 0 {
			text.Write(bytes.TrimRight(p, "\n"))
			text.WriteByte('\n')
		}
	}
	store, err := javaStore(certificates(text.Bytes()))
	if err != nil {
		return err
	}
	return errors.Join(writeInPlace(filepath.Join(f.dir, trustFile), text.Bytes()), writeInPlace(filepath.Join(f.dir, javaFile), store))
}

// certificates are those of a PEM text, as they are.
func certificates(text []byte) (out [][]byte) {
	for {
		var b *pem.Block
		if b, text = pem.Decode(text); b == nil {
			return out
		}
		if b.Type == "CERTIFICATE" {
			out = append(out, b.Bytes)
		}
	}
}

// javaStore is a Java key store that trusts certificates. The same ones give the same store.
func javaStore(all [][]byte) ([]byte, error) {
	ks := keystore.New(keystore.WithOrderedAliases())
	for i, c := range all {
		e := keystore.TrustedCertificateEntry{CreationTime: time.Unix(0, 0), Certificate: keystore.Certificate{Type: "X509", Content: c}}
		if err := ks.SetTrustedCertificateEntry(fmt.Sprintf("root-%04d", i), e); err != nil {
			return nil, fmt.Errorf("make a Java key store: %w", err)
		}
	}
	var out bytes.Buffer
	if err := ks.Store(&out, javaPassword); err != nil {
		return nil, fmt.Errorf("make a Java key store: %w", err)
	}
	return out.Bytes(), nil
}

// writeInPlace gives a file another content in its place: whoever has it, under whatever name, has the new one.
func writeInPlace(path string, content []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, f.Truncate(int64(len(content))), f.Chmod(0o644), f.Close())
}

// furnish puts into a run folder what a sandbox with a network finds there. What the gate said is kept.
func (f *netFiles) furnish(dir string) error {
	if err := makeRunFolder(dir); err != nil {
		return err
	}
	for _, name := range sharedFiles {
		from, to := filepath.Join(f.dir, name), filepath.Join(dir, name)
		err := os.Link(from, to)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil { // another file system: it has the roots of now
			err = copyFile(from, to)
		}
		if err != nil {
			return fmt.Errorf("furnish the run folder: %w", err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, noticeFile)); err == nil {
		return nil
	}
	return writeInto(dir, noticeFile, closedNotice("Nothing leaves this sandbox yet: its host's gate has not said what may."))
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Chmod(0o644), out.Close())
}

// closedNotice is what a sandbox reads that has no way out.
func closedNotice(why string) []byte {
	b, err := json.Marshal(map[string]string{"closed": why})
	if err != nil {
		return []byte("{}") // cannot happen: it is text
	}
	return append(b, '\n')
}
