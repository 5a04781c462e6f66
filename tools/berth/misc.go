package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

type devCmd struct {
	Token  devTokenCmd `cmd:"" help:"Make a token of the development issuer."`
	Link   linkCmd     `cmd:"" help:"Links of a cluster on this machine: cut, delay, lose, heal."`
	Member memberCmd   `cmd:"" help:"Processes of a cluster on this machine: kill, pause, resume, restart."`
}

type devTokenCmd struct {
	Tenant string        `help:"Tenant." required:"" placeholder:"NAME" env:"BERTH_TENANT"`
	User   string        `help:"User." required:"" placeholder:"NAME" env:"BERTH_USER"`
	TTL    time.Duration `name:"ttl" help:"How long it is good." default:"1h"`
	Admin  bool          `help:"The user is an administrator of the tenant."`
	Acting string        `help:"Exchange it for one with which this party acts for the user (RFC 8693)." placeholder:"PARTY"`
}

func (c *devTokenCmd) Run(a *app) error {
	t, err := ids.ParseTenant(c.Tenant)
	if err != nil {
		return exitCode{2, err.Error()}
	}
	if c.TTL <= 0 {
		return usage("the ttl must be more than 0")
	}
	if err := hasDevIssuer(a.dir, t); err != nil {
		return err
	}
	now := time.Now()
	user := devissuer.User{Tenant: t, Subject: c.User, TTL: c.TTL}
	if c.Admin {
		user.Groups = []string{devissuer.AdminGroup}
	}
	token, err := devissuer.Mint(keysDir(a.dir), user, now)
	if err == nil && c.Acting != "" {
		token, err = devissuer.Exchange(keysDir(a.dir), t, token, c.Acting, now)
	}
	if err != nil {
		return err
	}
	out := tokenOut{Token: token, Tenant: c.Tenant, User: c.User, Expires: now.Add(c.TTL).UTC().Truncate(time.Second)}
	return a.print(out, func() { fmt.Fprintln(a.stdout, token) })
}

// hasDevIssuer refuses a tenant whose development tokens nobody would take.
func hasDevIssuer(dir string, t ids.Tenant) error {
	if devissuer.Serves(keysDir(dir), t) {
		return nil
	}
	return fmt.Errorf("tenant %s has no development issuer; berth up --tenant %s gives it one, else use a token of its own issuer", t, t)
}

type deadCmd struct {
	List  deadListCmd  `cmd:"" help:"List messages that could not be handled, oldest first."`
	Show  deadShowCmd  `cmd:"" help:"Show one such message with its headers and body."`
	Retry deadRetryCmd `cmd:"" help:"Have the service that gave a message up handle it again."`
}

// withBus runs f with the operator's login.
func (a *app) withBus(f func(context.Context, *bus.Conn) error) error {
	login, err := bus.ReadLogin(operatorFile(a.dir))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(a.ctx, 30*time.Second)
	defer cancel()
	conn, err := bus.Connect(ctx, login)
	if err != nil {
		return fmt.Errorf("%w; is berth up running?", err)
	}
	defer conn.Close()
	return f(ctx, conn)
}

type deadListCmd struct {
	Service string `help:"Only of this service." placeholder:"NAME"`
	Limit   int    `help:"At most so many." default:"100"`
}

func (c *deadListCmd) Run(a *app) error {
	return a.withBus(func(ctx context.Context, b *bus.Conn) error {
		if c.Service != "" && !ids.IsToken(c.Service) {
			return usage("%q is no service", c.Service)
		}
		list, err := b.ListDead(ctx, c.Service, c.Limit)
		if err != nil {
			return err
		}
		out := deadListOut{Messages: []deadOut{}}
		for _, d := range list {
			out.Messages = append(out.Messages, deadOutOf(d))
		}
		return a.print(out, func() { a.renderDead(out) })
	})
}

type deadShowCmd struct {
	Sequence uint64 `arg:"" help:"Its number in the list."`
}

func (c *deadShowCmd) Run(a *app) error {
	return a.withBus(func(ctx context.Context, b *bus.Conn) error {
		d, err := b.ShowDead(ctx, c.Sequence)
		if err != nil {
			return noDead(err, c.Sequence)
		}
		out := deadOutOf(d)
		out.Header, out.Body = d.Header, d.Body
		return a.print(out, func() { a.renderDeadOne(out) })
	})
}

type deadRetryCmd struct {
	Sequence uint64 `arg:"" help:"Its number in the list."`
}

func (c *deadRetryCmd) Run(a *app) error {
	return a.withBus(func(ctx context.Context, b *bus.Conn) error {
		if err := b.RetryDead(ctx, c.Sequence); err != nil {
			return noDead(err, c.Sequence)
		}
		return a.print(retriedOut{Sequence: c.Sequence, Retried: true}, func() { fmt.Fprintf(a.stdout, "message %d was handled\n", c.Sequence) })
	})
}

// noDead says it in words when there is no such message.
func noDead(err error, sequence uint64) error {
	if errs.Is(err, errkind.NotFound) {
		return fmt.Errorf("there is no dead message %d", sequence)
	}
	return err
}

type requestCmd struct {
	Seal   requestSealCmd   `cmd:"" help:"Print the sealed request of a verb as JSON, for nats req and nats pub."`
	Unseal requestUnsealCmd `cmd:"" help:"Open the answer to a sealed request."`
}

type requestSealCmd struct {
	userFlags
	Verb      string `help:"open, close, delete or status." enum:"open,close,delete,status" default:"open"`
	Body      string `help:"The request as JSON." default:"{}" placeholder:"JSON"`
	KeyOut    string `help:"Store the keys that open the answer and use its grant here (mode 0600)." placeholder:"FILE" type:"path"`
	RequestID string `help:"Makes it idempotent." placeholder:"ID"`
}

func (c *requestSealCmd) Run(a *app) error {
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	s, err := cl.Seal(a.ctx, c.Verb, []byte(c.Body), sdk.UserSession{RequestID: c.RequestID})
	if err != nil {
		return err
	}
	if c.KeyOut != "" {
		raw, err := json.MarshalIndent(keysOut{RequestID: s.RequestID, ReplySeed: s.ReplySeed, ProofSeed: s.ProofSeed}, "", "  ")
		if err != nil {
			return err
		}
		if err := writeSecret(c.KeyOut, append(raw, '\n')); err != nil {
			return err
		}
	}
	if c.KeyOut == "" {
		fmt.Fprintln(a.stderr, "berth: without --key-out nobody can open the answer")
	}
	out := sealOut{Subject: s.Subject, Queue: s.Queue, Body: s.Body, RequestID: s.RequestID}
	return a.print(out, func() { fmt.Fprintf(a.stdout, "%s\n", s.Body) })
}

// writeSecret makes a file that only its owner can read; one that is there
// already is not touched.
func writeSecret(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("store the keys: %w", err)
	}
	if _, err := f.Write(data); err != nil {
		f.Close()
		return fmt.Errorf("store the keys: %w", err)
	}
	return f.Close()
}

type requestUnsealCmd struct {
	Key    string `help:"File that berth request seal --key-out made." required:"" placeholder:"FILE" type:"path"`
	Answer string `arg:"" optional:"" default:"-" help:"File with the answer; default: standard input."`
}

func (c *requestUnsealCmd) Run(a *app) error {
	raw, err := os.ReadFile(c.Key)
	if err != nil {
		return fmt.Errorf("read the keys: %w", err)
	}
	var keys keysOut
	if err := json.Unmarshal(raw, &keys); err != nil {
		return fmt.Errorf("%s is not a file of berth request seal: %w", c.Key, err)
	}
	var answer []byte
	if c.Answer == "-" {
		answer, err = io.ReadAll(io.LimitReader(a.stdin, 1<<20))
	} else {
		answer, err = os.ReadFile(c.Answer)
	}
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	out, err := sdk.Unseal(answer, keys.ReplySeed)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "%s\n", out)
	return err
}

type versionCmd struct{}

func (c *versionCmd) Run(a *app) error {
	out := versionOut{Version: "devel", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if bi, ok := debug.ReadBuildInfo(); ok {
		if v := bi.Main.Version; v != "" && v != "(devel)" {
			out.Version = v
		}
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" {
				out.Revision = s.Value
			}
		}
	}
	return a.print(out, func() {
		fmt.Fprintf(a.stdout, "berth %s %s %s/%s %s\n", out.Version, or(out.Revision, "-"), out.OS, out.Arch, out.Go)
	})
}
