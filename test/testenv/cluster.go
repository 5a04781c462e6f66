package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
	"github.com/berth-dev/berth/tools/berth/upproc"
)

// shape is what a cluster has unless the arguments say otherwise.
var shape = []string{"--hosts", "3", "--schedulers", "3", "--nats", "3"}

// Cluster starts three hosts, three schedulers and three NATS servers, each a
// process in a network namespace of its own, or skips the test with the reason
// why this machine cannot. args are further arguments of `berth up`; those that
// say how many there are of what replace the default.
func Cluster(t *testing.T, args ...string) *Env {
	t.Helper()
	e := PrepareCluster(t, args...)
	e.Up()
	return e
}

// PrepareCluster makes the folder without starting anything.
func PrepareCluster(t *testing.T, args ...string) *Env {
	t.Helper()
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skipf("no TUN devices here: %v", err)
	}
	if !upproc.Many(args) {
		args = append(slices.Clone(shape), args...)
	}
	return Prepare(t, args...)
}

// callTime bounds one request to the supervisor or the scheduler.
const callTime = 2 * time.Minute

func (e *Env) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(e.t.Context()), callTime)
}

// Member is one process of a cluster, by its name in up.json: nats-1,
// scheduler-2, host-3, identity, lifecycle, credentials, devissuer.
type Member struct {
	e    *Env
	Name string
}

// Member names a member; it need not run.
func (e *Env) Member(name string) Member {
	e.t.Helper()
	if !e.Many {
		e.t.Fatalf("%s is no process of its own in one process", name)
	}
	return Member{e, name}
}

// Members is how every member is now.
func (e *Env) Members() []control.Member {
	e.t.Helper()
	ctx, cancel := e.context()
	defer cancel()
	all, err := control.Dial(e.Dir).Members(ctx)
	if err != nil {
		e.t.Fatal(err)
	}
	return all
}

// Show is how it is now.
func (m Member) Show() control.Member {
	m.e.t.Helper()
	for _, x := range m.e.Members() {
		if x.Name == m.Name {
			return x
		}
	}
	m.e.t.Fatalf("there is no member %s", m.Name)
	panic("unreachable")
}

func (m Member) act(verb string) {
	m.e.t.Helper()
	ctx, cancel := m.e.context()
	defer cancel()
	if _, err := control.Dial(m.e.Dir).Act(ctx, control.Act{Name: m.Name, Verb: verb}); err != nil {
		m.e.t.Fatal(err)
	}
}

// Kill ends it with SIGKILL; the supervisor starts it again.
func (m Member) Kill() { m.e.t.Helper(); m.act(control.Kill) }

// Hold ends it with SIGKILL, and it stays away until Restart.
func (m Member) Hold() { m.e.t.Helper(); m.act(control.Hold) }

// Pause stops its threads; those of its children, and sandboxes, go on.
func (m Member) Pause() { m.e.t.Helper(); m.act(control.Pause) }

// Resume lets a paused one go on.
func (m Member) Resume() { m.e.t.Helper(); m.act(control.Resume) }

// Restart ends it in order, if it runs, and returns when the next one is ready;
// a scheduler is taken as ready when it runs.
func (m Member) Restart() { m.e.t.Helper(); m.act(control.Restart) }

// Crash ends everything of a host at once, as the end of its machine does:
// hostagent, containerd, watchdog and sandboxes, and what the kernel holds for
// them. It stays away until Restart.
func (m Member) Crash() {
	m.e.t.Helper()
	info := m.Show()
	if info.Service != "hostagent" {
		m.e.t.Fatalf("%s is no host", m.Name)
	}
	m.Hold()
	m.e.clear(info.Dir, info.Marks)
}

// Gone says that a host that was crashed is not started any more at the end, for it was removed; so
// what its next start would clean is cleaned here.
func (m Member) Gone() {
	m.e.t.Helper()
	m.e.gone[m.Name] = true
	for _, mark := range m.Show().Marks {
		var err error
		switch {
		case strings.HasPrefix(mark, "/run/berth/"):
			err = os.RemoveAll(mark)
		case !strings.Contains(mark, "/"):
			tops, _ := filepath.Glob("/sys/fs/cgroup/*/" + mark)
			for _, top := range tops {
				err = errors.Join(err, removeTree(top))
			}
		}
		if err != nil {
			m.e.t.Errorf("remove the cgroups of %s: %v", m.Name, err)
		}
	}
}

// removeTree removes a cgroup and those below it, which nobody is in.
func removeTree(dir string) (err error) {
	below, _ := filepath.Glob(filepath.Join(dir, "*", "cgroup.procs"))
	for _, file := range below {
		err = errors.Join(err, removeTree(filepath.Dir(file)))
	}
	return errors.Join(err, os.Remove(dir))
}

// KillContainerd ends the private containerd of a host; its hostagent starts it again.
func (m Member) KillContainerd() {
	m.e.t.Helper()
	dir := filepath.Join(m.Dir(), "sandboxes", "containerd")
	raw, err := os.ReadFile(filepath.Join(dir, "containerd.pid"))
	if err != nil {
		m.e.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		m.e.t.Fatal(err)
	}
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if !strings.Contains(string(cmdline), dir) {
		return // it has ended by itself, and another process may have its number
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		m.e.t.Fatal(err)
	}
}

// Dir is where a host or a scheduler keeps what is its own.
func (m Member) Dir() string { m.e.t.Helper(); return m.Show().Dir }

// Set gives the links between two members a rule, in both directions. A name
// may be root, which is this machine with its clients and the other services;
// * or host-* mean several.
func (e *Env) Set(a, b string, r wire.Rule) {
	e.t.Helper()
	e.link(control.Set{From: a, To: b, Rule: r})
}

// SetOneWay is Set for packets from one to the other only.
func (e *Env) SetOneWay(from, to string, r wire.Rule) {
	e.t.Helper()
	e.link(control.Set{From: from, To: to, OneWay: true, Rule: r})
}

// Cut lets nothing through between two members.
func (e *Env) Cut(a, b string) { e.t.Helper(); e.Set(a, b, wire.Rule{Cut: true}) }

// Delay delays packets between two members, each way.
func (e *Env) Delay(a, b string, d time.Duration) { e.t.Helper(); e.Set(a, b, wire.Rule{Delay: d}) }

// Heal undoes every rule between two members; Heal("*", "*") all of them.
func (e *Env) Heal(a, b string) { e.t.Helper(); e.Set(a, b, wire.Rule{}) }

func (e *Env) link(s control.Set) {
	e.t.Helper()
	if !e.Many {
		e.t.Fatal("there are no links in one process")
	}
	ctx, cancel := e.context()
	defer cancel()
	if _, err := control.Dial(e.Dir).Set(ctx, s); err != nil {
		e.t.Fatal(err)
	}
}

// undo lets an orderly stop find everybody: no link is cut, and who was held or
// paused is there.
func (e *Env) undo() {
	ctx, cancel := e.context()
	defer cancel()
	c := control.Dial(e.Dir)
	if _, err := c.Set(ctx, control.Set{From: "*", To: "*"}); err != nil {
		e.t.Errorf("heal every link: %v", err)
		return
	}
	all, err := c.Members(ctx)
	if err != nil {
		e.t.Error(err)
	}
	for _, m := range all {
		verb := map[string]string{control.Paused: control.Resume, control.Held: control.Restart}[m.State]
		if verb == "" || e.gone[m.Name] {
			continue
		}
		if _, err := c.Act(ctx, control.Act{Name: m.Name, Verb: verb}); err != nil {
			e.t.Errorf("%s %s: %v", verb, m.Name, err)
		}
	}
}

// call asks the scheduler as the operator, and again until callTime has passed.
func (e *Env) call(method string, req, reply proto.Message) {
	e.t.Helper()
	ctx, cancel := e.context()
	defer cancel()
	op, err := sdk.Connect(ctx, sdk.Config{ClientFile: e.ClientFile("operator")})
	if err != nil {
		e.t.Fatal(err)
	}
	defer op.Close()
	for {
		if err = op.Call(ctx, "scheduler", method, req, reply); err == nil {
			return
		}
		select {
		case <-ctx.Done():
			e.t.Fatalf("ask the scheduler for %s: %v", method, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Leader is the scheduler that leads now, as a member's name.
func (e *Env) Leader() string {
	e.t.Helper()
	for {
		reply := &schedulerv1.PeersReply{}
		e.call("peers", &schedulerv1.PeersRequest{}, reply)
		for _, p := range reply.GetPeers() {
			if p.GetLeader() {
				return p.GetId()
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Record is what the scheduler knows of a session.
func (e *Env) Record(key string) *schedulerv1.SessionRecord {
	e.t.Helper()
	reply := &schedulerv1.ShowReply{}
	e.call("show", &schedulerv1.ShowRequest{Session: key}, reply)
	return reply.GetRecord()
}

// HostOf is the host that a session is, or was last, active on.
func (e *Env) HostOf(key string) string { e.t.Helper(); return e.Record(key).GetHost() }

// Info is what up.json says of the members.
func (e *Env) Info() (out struct{ Members []control.Member }) {
	e.t.Helper()
	raw, err := os.ReadFile(filepath.Join(e.Dir, "up.json"))
	if err == nil {
		err = json.Unmarshal(raw, &out)
	}
	if err != nil {
		e.t.Fatal(err)
	}
	return out
}
