// Package control is how a test or a person handles the members and links of a cluster on one
// machine: HTTP with JSON on the socket links.sock in its state folder, which only its owner can
// reach. It guarantees that a refused request changed nothing, and that an answered one holds: a
// member that was killed has ended, one that was restarted is ready.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/tools/berth/cluster/wire"
)

// Socket is where the supervisor of a state folder listens.
func Socket(dir string) string { return filepath.Join(dir, "links.sock") }

// Root is the port of the machine's own namespace: clients, identity, lifecycle, credentials and pool.
const Root = "root"

// States of a member.
const (
	Starting = "starting"
	Ready    = "ready"
	Paused   = "paused"
	Waiting  = "waiting" // for its next start, after it failed
	Held     = "held"    // killed, and not started until it is told
	Stopped  = "stopped"
)

// Member is one process of the cluster.
type Member struct {
	Name     string   `json:"name"`
	Service  string   `json:"service"`
	PID      int      `json:"pid"` // 0: it does not run
	State    string   `json:"state"`
	Address  string   `json:"address"` // in the cluster's network
	Log      string   `json:"log"`
	Netns    uint64   `json:"netns"` // inode of its network namespace
	Dir      string   `json:"dir,omitempty"`
	Marks    []string `json:"marks,omitempty"` // what tells a host's processes, mounts and cgroups from others
	Restarts int      `json:"restarts"`
	Error    string   `json:"error,omitempty"` // of the last failure
}

// Link is what holds for packets from one port to another.
type Link struct {
	From string    `json:"from"`
	To   string    `json:"to"`
	Rule wire.Rule `json:"rule"`
}

// Links is every rule that is not the plain one, and what the ports carried.
type Links struct {
	Ports  []string               `json:"ports"`
	Seed   uint64                 `json:"seed"`
	Links  []Link                 `json:"links"`
	Counts map[string]wire.Counts `json:"counts"`
}

// Set changes links. From and To are names of ports, or *; To may be empty for *.
type Set struct {
	From   string    `json:"from"`
	To     string    `json:"to"`
	OneWay bool      `json:"one_way,omitempty"` // only packets from From to To
	Rule   wire.Rule `json:"rule"`
}

// Verbs of Act.
const (
	Kill    = "kill"    // SIGKILL; it is started again as after any failure
	Hold    = "hold"    // SIGKILL; it stays away until restart
	Pause   = "pause"   // SIGSTOP
	Resume  = "resume"  // SIGCONT
	Restart = "restart" // ends it in order, if it runs, and starts it
)

// Act does something to members.
type Act struct {
	Name string `json:"name"` // or *
	Verb string `json:"verb"`
}

// Failure is the body of an answer that is not 200.
type Failure struct {
	Error string `json:"error"`
}

// Client talks to a running supervisor.
type Client struct{ http http.Client }

// callTime bounds one request; a restart of every member may take a while.
const callTime = 2 * time.Minute

// maxAnswer bounds what is read of an answer.
const maxAnswer = 4 << 20

// Dial returns a client for a state folder; nothing is connected yet.
func Dial(dir string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", Socket(dir))
	}
	return &Client{http.Client{Timeout: callTime, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// Links returns what holds on the links.
func (c *Client) Links(ctx context.Context) (out Links, err error) {
	return out, c.do(ctx, http.MethodGet, "/links", nil, &out)
}

// Set changes links and returns what holds then.
func (c *Client) Set(ctx context.Context, s Set) (out Links, err error) {
	return out, c.do(ctx, http.MethodPost, "/links", s, &out)
}

// Members returns every member.
func (c *Client) Members(ctx context.Context) (out []Member, err error) {
	return out, c.do(ctx, http.MethodGet, "/members", nil, &out)
}

// Act does something to members and returns those that it touched.
func (c *Client) Act(ctx context.Context, a Act) (out []Member, err error) {
	return out, c.do(ctx, http.MethodPost, "/members", a, &out)
}

func (c *Client) do(ctx context.Context, method, path string, body, out any) error {
	var send io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		send = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://cluster"+path, send)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return fmt.Errorf("no cluster runs on this state folder (berth up --hosts 3 --schedulers 3 --nats 3): %w", op.Err)
		}
		return err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		var f Failure
		if json.Unmarshal(raw, &f) != nil || f.Error == "" {
			f.Error = resp.Status
		}
		return errors.New(f.Error)
	}
	return json.Unmarshal(raw, out)
}
