package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/berth-dev/berth/internal/keyfile"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

type keyCmd struct {
	List   keyListCmd   `cmd:"" help:"List the versions of a key, newest first, and how much hangs on each."`
	Rotate keyRotateCmd `cmd:"" help:"Add a version, which new things are made with after a while."`
	Retire keyRetireCmd `cmd:"" help:"Drop a version that nothing hangs on any more."`
}

// mostVersions is how many versions of the session key may be live at once:
// scheduler takes as many keys of one session in a request.
const mostVersions = 8

// settled is how long a version must have begun before an older one may end:
// every identity has read it by then, and clocks differ by less.
const settled = 10 * time.Minute

// keyArg names the key and its file.
type keyArg struct {
	Key  string `arg:"" enum:"session" help:"Which key: session, from which session keys are derived." placeholder:"KEY"`
	File string `help:"File of the key; default: that of berth up. It must be the same for every identity." placeholder:"FILE" type:"path"`
}

func (k keyArg) path(a *app) string {
	if k.File != "" {
		return k.File
	}
	return filepath.Join(keysDir(a.dir), "identity-session.json")
}

type keyListCmd struct{ keyArg }

func (c *keyListCmd) Run(a *app) error {
	keys, err := keyfile.Read(c.path(a))
	if err != nil {
		return err
	}
	return a.keys(keys)
}

type keyRotateCmd struct {
	keyArg
	In time.Duration `help:"When the version begins, 10s from now at the least; every identity must have the file by then." default:"1m"`
}

func (c *keyRotateCmd) Run(a *app) error {
	if c.In < 10*time.Second {
		return usage("a version begins 10s from now at the earliest, so that every identity knows it before one uses it")
	}
	now := a.time()
	if _, err := keyfile.Add(c.path(a), mostVersions, now.Add(c.In), now); err != nil {
		return err
	}
	return (&keyListCmd{c.keyArg}).Run(a)
}

type keyRetireCmd struct {
	keyArg
	Version uint32 `arg:"" help:"The version that ends." placeholder:"VERSION"`
}

func (c *keyRetireCmd) Run(a *app) error {
	keys, err := keyfile.Read(c.path(a))
	if err != nil {
		return err
	}
	uses, err := a.uses(keys)
	if err != nil {
		return err
	}
	u := uses.of[c.Version]
	switch {
	case uses.strangers > 0:
		return fmt.Errorf("%s derived with no version in this file, so it is not the one that identity uses", count(uses.strangers, "session is", "sessions are"))
	case u.sessions > 0:
		return fmt.Errorf("version %d cannot end: %s derived with it, and would be lost; delete them, or wait until their retention ends", c.Version, count(u.sessions, "session is", "sessions are"))
	case u.deleted > 0:
		return fmt.Errorf("version %d cannot end yet: %s deleted less than 2 hours ago, and a late open must still find that out", c.Version, count(u.deleted, "session derived with it was", "sessions derived with it were"))
	}
	if _, err := keyfile.Retire(c.path(a), c.Version, settled, a.time()); err != nil {
		return err
	}
	return (&keyListCmd{c.keyArg}).Run(a)
}

// use is what hangs on one version.
type use struct{ sessions, deleted int }

// usesOf says how many sessions each version derived, and how many none did.
type usesOf struct {
	of        map[uint32]use
	strangers int
}

// uses asks scheduler for every session, also for those whose end it still
// remembers, and finds the version that its key was derived with.
func (a *app) uses(keys keyfile.Keys) (usesOf, error) {
	out := usesOf{of: map[uint32]use{}}
	op, err := a.operator()
	if err != nil {
		return out, err
	}
	defer op.Close()
	err = records(a.ctx, op, &schedulerv1.ListRequest{Deleted: true}, func(r *schedulerv1.SessionRecord) { out.count(keys, r) })
	return out, err
}

func (u *usesOf) count(keys keyfile.Keys, r *schedulerv1.SessionRecord) {
	gone := r.GetState() == corev1.State_STATE_DELETED
	who := r.GetActor()
	for _, k := range keys {
		key := ids.DeriveSessionKey(k.Secret, who.GetIssuer(), ids.Tenant(who.GetTenant()), who.GetSubject(), ids.SessionName(r.GetSessionName()))
		if string(key) != r.GetSession().GetSession() {
			continue
		}
		n := u.of[k.Version]
		if gone {
			n.deleted++
		} else {
			n.sessions++
		}
		u.of[k.Version] = n
		return
	}
	if !gone { // a delete of what never existed does not say whose it was
		u.strangers++
	}
}

type keysListOut struct {
	Versions []keyVersionOut `json:"versions"`
}

type keyVersionOut struct {
	Version  uint32     `json:"version"`
	Makes    bool       `json:"makes"`
	From     *time.Time `json:"from,omitempty"`
	Sessions int        `json:"sessions"`
	Deleted  int        `json:"deleted"`
}

func (a *app) keys(keys keyfile.Keys) error {
	uses, err := a.uses(keys)
	if err != nil {
		return err
	}
	out := keysListOutOf(keys, uses, a.time())
	return a.print(out, func() { a.renderKeys(out) })
}

func keysListOutOf(keys keyfile.Keys, uses usesOf, now time.Time) keysListOut {
	out := keysListOut{Versions: []keyVersionOut{}}
	for _, k := range keys {
		v := keyVersionOut{Version: k.Version, Makes: keys.Making(now)[0].Version == k.Version, Sessions: uses.of[k.Version].sessions, Deleted: uses.of[k.Version].deleted}
		if !k.From.IsZero() {
			from := k.From.UTC()
			v.From = &from
		}
		out.Versions = append(out.Versions, v)
	}
	return out
}

func (a *app) renderKeys(o keysListOut) {
	rows := [][]string{{"VERSION", "USE", "FROM", "SESSIONS", "DELETED LATELY"}}
	now := a.time()
	for _, v := range o.Versions {
		use, from := "finds sessions", "-"
		if v.From != nil {
			from = v.From.Format(time.RFC3339)
		}
		switch {
		case v.Makes:
			use = "makes sessions"
		case v.From != nil && v.From.After(now):
			use = "begins in " + v.From.Sub(now).Round(time.Second).String()
		}
		rows = append(rows, []string{strconv.FormatUint(uint64(v.Version), 10), use, from, strconv.Itoa(v.Sessions), strconv.Itoa(v.Deleted)})
	}
	table(a.stdout, rows)
}
