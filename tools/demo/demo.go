package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/tools/berth/upproc"
	"github.com/berth-dev/berth/tools/residue"
)

// user is one person of one tenant with a session of their own.
type user struct {
	tenant, name string
	client       *sdk.Client
	session      *sdk.Session
	marker       string // a word that only this user's sandbox knows
	hash         string // of the user's files before sleep
	open         sdk.OpenOptions
}

type demo struct {
	*report
	idle     time.Duration
	template string
	keep     bool

	dir      string
	up       *upproc.Process
	before   residue.Residue // of the host with berth up and no session
	marks    []string        // of this installation
	users    []*user
	timeline []string
	events   *eventLog
}

func (d *demo) run(ctx context.Context) (err error) {
	defer d.end()
	if err := d.begin(ctx); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{
		d.openBoth, d.workBoth, d.lookAtEachOther, d.fallAsleep, d.nothingLeft, d.wakeBoth, d.deleteOne,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// begin starts berth up and connects both users' frontends.
func (d *demo) begin(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "berth-demo-")
	if err != nil {
		return err
	}
	d.dir = dir
	d.say("starting berth up in %s", dir)
	began := time.Now()
	args := []string{"--idle", d.idle.String()}
	if d.template == "" { // a template of machines, which a host makes when it can, would be counted as left over
		args = append(args, "--tiers", "container,gvisor")
	}
	if d.up, err = upproc.Start(ctx, upproc.Options{Bin: "bin/berth", Dir: dir, Args: args}); err != nil {
		return err
	}
	d.took("berth up until ready", time.Since(began))
	d.marks = d.up.Marks
	if err := d.onceUsed(ctx); err != nil {
		return err
	}
	d.before = residue.Take()
	if d.events, err = followEvents(ctx, d.up.ClientFile("operator")); err != nil {
		return err
	}
	for _, u := range []*user{{tenant: "acme", name: "ann"}, {tenant: "globex", name: "bob"}} {
		if u.client, err = d.up.Connect(ctx, u.tenant, u.name); err != nil {
			return fmt.Errorf("connect as %s's frontend: %w", u.tenant, err)
		}
		u.open = sdk.OpenOptions{Template: d.template}
		u.marker = "mark-" + u.name + "-" + randomWord()
		d.users = append(d.users, u)
	}
	return nil
}

// onceUsed has one session come and go, so that what the host makes once (the
// parent of all cgroups, the runtime's own mount) is there before the look that
// later ones are compared with.
func (d *demo) onceUsed(ctx context.Context) error {
	client, err := d.up.Connect(ctx, "acme", "first")
	if err != nil {
		return err
	}
	defer client.Close()
	s, err := client.Open(ctx, sdk.OpenOptions{Template: d.template})
	if err != nil {
		return fmt.Errorf("open the first session: %w", err)
	}
	return s.Delete(ctx)
}

// end stops everything and checks that the host is as it was.
func (d *demo) end() {
	if d.events != nil {
		d.timeline = d.events.stop()
	}
	for _, u := range d.users {
		u.client.Close()
	}
	if d.up != nil {
		began := time.Now()
		err := d.up.Stop()
		d.took("berth up until stopped", time.Since(began))
		d.check("berth up stopped by itself", err == nil, errText(err, "exit 0"))
		left := residue.Take().About(d.marks...)
		d.check("the machine is as it was", left.Empty(), left.String())
	}
	if d.keep {
		d.say("kept %s", d.dir)
		return
	}
	if err := os.RemoveAll(d.dir); err != nil {
		d.check("the state folder is gone", false, err.Error())
	}
}

// both runs f for both users at the same time.
func (d *demo) both(f func(u *user) error) error {
	errs := make([]error, len(d.users))
	var wg sync.WaitGroup
	for i, u := range d.users {
		wg.Go(func() { errs[i] = f(u) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("%s: %w", d.users[i].name, err)
		}
	}
	return nil
}

func (d *demo) openBoth(ctx context.Context) error {
	err := d.both(func(u *user) error {
		began := time.Now()
		s, err := u.client.Open(ctx, u.open)
		if err != nil {
			return err
		}
		u.session = s
		d.tookOf(u, "open, first time", time.Since(began))
		return nil
	})
	if err != nil {
		return err
	}
	awake := residue.Take().Since(d.before).About(d.marks...)
	d.check("while awake they have processes and mounts (the check can fail)", len(awake.Processes) > 0 && len(awake.Mounts) > 0,
		fmt.Sprintf("%d processes, %d mounts, %d cgroups, %d loop devices", len(awake.Processes), len(awake.Mounts), len(awake.Cgroups), len(awake.Loops)))
	a, b := d.users[0].session, d.users[1].session
	d.check("each user has a session of their own", a.Key() != b.Key() && a.Origin() == sdk.Created && b.Origin() == sdk.Created,
		fmt.Sprintf("%.10s… and %.10s…, both created, tier %s", a.Key(), b.Key(), a.Place().Tier))
	return nil
}

func (d *demo) tookOf(u *user, what string, t time.Duration) {
	d.took(what+" ("+u.name+")", t)
}

func (d *demo) fallAsleep(ctx context.Context) error {
	d.say("nobody asks for anything; waiting %s", d.idle)
	return d.both(func(u *user) error {
		at, took, err := d.events.waitAsleep(ctx, u.session.Key())
		if err != nil {
			return err
		}
		d.tookOf(u, "sleep, from idle to no compute", took)
		d.check(u.name+" is asleep", true, "at "+at.Format("15:04:05.000"))
		return nil
	})
}

func (d *demo) nothingLeft(context.Context) error {
	left := residue.Take().Since(d.before).About(d.marks...)
	d.check("no process, container, mount, cgroup or memory of the two is left", left.Empty(), left.String())
	return nil
}

func (d *demo) wakeBoth(ctx context.Context) error {
	return d.both(func(u *user) error {
		began := time.Now()
		s, err := u.client.Open(ctx, u.open)
		if err != nil {
			return err
		}
		d.tookOf(u, "wake", time.Since(began))
		old := u.session
		u.session = s
		old.Detach()
		hash, err := hashFiles(ctx, s)
		if err != nil {
			return err
		}
		d.check(u.name+"'s files are the same after waking", hash == u.hash && s.Origin() == sdk.Resumed,
			fmt.Sprintf("sha256 %.16s… before, %.16s… after, %s", u.hash, hash, s.Origin()))
		return nil
	})
}

func (d *demo) deleteOne(ctx context.Context) error {
	u := d.users[1]
	began := time.Now()
	key := u.session.Key()
	if err := u.session.Delete(ctx); err != nil {
		return err
	}
	d.took("delete ("+u.name+")", time.Since(began))
	found, err := filesNaming(d.dir, key)
	if err != nil {
		return err
	}
	d.check(u.name+"'s disk is gone from the host", len(found) == 0, fmt.Sprintf("%d files of it in the state folder", len(found)))
	s, err := u.client.Open(ctx, u.open)
	if err != nil {
		return fmt.Errorf("open after delete: %w", err)
	}
	out, err := s.Output(ctx, "ls", "-A", home)
	d.check("what "+u.name+" opens now is a new session", err == nil && s.Origin() == sdk.Created && !bytes.Contains(out, []byte("data.csv")),
		fmt.Sprintf("%s, %d bytes of file names at home", s.Origin(), len(out)))
	return s.Delete(ctx)
}

func errText(err error, good string) string {
	if err != nil {
		return err.Error()
	}
	return good
}
