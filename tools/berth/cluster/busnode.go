package cluster

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/schemas/subjects"
)

// BusNode is the configuration of one NATS server of a cluster. Everything that servers must agree on
// is in it, so that none measures or guesses anything by itself.
type BusNode struct {
	Dir   string `yaml:"dir"`   // logins are in keys and clients below it; every node shares them
	Store string `yaml:"store"` // the server's own files
	Name  string `yaml:"name"`
	Host  string `yaml:"host"`
	Port  int    `yaml:"port"`
	URL   string `yaml:"url"` // of every node, for client files
	// Callers are bus identities besides the services.
	Callers []string `yaml:"callers"`
	// Callout are the public keys by which identity is asked who else may log in.
	Callout  bus.CalloutConfig `yaml:"callout"`
	Replicas int               `yaml:"replicas"`
	// StoreBytes is what each replica of the store of disks may take; the catalogue's if that is less.
	StoreBytes int64 `yaml:"store_bytes"`
	// Routes are host:port of every node; with one node there are none.
	Routes    []string `yaml:"routes"`
	RoutePort int      `yaml:"route_port"`
	// For clients and for the other nodes; the files are read again when they change.
	TLSCert string `yaml:"tls_cert"`
	TLSKey  string `yaml:"tls_key"`
	TLSCA   string `yaml:"tls_ca"`
}

// formTime is what the servers get to find each other and to make what is declared.
const formTime = 2 * time.Minute

// Run serves until ctx ends; ready is called once streams and consumers are as declared.
func (n BusNode) Run(ctx context.Context, log *slog.Logger, ready func()) error {
	callers, err := n.callers()
	if err != nil {
		return err
	}
	decl := n.declaration()
	cfg := bus.EmbeddedConfig{Dir: n.Dir, Store: n.Store, Name: n.Name, Host: n.Host, Port: n.Port, URL: n.URL,
		Callers: callers, Callout: &n.Callout, Declaration: &decl, Log: log}
	src, err := certs.OpenFiles(n.TLSCert, n.TLSKey, n.TLSCA, log)
	if err != nil {
		return err
	}
	cfg.TLS = bus.ServerTLS(src)
	if len(n.Routes) > 0 {
		tls, err := bus.MutualTLSOf(src)
		if err != nil {
			return err
		}
		cfg.Cluster = &bus.ClusterConfig{Host: n.Host, Port: n.RoutePort, Routes: n.Routes, TLS: tls}
	}
	forming, cancel := context.WithTimeout(ctx, formTime)
	defer cancel()
	node, err := bus.StartEmbedded(forming, cfg)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped before there were enough
		}
		return err
	}
	defer node.Close()
	ready()
	<-ctx.Done()
	return nil
}

func (n BusNode) callers() (out []subjects.Caller, err error) {
	for _, name := range n.Callers {
		c, perr := subjects.ParseName(name)
		err = errors.Join(err, perr)
		out = append(out, c)
	}
	return out, err
}

func (n BusNode) declaration() bus.Declaration {
	d := bus.Declared(n.Replicas)
	d.ObjectStores = slices.Clone(d.ObjectStores)
	for i := range d.ObjectStores {
		d.ObjectStores[i].MaxBytes = min(d.ObjectStores[i].MaxBytes, n.StoreBytes)
	}
	return d
}

// everybody is who logs in to every bus.
func everybody() []subjects.Caller {
	out := []subjects.Caller{subjects.Keeper(), subjects.Operator(), subjects.Callout(), subjects.Warden()}
	for _, s := range subjects.Services {
		out = append(out, subjects.Service(s))
	}
	return out
}
