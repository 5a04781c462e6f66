package bus

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nkeys"
)

// Login is what one bus identity needs to connect; the content of a client
// file <dir>/clients/<name>.json.
type Login struct {
	URL   string `json:"url"`
	Name  string `json:"name"`
	Inbox string `json:"inbox_prefix"`
	Seed  string `json:"nkey_seed"`
	// CA is the roots, as PEM, that the bus's certificate is verified by; empty: the machine's own.
	CA string `json:"ca,omitempty"`
	// Cert, with its chain, and Key are shown to the bus, as PEM: services and hosts have them.
	Cert string `json:"cert,omitempty"`
	Key  string `json:"key,omitempty"`

	path string // of the client file, which is read again at each reconnect
}

// User is a bus identity as the server knows it.
type User struct {
	Caller subjects.Caller
	Public string // nkey
}

// ReadLogin reads a client file.
func ReadLogin(path string) (Login, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return Login{}, fmt.Errorf("read bus login: %w", err)
	}
	var l Login
	if err := json.Unmarshal(raw, &l); err != nil {
		return Login{}, fmt.Errorf("bus login %s is not JSON: %w", path, err)
	}
	if _, err := subjects.ParseName(l.Name); err != nil {
		return Login{}, fmt.Errorf("bus login %s: %w", path, err)
	}
	l.path = path
	return l, nil
}

// LoginPath is where the client file of a caller lies below dir.
func LoginPath(dir string, c subjects.Caller) string {
	return filepath.Join(dir, "clients", c.Name()+".json")
}

// EnsureKeys makes the nkey of every caller that has none yet below dir/keys,
// and its client file below dir/clients with url, all readable by the owner
// only. It never replaces an nkey. Certificates are of the authority in
// dir/tls, and renewed when a third of their life is left.
func EnsureKeys(dir, url string, callers []subjects.Caller) ([]User, error) {
	for _, d := range []string{"keys", "clients"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("make folder for bus keys: %w", err)
		}
	}
	sh, err := newShower(dir, time.Now())
	if err != nil {
		return nil, fmt.Errorf("certificates of bus logins: %w", err)
	}
	users := make([]User, 0, len(callers))
	for _, c := range callers {
		seed, pub, err := ensureKey(filepath.Join(dir, "keys", c.Name()+".nk"))
		if err != nil {
			return nil, fmt.Errorf("bus key of %s: %w", c, err)
		}
		had, _ := ReadLogin(LoginPath(dir, c)) // one that cannot be read is replaced
		l, err := sh.shown(Login{URL: url, Name: c.Name(), Inbox: c.Inbox(), Seed: seed}, had, c)
		if err == nil {
			err = l.write(LoginPath(dir, c))
		}
		if err != nil {
			return nil, fmt.Errorf("bus login of %s: %w", c, err)
		}
		users = append(users, User{Caller: c, Public: pub})
	}
	return users, nil
}

// write replaces a client file that says something else.
func (l Login) write(path string) error {
	raw, err := json.MarshalIndent(l, "", "  ")
	if err != nil {
		return err
	}
	raw = append(raw, '\n')
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, raw) {
		return nil
	}
	return writeFile(path, raw)
}

func ensureKey(path string) (seed, pub string, err error) {
	raw, err := ensureSeed(path, nkeys.CreateUser)
	if err != nil {
		return "", "", err
	}
	pair, err := nkeys.FromSeed(raw)
	if err != nil {
		return "", "", fmt.Errorf("%s holds no nkey seed: %w", path, err)
	}
	pub, err = pair.PublicKey()
	return string(raw), pub, err
}

// writeFile replaces a file in one step and syncs it.
func writeFile(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
