package hostagent

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
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

// sharedFiles are the same on all of a host. Every run folder has a copy of its own: sandboxes that have one file
// in common can talk by its locks, and see when the other reads it.
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

// netFiles are the files that are the same for all sandboxes of a host.
type netFiles struct {
	dir   string
	runs  string   // the folder of all run folders
	extra []string // PEM files

	mu    sync.Mutex // also of what lies in run folders
	roots []byte     // of the cell
}

// rootsFile keeps the cell's roots for the next process.
const rootsFile = "roots.pem"

// javaPassword opens a Java key store without secrets, by long custom.
var javaPassword = []byte("changeit")

func openNetFiles(dir, runs string, extra []string, log *slog.Logger) (*netFiles, error) {
	const op = "open the files of networks"
	f := &netFiles{dir: dir, runs: runs, extra: extra}
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
	old := f.roots
	f.roots = roots
	if err := f.write(); err != nil {
		f.roots = old // it is tried again when they are told again
		return err
	}
	return nil
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
	if err := errors.Join(writeInPlace(filepath.Join(f.dir, trustFile), text.Bytes()), writeInPlace(filepath.Join(f.dir, javaFile), store)); err != nil {
		return err
	}
	return f.spread()
}

// spread gives the sandboxes that are there the files as they are now; mu is held, or nobody else is there. A
// file that is bound over another is not seen under a new name, so it is written in its place.
func (f *netFiles) spread() error {
	dirs, err := os.ReadDir(f.runs)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var failed []error
	for _, name := range sharedFiles {
		content, err := os.ReadFile(filepath.Join(f.dir, name))
		if err != nil {
			return err
		}
		for _, d := range dirs {
			path := filepath.Join(f.runs, d.Name(), name)
			if _, err := os.Lstat(path); err != nil {
				continue // it has no network, or is gone
			}
			if err := writeInPlaceOf(path, content); err != nil && !errors.Is(err, fs.ErrNotExist) {
				failed = append(failed, err)
			}
		}
	}
	return errors.Join(failed...)
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
func writeInPlace(path string, content []byte) error { return writeFile(path, content, os.O_CREATE) }

// writeInPlaceOf is writeInPlace of a file that is there.
func writeInPlaceOf(path string, content []byte) error { return writeFile(path, content, 0) }

func writeFile(path string, content []byte, flags int) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|flags, 0o644)
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
	if err := f.copyInto(dir); err != nil {
		return fmt.Errorf("furnish the run folder: %w", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, noticeFile)); err == nil {
		return nil
	}
	return writeInto(dir, noticeFile, closedNotice("Nothing leaves this sandbox yet: its host's gate has not said what may."))
}

// copyInto copies what is the same for all.
func (f *netFiles) copyInto(dir string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range sharedFiles {
		content, err := os.ReadFile(filepath.Join(f.dir, name))
		if err == nil {
			err = writeInPlace(filepath.Join(dir, name), content)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// closedNotice is what a sandbox reads that has no way out.
func closedNotice(why string) []byte {
	b, err := json.Marshal(map[string]string{"closed": why})
	if err != nil {
		return []byte("{}") // cannot happen: it is text
	}
	return append(b, '\n')
}
