package bus

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats-server/v2/server"
)

// ClusterConfig makes a server one node of a cluster. Nodes know each other
// by certificates alone: whoever has none of the CA is refused.
type ClusterConfig struct {
	Name      string      // the same on every node; default "berth"
	Host      string      // where other nodes connect; default 127.0.0.1
	Port      int         // of Host
	Advertise string      // host:port that other nodes are told, if it is not Host and Port
	Routes    []string    // host:port of every node, its own included or not; not empty
	TLS       *tls.Config // see MutualTLS
}

// A node that does not answer, or whose link is cut, is given up after three
// to four seconds; a node that died at once, because its connections end.
const (
	routePing  = time.Second
	routePings = 3
	// clientPing finds clients that are paused or cut off, so that requests
	// are not handed to them: after 10 to 15 s.
	clientPing  = 5 * time.Second
	clientPings = 2
)

// MutualTLS has both sides of a connection between nodes show a certificate of
// the CA. The files are PEM and are looked at at every handshake. Where the
// node's own certificate has a SPIFFE ID, the other side's must be one of a
// server of the bus; else the other side's address must be among the names of
// its certificate, and a new CA needs a restart.
func MutualTLS(cert, key, ca string) (*tls.Config, error) {
	src, err := certs.OpenFiles(cert, key, ca, nil)
	if err != nil {
		return nil, fmt.Errorf("read certificate of the node: %w", err)
	}
	return MutualTLSOf(src)
}

// MutualTLSOf is MutualTLS with what a source gives.
func MutualTLSOf(src certs.Source) (*tls.Config, error) {
	own, err := src.Certificate()
	if err != nil || own == nil {
		return nil, fmt.Errorf("read certificate of the node: %w", cmp.Or(err, errors.New("there is none")))
	}
	if _, ok := certs.PeerOf(own.Leaf); ok {
		return certs.Mutual(src, certs.Only(certs.RoleBus, "")), nil
	}
	conf := certs.Mutual(src)
	conf.InsecureSkipVerify = false
	conf.RootCAs, err = src.Roots()
	return conf, err
}

func (c *ClusterConfig) validate(name string) error {
	switch {
	case name == "":
		return errors.New("a node of a cluster needs a name of its own")
	case c.Port <= 0:
		return errors.New("a node of a cluster needs a port for the other nodes")
	case !mutual(c.TLS):
		return errors.New("nodes of a cluster talk over mutual TLS only: a certificate, RootCAs, ClientCAs and RequireAndVerifyClientCert are needed")
	}
	if len(c.Routes) == 0 {
		return errors.New("a node of a cluster needs the routes to the nodes, its own included")
	}
	for _, r := range c.Routes {
		if _, _, err := net.SplitHostPort(r); err != nil {
			return fmt.Errorf("route %q is no host:port: %w", r, err)
		}
	}
	return nil
}

func mutual(c *tls.Config) bool {
	if c == nil || c.ClientAuth != tls.RequireAndVerifyClientCert {
		return false
	}
	return certs.Reloads(c) || c.ClientCAs != nil && c.RootCAs != nil && len(c.Certificates) > 0
}

// nodes is how many there are, this one included.
func (c *ClusterConfig) nodes() int {
	own := net.JoinHostPort(orDefault(c.Host, "127.0.0.1"), strconv.Itoa(c.Port))
	if slices.Contains(c.Routes, own) || c.Advertise != "" && slices.Contains(c.Routes, c.Advertise) {
		return len(c.Routes)
	}
	return len(c.Routes) + 1
}

// join puts the cluster into the server's options.
func (c *ClusterConfig) join(o *server.Options) {
	o.Cluster = server.ClusterOpts{
		Name: orDefault(c.Name, "berth"), Host: orDefault(c.Host, "127.0.0.1"), Port: c.Port, Advertise: c.Advertise,
		TLSConfig: c.TLS, TLSTimeout: 5, AuthTimeout: 6, PingInterval: routePing, MaxPingsOut: routePings,
	}
	for _, r := range c.Routes {
		o.Routes = append(o.Routes, &url.URL{Scheme: "nats-route", Host: r})
	}
	o.PingInterval, o.MaxPingsOut = clientPing, clientPings
}

// sameKind refuses files of a single server in a cluster and of a node in a
// single server: nats-server would take the streams in them for orphans, and
// delete them.
func sameKind(dir string, clustered bool) error {
	streams, err := os.ReadDir(filepath.Join(dir, "jetstream", "APP", "streams"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	_, err = os.Stat(filepath.Join(dir, "jetstream", "SYS", "_js_", "_meta_"))
	node := err == nil
	switch {
	case clustered && !node && len(streams) > 0:
		return errs.E("start bus server", errkind.Conflict, dir, "it holds streams of a single server, which a cluster would delete; give the node an empty folder")
	case !clustered && node:
		return errs.E("start bus server", errkind.Conflict, dir, "it holds streams of a node of a cluster, which a single server would not serve; give it an empty folder, or start it as that node")
	}
	return nil
}
