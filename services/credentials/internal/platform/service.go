package platform

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/hashicorp/vault/api"
	"gocloud.dev/secrets"
	"gocloud.dev/secrets/hashivault"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

var services = []string{"awskms", "azurekeyvault", "gcpkms", hashivault.Scheme}

func isFile(ref string) bool { return ref == "" || ref == "file" }

// Check says in one sentence what is wrong with the name of a platform key;
// it opens nothing.
func Check(ref string) error {
	bad := func(format string, args ...any) error {
		return errs.Errorf("configure platform_key", errkind.Invalid, format, args...)
	}
	if isFile(ref) {
		return nil
	}
	scheme, _, ok := strings.Cut(ref, "://")
	if scheme == "base64key" || scheme == "stringkey" {
		return bad("%s:// would be a key in a configuration file; leave platform_key empty for a key file of its own", scheme)
	}
	if !ok || !slices.Contains(services, scheme) {
		// The name is not repeated: who pastes a key here finds it in no log.
		return bad("it must be empty, file, or a URL that begins with one of %s://", strings.Join(services, "://, "))
	}
	u, err := url.Parse(ref)
	switch {
	case err != nil:
		return bad("it is no valid URL")
	case u.User != nil:
		return bad("a URL with a user or password in it is refused; credentials come from the environment")
	case u.Host+u.Path == "" || u.Host == "" && u.Path == "/":
		return bad("the URL names no key")
	}
	if e := u.Query().Get("endpoint"); e != "" && !private(e) {
		return bad("endpoint must be https, or http on this machine")
	}
	return nil
}

// private reports whether what is sent to a URL stays on this machine or is
// encrypted on its way.
func private(raw string) bool {
	u, err := url.Parse(raw)
	if err != nil {
		return false
	}
	if u.Scheme == "https" || u.Scheme == "unix" {
		return true
	}
	ip, err := netip.ParseAddr(u.Hostname())
	return u.Scheme == "http" && (u.Hostname() == "localhost" || err == nil && ip.IsLoopback())
}

// openService opens a keeper within the time of ctx. The driver gets a context
// that does not end: some hold on to it for the renewal of their credentials.
func openService(ctx context.Context, ref string) (*secrets.Keeper, error) {
	if scheme, _, _ := strings.Cut(ref, "://"); !secrets.DefaultURLMux().ValidKeeperScheme(scheme) {
		return nil, fmt.Errorf("this program was built without %s://; build it with make build CLOUD=1", scheme)
	}
	type opened struct {
		keeper *secrets.Keeper
		err    error
	}
	done := make(chan opened, 1)
	go func() {
		var o opened
		if strings.HasPrefix(ref, hashivault.Scheme+"://") {
			o.keeper, o.err = openVault(context.WithoutCancel(ctx), ref)
		} else {
			o.keeper, o.err = secrets.OpenKeeper(context.WithoutCancel(ctx), ref)
		}
		done <- o
	}()
	select {
	case o := <-done:
		return o.keeper, o.err
	case <-ctx.Done():
		return nil, errors.New("its driver did not open in time")
	}
}

// openVault is like the driver's own opener, except that each request ends in
// time and is not retried: the driver does not hand on its context.
func openVault(ctx context.Context, ref string) (*secrets.Keeper, error) {
	u, err := url.Parse(ref)
	if err != nil {
		return nil, err
	}
	cfg := api.DefaultConfig() // reads VAULT_CACERT and its like
	if cfg.Error != nil {
		return nil, cfg.Error
	}
	cfg.Address, cfg.Timeout, cfg.MaxRetries = firstOf("VAULT_SERVER_URL", "VAULT_ADDR"), callWait, 0
	if cfg.Address == "" {
		return nil, errors.New("neither VAULT_SERVER_URL nor VAULT_ADDR is set")
	}
	for _, address := range []string{cfg.Address, cfg.AgentAddress} {
		if address != "" && !private(address) {
			return nil, fmt.Errorf("the address of Vault must be https, or http on this machine, not %s", address)
		}
	}
	client, err := api.NewClient(cfg)
	if err != nil {
		return nil, err
	}
	if token := firstOf("VAULT_SERVER_TOKEN", "VAULT_TOKEN"); token != "" {
		client.SetToken(token)
	}
	return (&hashivault.URLOpener{Client: client}).OpenKeeperURL(ctx, u)
}

func firstOf(names ...string) string {
	for _, n := range names {
		if v := os.Getenv(n); v != "" {
			return v
		}
	}
	return ""
}
