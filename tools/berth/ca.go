package main

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/berth-dev/berth/internal/certs"
)

// caCmd works with the certificate authority of a state folder, in <dir>/tls.
type caCmd struct {
	Init   caInitCmd   `cmd:"" help:"Make the authority, if there is none."`
	Issue  caIssueCmd  `cmd:"" help:"Issue a certificate with its key: docs/howto/certificates.md."`
	Show   caShowCmd   `cmd:"" help:"Show the trusted roots and the certificates in the state folder."`
	Rotate caRotateCmd `cmd:"" help:"Replace the root; certificates of the one before stay good until they end."`
}

// rootOut is one trusted root.
type rootOut struct {
	Name    string    `json:"name"`
	SHA256  string    `json:"sha256"`
	Ends    time.Time `json:"ends"`
	Signing bool      `json:"signing"`
}

// certOut is one certificate in the state folder.
type certOut struct {
	File    string    `json:"file"`
	ID      string    `json:"id"`
	Ends    time.Time `json:"ends"`
	Renewed time.Time `json:"renewed_after"`
}

type caOut struct {
	Bundle       string    `json:"bundle"`
	Roots        []rootOut `json:"roots"`
	Certificates []certOut `json:"certificates"`
}

func (a *app) clock() time.Time {
	if a.now != nil {
		return a.now()
	}
	return time.Now()
}

// authority opens the authority, which must be there.
func (a *app) authority() (*certs.CA, error) {
	dir := certs.Folder(a.dir)
	switch err := certs.Readable(dir); {
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("the certificate authority in %s cannot be read: %w", dir, fs.ErrPermission)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("there is no certificate authority in %s; berth up or berth ca init makes one", dir)
	}
	return certs.OpenCA(dir, a.clock())
}

type caInitCmd struct{}

func (c *caInitCmd) Run(a *app) error {
	ca, err := certs.OpenCA(certs.Folder(a.dir), a.clock())
	if err != nil {
		return err
	}
	return a.showCA(ca)
}

type caShowCmd struct{}

func (c *caShowCmd) Run(a *app) error {
	ca, err := a.authority()
	if err != nil {
		return err
	}
	return a.showCA(ca)
}

type caRotateCmd struct{}

func (c *caRotateCmd) Run(a *app) error {
	ca, err := a.authority()
	if err != nil {
		return err
	}
	if err := ca.Rotate(a.clock()); err != nil {
		return err
	}
	return a.showCA(ca)
}

type caIssueCmd struct {
	Role string   `arg:"" help:"nats, scheduler, service, host or gate." enum:"nats,scheduler,service,host,gate" placeholder:"ROLE"`
	Name string   `arg:"" help:"The server's, replica's, service's or host's own name; of a gate its host's." placeholder:"NAME"`
	Addr []string `help:"Host names and IP addresses where it is reached; for nats and scheduler." placeholder:"ADDR"`
	Out  string   `help:"File for the certificate, its chain and its key." required:"" type:"path" placeholder:"FILE"`

	Force bool `help:"Replace the file if it is there."`
}

func (c *caIssueCmd) Run(a *app) error {
	ca, err := a.authority()
	if err != nil {
		return err
	}
	l := certs.Leaf{Role: c.Role, Name: c.Name, ClientOnly: c.Role != certs.RoleBus && c.Role != certs.RoleScheduler}
	if l.ClientOnly && len(c.Addr) > 0 {
		return usage("the certificate of a %s names no address; leave --addr out", c.Role)
	}
	for _, s := range c.Addr {
		if ip, err := netip.ParseAddr(s); err == nil {
			l.IPs = append(l.IPs, ip)
		} else if len(s) > 0 && len(s) <= 253 {
			l.DNS = append(l.DNS, s)
		} else {
			return usage("%.80q is neither a host name nor an IP address", s)
		}
	}
	if filepath.Clean(c.Out) == ca.BundleFile() {
		return usage("%s holds the trusted roots; choose another file", c.Out)
	}
	if _, err := os.Lstat(c.Out); err == nil && !c.Force {
		return fmt.Errorf("%s is there already; --force replaces it", c.Out)
	}
	if err := ca.Keep(c.Out, l, a.clock()); err != nil {
		return err
	}
	out, err := certificateOf(c.Out)
	if err != nil {
		return err
	}
	return a.print(out, func() { fmt.Fprintf(a.stdout, "%s\t%s\tuntil %s\n", out.File, out.ID, day(out.Ends)) })
}

func day(t time.Time) string { return t.UTC().Format("2006-01-02 15:04") }

func certificateOf(path string) (certOut, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return certOut{}, err
	}
	pair, err := certs.Pair(raw, raw)
	if err != nil {
		return certOut{}, fmt.Errorf("%s: %w", path, err)
	}
	p, ok := certs.PeerOf(pair.Leaf)
	if !ok {
		return certOut{}, errors.New(path + " names nobody")
	}
	return certOut{path, p.URI().String(), pair.Leaf.NotAfter.UTC(), pair.Leaf.NotAfter.Add(-certs.LeafLife / 3).UTC()}, nil
}

func (a *app) showCA(ca *certs.CA) error {
	roots, err := ca.Roots(a.clock())
	if err != nil {
		return err
	}
	out := caOut{Bundle: ca.BundleFile(), Certificates: []certOut{}}
	for i, r := range roots {
		out.Roots = append(out.Roots, rootOut{r.Subject.CommonName, fingerprint(r), r.NotAfter.UTC(), i == 0})
	}
	files, _ := filepath.Glob(filepath.Join(filepath.Dir(ca.BundleFile()), "*.pem"))
	slices.Sort(files)
	for _, f := range files {
		if f == ca.BundleFile() {
			continue
		}
		if c, err := certificateOf(f); err == nil { // what is none is somebody's own
			out.Certificates = append(out.Certificates, c)
		}
	}
	return a.print(out, func() {
		fmt.Fprintf(a.stdout, "trusted roots, in %s:\n", out.Bundle)
		w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
		for _, r := range out.Roots {
			signs := ""
			if r.Signing {
				signs = "signs"
			}
			fmt.Fprintf(w, "  %s\t%s\tuntil %s\t%s\n", r.Name, r.SHA256, day(r.Ends), signs)
		}
		for _, c := range out.Certificates {
			fmt.Fprintf(w, "%s\t%s\tuntil %s\t\n", filepath.Base(c.File), c.ID, day(c.Ends))
		}
		_ = w.Flush() // to the same place
	})
}

func fingerprint(c *x509.Certificate) string {
	sum := sha256.Sum256(c.Raw)
	return hex.EncodeToString(sum[:])
}
