package gate

import (
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/egress/authority"
)

// Config of the gate of one host.
type Config struct {
	// Host is whose sandboxes it lets out; the bus identity is gate-<host>.
	Host string `yaml:"host"`
	// Router is the path of the namespace that the host's agent makes for its sandboxes' links. The gate waits
	// for it.
	Router string `yaml:"router"`
	// Dir holds the audit records that are not on the bus yet, and the bytes of the day by rule.
	Dir string `yaml:"dir"`
	// SpoolBytes is the most that Dir may hold; WhenFull says what becomes of traffic then: refuse or allow.
	SpoolBytes int64  `yaml:"spool_bytes"`
	WhenFull   string `yaml:"when_full"`
	// Resolvers are the DNS servers that names are looked up at, address or address:port; empty: the host's.
	Resolvers []string `yaml:"resolvers"`
	// Hosts gives the addresses of names, before any DNS server is asked.
	Hosts map[string][]string `yaml:"hosts"`
	// Roots are PEM files of authorities that certificates of other hosts are verified by, besides the
	// machine's own.
	Roots []string `yaml:"roots"`
	// MaxConnections is how many connections and requests one session may have open, and AllConnections how
	// many all of them; a tenant has a quarter of these.
	MaxConnections int `yaml:"max_connections"`
	AllConnections int `yaml:"all_connections"`
	// DialTimeout bounds the lookup and the dial of one connection.
	DialTimeout time.Duration `yaml:"dial_timeout"`
	// Listener, of tests: where the doors are instead of in the router.
	Listener Listener `yaml:"-"`
}

// What becomes of traffic that cannot be recorded.
const (
	refuse = "refuse"
	allow  = "allow"
)

// NewConfig returns the defaults; host, router and dir are not among them.
func NewConfig() Config {
	return Config{SpoolBytes: 64 << 20, WhenFull: refuse, MaxConnections: 512, AllConnections: 32768, DialTimeout: 10 * time.Second}
}

// Validate says in one sentence what cannot work.
func (c *Config) Validate() error {
	if _, err := ids.ParseHost(c.Host); err != nil {
		return err
	}
	switch {
	case !filepath.IsAbs(c.Router) && c.Listener == nil:
		return fmt.Errorf("router is %q, it must be the absolute path of a namespace", c.Router)
	case c.Dir == "":
		return errors.New("dir is empty; audit records that wait for the bus need a folder")
	case c.SpoolBytes < 256<<10:
		return fmt.Errorf("spool_bytes is %d, it must be at least 256 KiB", c.SpoolBytes)
	case c.WhenFull != refuse && c.WhenFull != allow:
		return fmt.Errorf("when_full is %q, it must be refuse or allow", c.WhenFull)
	case c.MaxConnections < 1 || c.AllConnections < c.MaxConnections:
		return fmt.Errorf("max_connections is %d and all_connections %d; both must be at least 1, and the second not less than the first", c.MaxConnections, c.AllConnections)
	case c.DialTimeout < 100*time.Millisecond:
		return fmt.Errorf("dial_timeout is %s, it must be at least 100ms", c.DialTimeout)
	}
	if _, err := resolvers(c.Resolvers); err != nil {
		return err
	}
	if _, err := c.static(); err != nil {
		return err
	}
	_, err := c.roots()
	return err
}

// resolvers are the addresses of DNS servers.
func resolvers(list []string) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	for _, s := range list {
		if at, err := netip.ParseAddrPort(s); err == nil {
			out = append(out, at)
			continue
		}
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("resolvers: %q is no address", s)
		}
		out = append(out, netip.AddrPortFrom(a, 53))
	}
	return out, nil
}

// roots are the machine's authorities and those of the configuration.
func (c *Config) roots() (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	for _, file := range c.Roots {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read roots: %w", err)
		}
		if !pool.AppendCertsFromPEM(raw) {
			return nil, fmt.Errorf("roots: %s holds no certificate", file)
		}
	}
	return pool, nil
}

// addresses reads the addresses of one name.
func addresses(name string, list []string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range list {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("hosts: %q of %s is no address", s, name)
		}
		out = append(out, a)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("hosts: %s has no address", name)
	}
	return out, nil
}

// static are the names of the configuration with their addresses.
func (c *Config) static() (map[authority.Name][]netip.Addr, error) {
	out := map[authority.Name][]netip.Addr{}
	for _, text := range slices.Sorted(maps.Keys(c.Hosts)) {
		name, err := authority.ParseStrict(text)
		if err != nil {
			return nil, fmt.Errorf("hosts: %w", err)
		}
		list, err := addresses(text, c.Hosts[text])
		if err != nil {
			return nil, err
		}
		out[name] = list
	}
	return out, nil
}
