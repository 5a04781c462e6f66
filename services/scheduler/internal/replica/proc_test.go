package replica

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/berth-dev/berth/internal/testport"
)

// childEnv has the test binary be one replica of a group.
const childEnv = "BERTH_TEST_REPLICA"

func TestMain(m *testing.M) {
	if raw := os.Getenv(childEnv); raw != "" {
		if err := child(raw); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// childConfig is a replica in a process of its own. Files in Dir: cert.pem,
// key.pem, ca.pem; while the file hang is there, no write to the log returns.
type childConfig struct {
	Dir, ID   string
	Peers     []Peer
	HungAfter time.Duration
}

// call is a line to a child; Do is lead, open, verify, count or format.
type call struct {
	Do string
	N  int
}

type answer struct {
	OK  bool
	N   int
	Err string
}

func child(raw string) error {
	var c childConfig
	if err := json.Unmarshal([]byte(raw), &c); err != nil {
		return err
	}
	conf, err := childTLS(c.Dir)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg := Config{Dir: filepath.Join(c.Dir, "raft"), ID: c.ID, Peers: c.Peers, TLS: conf, HungAfter: c.HungAfter, Log: log,
		wrapLog: func(l raft.LogStore) raft.LogStore { return hangs{l, filepath.Join(c.Dir, "hang")} }}
	for _, p := range c.Peers {
		if p.ID == c.ID {
			cfg.Bind = p.Addr
		}
	}
	r, err := Open(cfg)
	if err != nil {
		return err
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q call
		if err := in.Decode(&q); err == io.EOF {
			return r.Close()
		} else if err != nil {
			return err
		}
		if err := out.Encode(answerTo(r, q)); err != nil {
			return err
		}
	}
}

func answerTo(r *Replica, q call) answer {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	switch q.Do {
	case "lead":
		return answer{OK: r.IsLeader()}
	case "verify":
		return said(r.Verify(ctx))
	case "count":
		return answer{OK: true, N: sessions(r)}
	case "format":
		return answer{OK: true, N: r.Format()}
	case "join":
		_, err := r.Apply(ctx, joinEntry())
		return said(err)
	case "open":
		out, err := r.Apply(ctx, openEntry(q.N))
		if err == nil && out.Refused != nil {
			err = fmt.Errorf("refused: %+v", *out.Refused)
		}
		return said(err)
	}
	return answer{Err: "what?"}
}

func said(err error) answer {
	if err != nil {
		return answer{Err: err.Error()}
	}
	return answer{OK: true}
}

func childTLS(dir string) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
	if err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(raw)
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}, nil
}

// hangs is a disk that stops answering while a file is there.
type hangs struct {
	raft.LogStore
	file string
}

// IsMonotonic implements raft.MonotonicLogStore, as the log below does.
func (h hangs) IsMonotonic() bool { return true }

func (h hangs) StoreLogs(l []*raft.Log) error {
	for {
		if _, err := os.Stat(h.file); err != nil {
			return h.LogStore.StoreLogs(l)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// process is a child.
type process struct {
	id  string
	dir string
	cmd *exec.Cmd
	in  *json.Encoder
	out *bufio.Reader
	raw *os.File // of out
}

type processes struct {
	t    *testing.T
	conf map[string]childConfig
	all  map[string]*process
	// binary of a replica; empty: this one.
	binary map[string]string
}

func newProcesses(t *testing.T, n int) *processes {
	t.Helper()
	return newMixedProcesses(t, n, nil)
}

func newMixedProcesses(t *testing.T, n int, binary map[string]string) *processes {
	t.Helper()
	ca := newAuthority(t)
	p := &processes{t: t, conf: map[string]childConfig{}, all: map[string]*process{}, binary: binary}
	t.Cleanup(func() {
		for id, c := range p.conf {
			if raw, _ := os.ReadFile(filepath.Join(c.Dir, "log")); t.Failed() {
				t.Logf("end of the log of %s:\n%s", id, raw[max(0, len(raw)-4000):])
			}
		}
	})
	var peers []Peer
	for i := range n {
		peers = append(peers, Peer{ID: fmt.Sprint("n", i+1), Addr: testport.Addr(t)})
	}
	for _, peer := range peers {
		dir := t.TempDir()
		ca.write(dir, peer.ID)
		p.conf[peer.ID] = childConfig{Dir: dir, ID: peer.ID, Peers: peers, HungAfter: time.Second}
	}
	for _, peer := range peers {
		p.start(peer.ID)
	}
	return p
}

func (a *authority) write(dir, id string) {
	a.t.Helper()
	conf := a.conf(id)
	key, err := x509.MarshalPKCS8PrivateKey(conf.Certificates[0].PrivateKey)
	if err != nil {
		a.t.Fatal(err)
	}
	for name, b := range map[string]*pem.Block{
		"cert.pem": {Type: "CERTIFICATE", Bytes: conf.Certificates[0].Certificate[0]},
		"key.pem":  {Type: "PRIVATE KEY", Bytes: key},
		"ca.pem":   {Type: "CERTIFICATE", Bytes: a.cert.Raw},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
}

func (p *processes) start(id string) {
	p.t.Helper()
	raw, err := json.Marshal(p.conf[id])
	if err != nil {
		p.t.Fatal(err)
	}
	cmd := exec.Command(cmp.Or(p.binary[id], os.Args[0]))
	cmd.Env = append(os.Environ(), childEnv+"="+string(raw))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log, err := os.OpenFile(filepath.Join(p.conf[id].Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stderr = log
	in, err := cmd.StdinPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	c := &process{id: id, dir: p.conf[id].Dir, cmd: cmd, in: json.NewEncoder(in), out: bufio.NewReader(out), raw: out.(*os.File)}
	p.all[id] = c
	p.t.Cleanup(func() { p.kill(c) })
}

// kill ends a child with SIGKILL.
func (p *processes) kill(c *process) {
	_ = c.cmd.Process.Signal(syscall.SIGKILL)
	_ = c.cmd.Wait()
	if p.all[c.id] == c {
		delete(p.all, c.id)
	}
}

func (c *process) signal(s syscall.Signal) { _ = c.cmd.Process.Signal(s) }

// pause stops a child and waits until all of its threads stand still.
func (c *process) pause(t *testing.T) {
	t.Helper()
	c.signal(syscall.SIGSTOP)
	eventually(t, c.id+" stands still", func() bool {
		stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.cmd.Process.Pid))
		for _, s := range stats {
			raw, rerr := os.ReadFile(s)
			_, rest, _ := strings.Cut(string(raw), ") ")
			if rerr != nil || !strings.HasPrefix(rest, "T") {
				return false
			}
		}
		return err == nil && len(stats) > 0
	})
}

// send asks without waiting; answer waits.
func (c *process) send(q call) error { return c.in.Encode(q) }

func (c *process) answer() (a answer, err error) {
	if err := c.raw.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return a, err
	}
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		return a, err
	}
	return a, json.Unmarshal(line, &a)
}

func (c *process) ask(do string, n int) answer {
	if err := c.send(call{do, n}); err != nil {
		return answer{Err: err.Error()}
	}
	a, err := c.answer()
	if err != nil {
		return answer{Err: err.Error()}
	}
	return a
}

// leader waits for a child that leads and has applied everything.
func (p *processes) leader(but ...*process) (lead *process) {
	p.t.Helper()
	eventually(p.t, "one of the processes leads", func() bool {
		for _, c := range p.all {
			if len(but) > 0 && c == but[0] {
				continue
			}
			if c.ask("lead", 0).OK && c.ask("verify", 0).OK {
				lead = c
				return true
			}
		}
		return false
	})
	return lead
}

func (p *processes) must(c *process, do string, n int) answer {
	p.t.Helper()
	a := c.ask(do, n)
	if !a.OK {
		p.t.Fatalf("%s at %s: %s", do, c.id, a.Err)
	}
	return a
}

// TestKilledLeaderLosesNothing kills leaders with SIGKILL.
func TestKilledLeaderLosesNothing(t *testing.T) {
	p := newProcesses(t, 3)
	p.must(p.leader(), "join", 0)
	opened := 0
	for round := range 3 {
		lead := p.leader()
		for range 10 {
			p.must(lead, "open", opened)
			opened++
		}
		start := time.Now()
		p.kill(lead)
		next := p.leader()
		t.Logf("round %d: %s was killed, %s leads after %s", round, lead.id, next.id, time.Since(start).Round(time.Millisecond))
		if a := p.must(next, "count", 0); a.N != opened {
			t.Errorf("round %d: the new leader has %d sessions, %d were acknowledged", round, a.N, opened)
		}
		p.start(lead.id)
		back := p.all[lead.id]
		eventually(t, "the killed one catches up", func() bool { return back.ask("count", 0).N == opened })
	}
}

// TestPausedLeaderThatComesBackVerifiesNothing: its clock stood still for it,
// and answers of before the pause are still in its sockets.
func TestPausedLeaderThatComesBackVerifiesNothing(t *testing.T) {
	p := newProcesses(t, 3)
	p.must(p.leader(), "join", 0)
	for n := range 4 {
		old := p.leader()
		old.pause(t)
		// Asked while it sleeps: the answer is made in its first moment.
		if err := old.send(call{Do: "verify"}); err != nil {
			t.Fatal(err)
		}
		next := p.leader(old)
		p.must(next, "open", n)
		old.signal(syscall.SIGCONT)
		a, err := old.answer()
		if err != nil {
			t.Fatal(err)
		}
		if a.OK && old.ask("count", 0).N != n+1 {
			t.Fatalf("round %d: %s, paused while %s became the leader, verified that it leads", n, old.id, next.id)
		}
	}
}

// TestLeaderWithAHungDiskMakesRoom: hashicorp/raft 503. The others hear its
// heartbeats and would never elect another.
func TestLeaderWithAHungDiskMakesRoom(t *testing.T) {
	p := newProcesses(t, 3)
	lead := p.leader()
	p.must(lead, "join", 0)
	if err := os.WriteFile(filepath.Join(lead.dir, "hang"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if a := lead.ask("open", 1); a.OK {
		t.Fatal("an entry was committed by a leader whose disk hangs")
	}
	_ = lead.cmd.Wait()
	if code := lead.cmd.ProcessState.ExitCode(); code != 70 {
		t.Errorf("it ended with %d, want 70", code)
	}
	delete(p.all, lead.id)
	p.must(p.leader(), "open", 2)
	if err := os.Remove(filepath.Join(lead.dir, "hang")); err != nil {
		t.Fatal(err)
	}
	p.start(lead.id)
	want := p.must(p.leader(), "count", 0).N
	eventually(t, "it catches up with its disk back", func() bool { return p.all[lead.id].ask("count", 0).N == want })
}
