package bus

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// CalloutConfig has a server ask identity who may log in, by the NATS auth callout. Services, the
// keeper, and identity's own two logins (subjects.Callout and subjects.Warden) are known to the server
// itself and live without identity; hosts, frontends, users and operators are let in by identity alone.
type CalloutConfig struct {
	Issuer string `yaml:"issuer"` // public account nkey that identity signs its answers with
	XKey   string `yaml:"xkey"`   // public curve key that questions are sealed to
}

// Accounts of a server. Everybody is in APP but for identity's two logins: nobody else hears a question
// about a login, or may end another's connection.
const (
	appAccount     = "APP"
	calloutAccount = "AUTH"
	systemAccount  = "SYS"
)

// CalloutTime is how long a server waits for the answer about one login before it refuses it. Clients
// of package bus try again after a second, which another replica of identity may answer.
const CalloutTime = 3 * time.Second

// maxConnect is the longest CONNECT that a server reads: it holds a user's token.
const maxConnect = 20 << 10

// accountOf is where a caller is.
func accountOf(c subjects.Caller) string {
	switch c.Role {
	case subjects.RoleCallout:
		return calloutAccount
	case subjects.RoleWarden:
		return systemAccount
	}
	return appAccount
}

// Static reports whether a server that asks identity about logins still knows the caller itself.
func Static(c subjects.Caller) bool {
	switch c.Role {
	case subjects.RoleService, subjects.RoleKeeper, subjects.RoleCallout, subjects.RoleWarden:
		return true
	}
	return false
}

// ask has the server ask identity about whoever it does not know.
func (cc *CalloutConfig) ask(o *server.Options) error {
	if !nkeys.IsValidPublicAccountKey(cc.Issuer) || !nkeys.IsValidPublicCurveKey(cc.XKey) {
		return errors.New("the callout's issuer must be a public account nkey and its xkey a public curve key")
	}
	o.AuthCallout = &server.AuthCallout{Issuer: cc.Issuer, Account: calloutAccount, XKey: cc.XKey}
	for _, u := range o.Nkeys {
		o.AuthCallout.AuthUsers = append(o.AuthCallout.AuthUsers, u.Nkey)
	}
	o.AuthTimeout = CalloutTime.Seconds()
	o.MaxControlLine = maxConnect
	return nil
}

// known are those of users that the server itself is to know.
func (cc *CalloutConfig) known(users []User) []User {
	if cc == nil {
		return users
	}
	var out []User
	for _, u := range users {
		if Static(u.Caller) {
			out = append(out, u)
		}
	}
	return out
}

// CalloutKeys are the private keys that logins are answered with. Identity alone has them.
type CalloutKeys struct{ issuer, curve nkeys.KeyPair }

// EnsureCallout makes the keys that identity answers logins with, below dir/keys, unless they are
// there, and returns their public parts. It never replaces a key.
func EnsureCallout(dir string) (CalloutConfig, error) {
	keyDir := filepath.Join(dir, "keys")
	if err := os.MkdirAll(keyDir, 0o700); err != nil {
		return CalloutConfig{}, fmt.Errorf("make folder for bus keys: %w", err)
	}
	for file, create := range calloutFiles {
		if _, err := ensureSeed(filepath.Join(keyDir, file), create); err != nil {
			return CalloutConfig{}, fmt.Errorf("bus key of the auth callout: %w", err)
		}
	}
	keys, err := ReadCallout(keyDir)
	if err != nil {
		return CalloutConfig{}, err
	}
	return keys.Public()
}

const (
	issuerFile = "identity-callout-issuer.nk"
	curveFile  = "identity-callout-curve.nk"
)

var calloutFiles = map[string]func() (nkeys.KeyPair, error){issuerFile: nkeys.CreateAccount, curveFile: nkeys.CreateCurveKeys}

// ReadCallout reads what EnsureCallout made.
func ReadCallout(keyDir string) (CalloutKeys, error) {
	const op = "read the keys of the auth callout"
	var k CalloutKeys
	for file, into := range map[string]*nkeys.KeyPair{issuerFile: &k.issuer, curveFile: &k.curve} {
		raw, err := os.ReadFile(filepath.Join(keyDir, file))
		if err != nil {
			return k, errs.E(op, errkind.Invalid, "", err)
		}
		if *into, err = nkeys.FromSeed(raw); err != nil {
			return k, errs.E(op, errkind.Invalid, "", fmt.Errorf("%s holds no nkey seed: %w", file, err))
		}
	}
	_, err := k.Public()
	return k, err
}

// Public are the parts that servers know.
func (k CalloutKeys) Public() (c CalloutConfig, err error) {
	if c.Issuer, err = k.issuer.PublicKey(); err == nil {
		c.XKey, err = k.curve.PublicKey()
	}
	if err == nil && (!nkeys.IsValidPublicAccountKey(c.Issuer) || !nkeys.IsValidPublicCurveKey(c.XKey)) {
		err = errors.New("the seeds must be those of an account and of a curve key")
	}
	if err != nil {
		return c, errs.E("read the keys of the auth callout", errkind.Invalid, "", err)
	}
	return c, nil
}

// ensureSeed reads a seed, and makes it first if there is none.
func ensureSeed(path string, create func() (nkeys.KeyPair, error)) ([]byte, error) {
	raw, err := os.ReadFile(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return raw, err
	}
	pair, err := create()
	if err != nil {
		return nil, err
	}
	if raw, err = pair.Seed(); err != nil {
		return nil, err
	}
	return raw, writeFile(path, raw)
}

// ReadUsers reads the public keys of callers whose logins EnsureKeys made below dir.
func ReadUsers(dir string, callers []subjects.Caller) ([]User, error) {
	users := make([]User, 0, len(callers))
	for _, c := range callers {
		raw, err := os.ReadFile(filepath.Join(dir, "keys", c.Name()+".nk"))
		var pair nkeys.KeyPair
		if err == nil {
			pair, err = nkeys.FromSeed(raw)
		}
		u := User{Caller: c}
		if err == nil {
			u.Public, err = pair.PublicKey()
		}
		if err != nil {
			return nil, errs.E("read bus key", errkind.Invalid, c.Name(), err)
		}
		users = append(users, u)
	}
	return users, nil
}

// JWT is the form that an answer to a login takes. It grants exactly what the server's own form does.
func (p Permissions) JWT() jwt.Permissions {
	s := p.server()
	out := jwt.Permissions{Pub: jwt.Permission{Allow: s.Publish.Allow, Deny: s.Publish.Deny},
		Sub: jwt.Permission{Allow: s.Subscribe.Allow, Deny: s.Subscribe.Deny}}
	if s.Response != nil {
		out.Resp = &jwt.ResponsePermission{MaxMsgs: s.Response.MaxMsgs, Expires: s.Response.Expires}
	}
	return out
}
