// Command berth runs Berth on this machine and works with sessions: every
// command is <noun> <verb>. It guarantees that what goes wrong is one sentence
// on standard error, that the exit code says what kind of end it was (0 done,
// 1 failed, 2 wrong usage, 255 an exec whose exit nobody knows, else the
// process's own), and that --json is stable: docs/howto/cli-json.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
)

// cli is every command and flag.
type cli struct {
	Dir  string `help:"State folder of berth up." env:"BERTH_DIR" default:"/var/lib/berth" type:"path" placeholder:"DIR"`
	JSON bool   `name:"json" help:"Print JSON: docs/howto/cli-json.md."`

	Up         upCmd         `cmd:"" help:"Run everything on this machine."`
	Session    sessionCmd    `cmd:"" help:"Open, list, show, close and delete sessions."`
	Exec       execCmd       `cmd:"" help:"Run a command in a session, which is opened (or joined) first."`
	Cp         cpCmd         `cmd:"" help:"Copy files and directories to and from a session."`
	Disk       diskCmd       `cmd:"" help:"Snapshots of a session's disk: list, restore, verify, grow, export, import."`
	Audit      auditCmd      `cmd:"" help:"The audit log: what a session's sandbox was let reach."`
	Tail       tailCmd       `cmd:"" help:"Follow what happens to sessions."`
	Host       hostCmd       `cmd:"" help:"Hosts of the platform."`
	Pool       poolCmd       `cmd:"" help:"Pools of warm sandboxes: declare, show and end them."`
	Scheduler  schedulerCmd  `cmd:"" help:"Replicas of the scheduler."`
	Tenant     tenantCmd     `cmd:"" help:"Tenants: add, list, show, suspend."`
	Issuer     issuerCmd     `cmd:"" help:"Issuers of users' tokens: add, test, remove."`
	Frontend   frontendCmd   `cmd:"" help:"Logins of frontends: add, list, remove."`
	Admin      adminCmd      `cmd:"" help:"For administrators of a tenant: sessions by handle, attach, suspend."`
	Delegation delegationCmd `cmd:"" help:"Which frontends act for a user: list, revoke, allow."`
	Key        keyCmd        `cmd:"" help:"Versions of the keys that everything hangs on: list, rotate, retire."`
	Secret     secretCmd     `cmd:"" help:"Static secrets of tenants, which egress puts into requests: put, list, remove."`
	CA         caCmd         `cmd:"" name:"ca" help:"The certificate authority of a state folder."`
	Policy     policyCmd     `cmd:"" help:"Policies that decide about sessions: test, show and check them."`
	Dead       deadCmd       `cmd:"" help:"Messages that could not be handled."`
	Request    requestCmd    `cmd:"" help:"Sealed requests for the plain nats CLI and other languages."`
	Dev        devCmd        `cmd:"" help:"For development on one machine."`
	Version    versionCmd    `cmd:"" help:"Print the version."`
	Run        runCmd        `cmd:"" hidden:"" help:"One member of a cluster on this machine."`
}

// app is what a command gets to work with.
type app struct {
	ctx    context.Context
	dir    string
	json   bool
	args   []string // as they were typed
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
	colour bool             // standard output is a terminal that wants colours
	now    func() time.Time // nil: the machine's
}

// exitCode ends the program with a code and, if set, a sentence.
type exitCode struct {
	code int
	text string
}

func (e exitCode) Error() string { return e.text }

func usage(format string, args ...any) error { return exitCode{2, fmt.Sprintf(format, args...)} }

func main() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	a := &app{ctx: ctx, stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		colour: isTerminal(os.Stdout) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
	os.Exit(run(a, os.Args[1:]))
}

// run is the whole program: it returns the exit code.
func run(a *app, args []string) int {
	var c cli
	exited := -1
	k, err := kong.New(&c, kong.Name("berth"), kong.Writers(a.stdout, a.stderr), kong.Exit(func(code int) { exited = code }),
		kong.Description("One sandbox per user session, its own from the kernel up."),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}))
	if err != nil {
		fmt.Fprintf(a.stderr, "berth: %v\n", err)
		return 1
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	parsed, err := k.Parse(args)
	if exited >= 0 {
		return exited
	}
	if err != nil {
		fmt.Fprintf(a.stderr, "berth: %v; see berth --help\n", err)
		return 2
	}
	a.dir, a.json, a.args = c.Dir, c.JSON, args
	if !strings.HasPrefix(parsed.Command(), "exec") && !strings.HasPrefix(parsed.Command(), "up") && !strings.HasPrefix(parsed.Command(), "run ") {
		var stop context.CancelFunc
		a.ctx, stop = signal.NotifyContext(a.ctx, os.Interrupt, syscall.SIGTERM)
		defer stop()
	}
	return a.end(parsed.Run(a))
}

// end turns a command's error into a sentence and an exit code.
func (a *app) end(err error) int {
	if err == nil {
		return 0
	}
	code := 1
	if e := (exitCode{}); errors.As(err, &e) {
		code = e.code
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	if errors.Is(err, context.Canceled) && a.ctx.Err() != nil {
		text = "interrupted"
	}
	if text != "" {
		fmt.Fprintf(a.stderr, "berth: %s\n", text)
	}
	return code
}

// Run makes upCmd a command like the others.
func (c *upCmd) Run(a *app) error { return c.run(a.ctx, a.dir) }
