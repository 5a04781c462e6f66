package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/nats-io/nkeys"

	"github.com/berth-dev/berth/internal/bus"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

type frontendCmd struct {
	Add    frontendAddCmd    `cmd:"" help:"Let a frontend in: make its key and its client file, or take the public key that it made (--nkey)."`
	Remove frontendRemoveCmd `cmd:"" help:"Take a frontend's login away: its grants and connections end."`
	List   frontendListCmd   `cmd:"" help:"List the logins of frontends."`
}

type frontendAddCmd struct {
	Tenant   string `arg:"" help:"Tenant of the frontend." placeholder:"TENANT"`
	Frontend string `arg:"" help:"Its name." placeholder:"NAME"`
	NKey     string `name:"nkey" help:"Public nkey that it made itself; no client file is written then." placeholder:"U..."`
	Acting   string `help:"Subject that tokens exchanged for it have in act (RFC 8693); default: it carries users' own tokens only." placeholder:"SUB"`
	Out      string `help:"Client file to write; default: <dir>/clients/fe-<tenant>-<name>.json." placeholder:"FILE" type:"path"`
	revisionFlag
}

func (c *frontendAddCmd) Run(a *app) error {
	who, err := frontendOf(c.Tenant, c.Frontend)
	if err != nil {
		return err
	}
	login := &identityv1.Login{Name: who.Name(), Nkey: c.NKey, Acting: c.Acting, Revision: c.Revision}
	file := ""
	if c.NKey == "" {
		if file = c.Out; file == "" {
			file = bus.LoginPath(a.dir, who)
		}
		if login.Nkey, err = newClientFile(file, operatorFile(a.dir), who); err != nil {
			return err
		}
	}
	reply := &identityv1.LoginPutReply{}
	if err := a.registry("login_put", &identityv1.LoginPutRequest{Login: login}, reply); err != nil {
		if file != "" {
			_ = os.Remove(file) // nobody has its key
		}
		return err
	}
	out := frontendOutOf(reply.GetLogin())
	out.ClientFile = file
	return a.print(out, func() {
		fmt.Fprintf(a.stdout, "frontend %s of tenant %s is let in, at revision %d\n", out.Frontend, out.Tenant, out.Revision)
		if file != "" {
			fmt.Fprintf(a.stdout, "its client file is %s\n", plain(file))
		}
	})
}

// newClientFile makes a key and the file of it, readable by the owner only, with the address and the roots
// of the operator's own; one that is there is not touched. It returns the public key.
func newClientFile(path, like string, who subjects.Caller) (public string, err error) {
	own, err := bus.ReadLogin(like)
	if err != nil {
		return "", err
	}
	pair, err := nkeys.CreateUser()
	if err != nil {
		return "", fmt.Errorf("make a key: %w", err)
	}
	seed, err := pair.Seed()
	if err != nil {
		return "", fmt.Errorf("make a key: %w", err)
	}
	raw, err := json.MarshalIndent(bus.Login{URL: own.URL, Name: who.Name(), Inbox: who.Inbox(), Seed: string(seed), CA: own.CA}, "", "  ")
	if err != nil {
		return "", fmt.Errorf("write the client file: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", fmt.Errorf("write the client file: %w", err)
	}
	if err := writeSecret(path, append(raw, '\n')); errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("%s is there already; remove it, or name another file with --out", path)
	} else if err != nil {
		return "", err
	}
	return pair.PublicKey()
}

func frontendOf(tenant, name string) (subjects.Caller, error) {
	t, terr := ids.ParseTenant(tenant)
	f, ferr := ids.ParseFrontend(name)
	if err := errors.Join(terr, ferr); err != nil {
		return subjects.Caller{}, exitCode{2, err.Error()}
	}
	return subjects.Frontend(t, f), nil
}

type frontendRemoveCmd struct {
	Tenant   string `arg:"" help:"Tenant of the frontend." placeholder:"TENANT"`
	Frontend string `arg:"" help:"Its name." placeholder:"NAME"`
}

func (c *frontendRemoveCmd) Run(a *app) error {
	who, err := frontendOf(c.Tenant, c.Frontend)
	if err != nil {
		return err
	}
	all, err := a.tenants(c.Tenant)
	if err != nil {
		return err
	}
	for _, l := range all.GetLogins() {
		if l.GetName() != who.Name() {
			continue
		}
		if err := a.registry("login_put", &identityv1.LoginPutRequest{Login: l, Remove: true}, &identityv1.LoginPutReply{}); err != nil {
			return err
		}
		out := frontendRemovedOut{Tenant: c.Tenant, Frontend: c.Frontend, Removed: true}
		return a.print(out, func() { fmt.Fprintf(a.stdout, "frontend %s of tenant %s is removed\n", c.Frontend, c.Tenant) })
	}
	return fmt.Errorf("frontend %s of tenant %s has no login", c.Frontend, c.Tenant)
}

type frontendListCmd struct {
	Tenant string `arg:"" optional:"" help:"Only of this tenant." placeholder:"TENANT"`
}

func (c *frontendListCmd) Run(a *app) error {
	if c.Tenant != "" {
		if _, err := ids.ParseTenant(c.Tenant); err != nil {
			return exitCode{2, err.Error()}
		}
	}
	all, err := a.tenants(c.Tenant)
	if err != nil {
		return err
	}
	out := frontendsOutOf(all)
	return a.print(out, func() { a.renderFrontends(out) })
}
