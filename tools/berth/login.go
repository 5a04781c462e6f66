package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

// userFlags say as whom a command acts.
type userFlags struct {
	Client string `help:"Bus login: a name in <dir>/clients, or a path. Default: fe-<tenant>-cli, or another frontend of the tenant." placeholder:"NAME" env:"BERTH_CLIENT"`
	Tenant string `help:"Tenant, for a development token." placeholder:"NAME" env:"BERTH_TENANT"`
	User   string `help:"User, for a development token." placeholder:"NAME" env:"BERTH_USER"`
	Token  string `help:"The user's token, instead of --user: itself, or @FILE with it, or - for standard input." placeholder:"JWT" env:"BERTH_TOKEN"`
}

// connect logs in as the frontend that the flags name, with the user's tokens.
func (u userFlags) connect(a *app) (*sdk.Client, error) {
	path, err := u.clientFile(a.dir)
	if err != nil {
		return nil, err
	}
	file, err := sdk.ReadClientFile(path)
	if err != nil {
		return nil, err
	}
	who, err := subjects.ParseName(file.Name)
	if err != nil {
		return nil, err
	}
	if who.Role != subjects.RoleFrontend {
		return nil, fmt.Errorf("%s is no frontend; only a frontend can ask for sessions", file.Name)
	}
	user, err := u.tokens(a, who.Tenant)
	if err != nil {
		return nil, err
	}
	return dial(a.ctx, sdk.Config{ClientFile: path, User: user})
}

func dial(ctx context.Context, cfg sdk.Config) (*sdk.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, err := sdk.Connect(ctx, cfg)
	if errors.Is(err, sdk.ErrUnavailable) {
		return nil, fmt.Errorf("%w; is berth up running?", err)
	}
	return c, err
}

// tokens makes a development token for each request, unless a token is given.
func (u userFlags) tokens(a *app, t ids.Tenant) (sdk.TokenSource, error) {
	switch file, isFile := strings.CutPrefix(u.Token, "@"); {
	case isFile, file == "-":
		token, err := a.readToken(file)
		return sdk.Token(token), err
	case u.Token != "":
		return sdk.Token(u.Token), nil
	case u.User == "":
		return nil, usage("say who asks: --user NAME (or BERTH_USER) for a development token, or BERTH_TOKEN")
	case u.Tenant != "" && u.Tenant != string(t):
		return nil, usage("the login is of tenant %s, not of %s", t, u.Tenant)
	}
	if err := hasDevIssuer(a.dir, t); err != nil {
		return nil, err
	}
	return func(context.Context) (string, error) {
		return devissuer.Mint(keysDir(a.dir), devissuer.User{Tenant: t, Subject: u.User}, time.Now())
	}, nil
}

// maxTokenFile is more than any token that is accepted.
const maxTokenFile = 64 << 10

// readToken reads a token from a file; - is the standard input. No error names the file, which may be
// a token that was meant as one.
func (a *app) readToken(file string) (string, error) {
	in := a.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return "", fmt.Errorf("read the token's file: %w", errors.Unwrap(err))
		}
		defer f.Close()
		in = f
	}
	raw, err := io.ReadAll(io.LimitReader(in, maxTokenFile+1))
	token := strings.TrimSpace(string(raw))
	switch {
	case err != nil:
		return "", fmt.Errorf("read the token: %w", err)
	case len(raw) > maxTokenFile:
		return "", errors.New("what is to be the token is longer than 64 KiB")
	case token == "":
		return "", errors.New("what is to be the token is empty")
	}
	return token, nil
}

// isJWT reports whether s has the shape of a token, and so is no file's name.
func isJWT(s string) bool { return strings.HasPrefix(s, "eyJ") && strings.Count(s, ".") == 2 }

func keysDir(dir string) string { return filepath.Join(dir, "keys") }

// clientFile finds the login.
func (u userFlags) clientFile(dir string) (string, error) {
	if u.Client != "" {
		if strings.ContainsRune(u.Client, os.PathSeparator) {
			return u.Client, nil
		}
		return filepath.Join(dir, "clients", u.Client+".json"), nil
	}
	all, err := frontends(dir)
	if err != nil {
		return "", err
	}
	if u.Tenant != "" {
		if _, err := ids.ParseTenant(u.Tenant); err != nil {
			return "", exitCode{2, err.Error()}
		}
		all = slices.DeleteFunc(all, func(c subjects.Caller) bool { return string(c.Tenant) != u.Tenant })
		if len(all) == 0 {
			return "", fmt.Errorf("tenant %s has no login in %s", u.Tenant, filepath.Join(dir, "clients"))
		}
	}
	tenants := map[ids.Tenant]bool{}
	for _, c := range all {
		tenants[c.Tenant] = true
	}
	if len(tenants) > 1 {
		return "", usage("there are several tenants; say which: --tenant NAME (or BERTH_TENANT)")
	}
	best := all[0]
	for _, c := range all {
		if c.Frontend == "cli" {
			best = c
		}
	}
	return filepath.Join(dir, "clients", best.Name()+".json"), nil
}

// frontends lists the logins of frontends, in order of their names.
func frontends(dir string) ([]subjects.Caller, error) {
	entries, err := os.ReadDir(filepath.Join(dir, "clients"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there are no logins in %s; start berth up with this --dir, or name a client file with --client", filepath.Join(dir, "clients"))
	}
	if err != nil {
		return nil, fmt.Errorf("look for logins: %w", err)
	}
	var out []subjects.Caller
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if c, err := subjects.ParseName(name); ok && err == nil && c.Role == subjects.RoleFrontend {
			out = append(out, c)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("there is no login of a frontend in %s", filepath.Join(dir, "clients"))
	}
	return out, nil
}

// operatorFile is where the operator's login is.
func operatorFile(dir string) string {
	return filepath.Join(dir, "clients", subjects.Operator().Name()+".json")
}

// operator logs in as operator.
func (a *app) operator() (*sdk.Client, error) { return a.operatorWith(0) }

// operatorWith is operator with another time for each attempt of a request.
func (a *app) operatorWith(attempt time.Duration) (*sdk.Client, error) {
	path := operatorFile(a.dir)
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("the operator's login %s cannot be read; this command needs it: %w", path, errors.Unwrap(err))
	}
	return dial(a.ctx, sdk.Config{ClientFile: path, Timeout: attempt})
}

// selector names one session of the user: a name or a key.
type selector struct {
	Session string `arg:"" optional:"" default:"default" help:"Name or key of the session; default: default." placeholder:"SESSION"`
}

// named connects as the user and resolves the name or key of one of the user's sessions.
func (u userFlags) named(a *app, session string) (*sdk.Client, string, error) {
	cl, err := u.connect(a)
	if err != nil {
		return nil, "", err
	}
	name, err := sessionName(a.ctx, cl, session)
	if err != nil {
		cl.Close()
		return nil, "", err
	}
	return cl, name, nil
}

// sessionName resolves a key among the user's own sessions; a name stays.
func sessionName(ctx context.Context, c *sdk.Client, s string) (string, error) {
	if _, err := ids.ParseSessionKey(s); err != nil {
		if _, err := ids.ParseSessionName(s); err != nil {
			return "", exitCode{2, err.Error()}
		}
		return s, nil
	}
	list, err := c.Status(ctx, sdk.UserSession{})
	if err != nil {
		return "", err
	}
	for _, st := range list {
		if st.Key == s {
			return st.Name, nil
		}
	}
	return "", fmt.Errorf("no session of this user has the key %s", s)
}

func isTerminal(v any) bool {
	f, ok := v.(interface{ Fd() uintptr })
	return ok && term.IsTerminal(int(f.Fd()))
}
