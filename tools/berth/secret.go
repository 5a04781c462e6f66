package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/term"
	"google.golang.org/protobuf/proto"

	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/sdk"
)

type secretCmd struct {
	Put    secretPutCmd    `cmd:"" help:"Store a secret of a tenant, or a new version of one. The value comes from a file or standard input."`
	List   secretListCmd   `cmd:"" help:"List the secrets of a tenant, without their values."`
	Remove secretRemoveCmd `cmd:"" help:"Destroy a secret."`
}

// maxValueFile is more than the longest value; that is credentials' to say.
const maxValueFile = 64 << 10

type secretPutCmd struct {
	Name      string   `arg:"" help:"Name of the secret: a-z, 0-9, - and _, first a letter or digit." placeholder:"NAME"`
	Tenant    string   `required:"" help:"Tenant whose it is." placeholder:"TENANT"`
	Host      []string `required:"" name:"host" help:"Host that it may be sent to; once for each." placeholder:"HOST"`
	ValueFile string   `help:"File with the value, - for standard input; default: standard input. One line end at the end is no part of it." placeholder:"FILE"`
}

func (c *secretPutCmd) Run(a *app) error {
	if _, err := ids.ParseTenant(c.Tenant); err != nil {
		return exitCode{2, err.Error()}
	}
	value, err := a.secretValue(c.ValueFile)
	if err != nil {
		return err
	}
	defer clear(value)
	if _, err := a.tenants(c.Tenant); err != nil {
		return err
	}
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	ask, err := sealedSecret(a, op, &credentialsv1.SecretValue{Tenant: c.Tenant, Name: c.Name, Value: value, Hosts: c.Host})
	if err != nil {
		return err
	}
	reply := &credentialsv1.SecretPutReply{}
	if err := op.Call(a.ctx, "credentials", "secret_put", ask, reply); err != nil {
		return oneSentence(err)
	}
	out := secretPutOut{Tenant: c.Tenant, Name: c.Name, Version: reply.GetVersion()}
	return a.print(out, func() { a.renderSecretPut(out) })
}

// sealedSecret seals a secret to credentials' key.
func sealedSecret(a *app, op *sdk.Client, v *credentialsv1.SecretValue) (*credentialsv1.SecretPutRequest, error) {
	keys := &credentialsv1.JwksReply{}
	if err := op.Call(a.ctx, "credentials", "jwks", &credentialsv1.JwksRequest{}, keys); err != nil {
		return nil, oneSentence(err)
	}
	raw, err := proto.Marshal(v)
	if err != nil { // some text is no UTF-8; the error could repeat it
		return nil, usage("the tenant, name and hosts of a secret are plain text")
	}
	defer clear(raw)
	box, err := seal.RandomBox()
	if err != nil {
		return nil, err
	}
	sealed, err := box.Seal(keys.GetCurveKey(), raw)
	if err != nil {
		return nil, fmt.Errorf("credentials' key: %w", err)
	}
	return &credentialsv1.SecretPutRequest{Sealed: sealed, Sender: box.Public()}, nil
}

// secretValue reads a value: it is never an argument, which every process on the machine could read.
func (a *app) secretValue(file string) ([]byte, error) {
	raw, err := a.readValue(file)
	if err != nil {
		return nil, err
	}
	switch value := withoutLineEnd(raw); {
	case len(value) > maxValueFile:
		return nil, errors.New("what is to be the value is longer than 64 KiB")
	case len(value) == 0:
		return nil, usage("what is to be the value is empty")
	default:
		return value, nil
	}
}

func (a *app) readValue(file string) ([]byte, error) {
	in := a.stdin
	if file != "" && file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, fmt.Errorf("read the value's file: %w", errors.Unwrap(err))
		}
		defer f.Close()
		in = f
	} else if isTerminal(in) {
		fmt.Fprint(a.stderr, "value (not shown): ")
		defer fmt.Fprintln(a.stderr)
		return term.ReadPassword(int(in.(interface{ Fd() uintptr }).Fd()))
	}
	raw, err := io.ReadAll(io.LimitReader(in, maxValueFile+3))
	if err != nil {
		return nil, fmt.Errorf("read the value: %w", err)
	}
	return raw, nil
}

func withoutLineEnd(raw []byte) []byte {
	if n := len(raw); n > 0 && raw[n-1] == '\n' {
		raw = raw[:n-1]
	}
	if n := len(raw); n > 0 && raw[n-1] == '\r' {
		raw = raw[:n-1]
	}
	return raw
}

type secretListCmd struct {
	Tenant string `required:"" help:"Tenant whose they are." placeholder:"TENANT"`
}

func (c *secretListCmd) Run(a *app) error {
	if _, err := ids.ParseTenant(c.Tenant); err != nil {
		return exitCode{2, err.Error()}
	}
	reply := &credentialsv1.SecretsReply{}
	if err := a.credentials("secrets", &credentialsv1.SecretsRequest{Tenant: c.Tenant}, reply); err != nil {
		return err
	}
	out := secretsOutOf(reply)
	return a.print(out, func() { a.renderSecrets(out) })
}

type secretRemoveCmd struct {
	Name   string `arg:"" help:"Name of the secret." placeholder:"NAME"`
	Tenant string `required:"" help:"Tenant whose it is." placeholder:"TENANT"`
}

func (c *secretRemoveCmd) Run(a *app) error {
	if _, err := ids.ParseTenant(c.Tenant); err != nil {
		return exitCode{2, err.Error()}
	}
	if err := a.credentials("secret_remove", &credentialsv1.SecretRemoveRequest{Tenant: c.Tenant, Name: c.Name}, &credentialsv1.SecretRemoveReply{}); err != nil {
		return err
	}
	out := secretRemovedOut{Tenant: c.Tenant, Name: c.Name, Removed: true}
	return a.print(out, func() { a.renderSecretRemoved(out) })
}

// credentials calls a method of credentials as operator.
func (a *app) credentials(method string, ask, reply proto.Message) error {
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	return oneSentence(op.Call(a.ctx, "credentials", method, ask, reply))
}

type secretPutOut struct {
	Tenant  string `json:"tenant"`
	Name    string `json:"name"`
	Version uint64 `json:"version"`
}

type secretsOut struct {
	Secrets []secretOut `json:"secrets"`
}

type secretOut struct {
	Tenant    string    `json:"tenant"`
	Name      string    `json:"name"`
	Hosts     []string  `json:"hosts"`
	Version   uint64    `json:"version"`
	ChangedAt time.Time `json:"changed_at"`
}

type secretRemovedOut struct {
	Tenant  string `json:"tenant"`
	Name    string `json:"name"`
	Removed bool   `json:"removed"`
}

func secretsOutOf(r *credentialsv1.SecretsReply) secretsOut {
	out := secretsOut{Secrets: []secretOut{}}
	for _, s := range r.GetSecrets() {
		out.Secrets = append(out.Secrets, secretOut{Tenant: s.GetTenant(), Name: s.GetName(), Hosts: append([]string{}, s.GetHosts()...),
			Version: s.GetVersion(), ChangedAt: s.GetChangedAt().AsTime()})
	}
	return out
}

func (a *app) renderSecretPut(o secretPutOut) {
	fmt.Fprintf(a.stdout, "secret %s of tenant %s is at version %d\n", plain(o.Name), o.Tenant, o.Version)
}

func (a *app) renderSecretRemoved(o secretRemovedOut) {
	fmt.Fprintf(a.stdout, "secret %s of tenant %s is destroyed; gates forget it within a minute\n", plain(o.Name), o.Tenant)
}

func (a *app) renderSecrets(o secretsOut) {
	if len(o.Secrets) == 0 {
		fmt.Fprintln(a.stdout, "no secrets")
		return
	}
	rows := [][]string{{"NAME", "VERSION", "CHANGED", "HOSTS"}}
	for _, s := range o.Secrets {
		rows = append(rows, []string{plain(s.Name), strconv.FormatUint(s.Version, 10), s.ChangedAt.UTC().Format(time.RFC3339), plain(strings.Join(s.Hosts, ", "))})
	}
	table(a.stdout, rows)
}
