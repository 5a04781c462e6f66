package sdk

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/berth-dev/berth/schemas/subjects"
)

// Config says how to reach the bus and as whom. Either ClientFile, or URL,
// Name and Seed.
type Config struct {
	// ClientFile is the path of a [ClientFile]. Fields below that are set win.
	ClientFile string
	// URL of the bus: tls://host:port, or those of several nodes, separated by commas; when the one in
	// use is lost, the next is taken, and nodes that these name too.
	URL string
	// Name of the bus identity, "fe-<tenant>-<frontend>" or "operator".
	Name string
	// Seed is the identity's nkey seed ("SU...").
	Seed string
	// Tenant has, without a Seed, the user itself log in to the bus, with the tokens of User; no Name is
	// needed then. Such a connection acts for that user alone.
	Tenant string
	// CA is the roots, as PEM, that the bus's certificate is verified by; empty: the machine's own. The
	// connection is TLS 1.3, whatever the URL says.
	CA string
	// Cert, with its chain, and Key are shown to the bus, as PEM. Frontends and operators need none.
	Cert, Key string
	// User is the token source for calls that bring none of their own.
	User TokenSource
	// Timeout is how long one attempt of a request may take; default 10 s. A
	// call by either door goes on with further attempts under the same request
	// id until its context, or its own wait, ends: also when nobody answers,
	// which is so for a moment while a service is replaced.
	Timeout time.Duration
	// Reattach is how long a lost stream is tried again before its process's
	// exit is reported as unknown; default 60 s.
	Reattach time.Duration
	// NATS are further options of the connection.
	NATS []nats.Option

	transport string // the client file that CA, Cert and Key are of, which is read again at each reconnect
}

// ClientFile is what a program needs to log in to the bus, as JSON in a file
// of mode 0600. `berth up` writes one for every client into <dir>/clients.
type ClientFile struct {
	// URL of the bus; those of several nodes are separated by commas.
	URL   string `json:"url"`
	Name  string `json:"name"`
	Inbox string `json:"inbox_prefix"`
	Seed  string `json:"nkey_seed"`
	// CA is the roots that the bus's certificate is verified by, Cert and Key what is shown to it, as PEM.
	CA   string `json:"ca,omitempty"`
	Cert string `json:"cert,omitempty"`
	Key  string `json:"key,omitempty"`
}

// ReadClientFile reads and checks a client file.
func ReadClientFile(path string) (ClientFile, error) {
	const op = "read client file"
	var f ClientFile
	raw, err := os.ReadFile(path)
	if err != nil {
		return f, wrap(op, err)
	}
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return f, invalid(op, "%s is not a client file: %v", path, err)
	}
	if f.URL == "" || f.Name == "" || f.Seed == "" {
		return f, invalid(op, "%s must have url, name and nkey_seed", path)
	}
	return f, nil
}

// Write stores the file with mode 0600; a file that is there is replaced as a
// whole.
func (f ClientFile) Write(path string) error {
	const op = "write client file"
	raw, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return wrap(op, err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".client-*")
	if err != nil {
		return wrap(op, err)
	}
	defer os.Remove(tmp.Name())
	if _, err := tmp.Write(append(raw, '\n')); err != nil {
		tmp.Close()
		return wrap(op, err)
	}
	if err := tmp.Close(); err != nil {
		return wrap(op, err)
	}
	return wrap(op, os.Rename(tmp.Name(), path))
}

// TokenSource returns the user's token (a JWT of an issuer that the tenant
// registered). It is asked again for every request that needs one, so that it
// may refresh; it must be safe for concurrent use.
type TokenSource func(ctx context.Context) (string, error)

// Token is a TokenSource that always returns the same token.
func Token(jwt string) TokenSource {
	return func(context.Context) (string, error) { return jwt, nil }
}

func (c Config) resolve() (Config, subjects.Caller, error) {
	const op = "connect"
	var me subjects.Caller
	if c.ClientFile != "" {
		f, err := ReadClientFile(c.ClientFile)
		if err != nil {
			return c, me, err
		}
		c.URL, c.Name, c.Seed = or(c.URL, f.URL), or(c.Name, f.Name), or(c.Seed, f.Seed)
		if c.CA == "" && c.Cert == "" && c.Key == "" {
			c.CA, c.Cert, c.Key, c.transport = f.CA, f.Cert, f.Key, c.ClientFile
		}
	}
	if c.URL != "" && c.Seed == "" && c.Tenant != "" && c.User != nil {
		var err error
		if c.Name, err = c.userName(); err != nil {
			return c, me, err
		}
	} else if c.URL == "" || c.Name == "" || c.Seed == "" {
		return c, me, invalid(op, "a client file, or URL, name and seed, or URL, tenant and user are needed")
	}
	me, err := subjects.ParseName(c.Name)
	if err != nil {
		return c, me, wrap(op, err)
	}
	if c.Timeout <= 0 {
		c.Timeout = 10 * time.Second
	}
	if c.Reattach <= 0 {
		c.Reattach = time.Minute
	}
	return c, me, nil
}

// login makes the options of a connection that logs in with the seed, or as the user.
func (c Config) login(me subjects.Caller) ([]nats.Option, error) {
	show := nats.TokenHandler(c.userToken)
	if c.Seed != "" {
		kp, err := nkeys.FromSeed([]byte(c.Seed))
		if err != nil {
			return nil, invalid("connect", "the seed of %s is no nkey seed", c.Name)
		}
		pub, err := kp.PublicKey()
		if err != nil {
			return nil, fmt.Errorf("read the public key of a seed: %w", err)
		}
		show = nats.Nkey(pub, kp.Sign)
	}
	return append([]nats.Option{
		c.secure,
		nats.Name("berth-sdk " + c.Name),
		show,
		nats.CustomInboxPrefix(me.Inbox()),
		nats.MaxReconnects(-1),
		nats.CustomReconnectDelay(reconnectDelay),
		nats.IgnoreAuthErrorAbort(),         // who is shut out may be let in again
		nats.PingInterval(10 * time.Second), // a node that is cut off is left after 20 to 30 s
		nats.MaxPingsOutstanding(2),
		nats.PermissionErrOnSubscribe(true),
	}, c.NATS...), nil
}

// reconnectDelay is short while a node may have died, and longer for whoever is shut out: every login that
// is refused is work for identity. tries counts rounds over all nodes since the connection was lost.
func reconnectDelay(tries int) time.Duration {
	if tries > 20 {
		return 2*time.Second + rand.N(time.Second)
	}
	return 100*time.Millisecond + rand.N(100*time.Millisecond)
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}
