// Package cluster is Berth as a fleet would have it, on one machine: every NATS server, scheduler and
// host is a process in a network namespace of its own, joined by package wire's switch in this
// process, the supervisor; identity, lifecycle, credentials, pool and the development issuer are processes
// beside it. It guarantees that members die with the supervisor, also by kill -9, and that what they
// leave is found and taken over by the next start on the same state folder; that a member which dies
// is started again; that an orderly stop leaves no sandbox; and that nothing has to be cleaned up but
// what hosts clean up anyway: namespaces and devices go with the processes.
package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/berth-dev/berth/tools/berth/stack"
)

// Config of a cluster.
type Config struct {
	Stack stack.Config
	Shape
	// Seed decides what a link's rule does to which packet.
	Seed uint64
	// LogLevel and Spans are for the members.
	LogLevel, Spans string
}

// Shape is how many processes there are of what.
type Shape struct {
	Hosts      int `json:"hosts"`
	Schedulers int `json:"schedulers"`
	NATS       int `json:"nats"`
}

func (s Shape) String() string {
	return fmt.Sprintf("--hosts %d --schedulers %d --nats %d", s.Hosts, s.Schedulers, s.NATS)
}

// Many reports whether more than the one process is asked for.
func (s Shape) Many() bool { return s.Hosts > 1 || s.Schedulers > 1 || s.NATS > 1 }

// maxHosts is what one machine can be asked to pretend.
const maxHosts = 32

// Check says in one sentence what is wrong.
func (s Shape) Check() error {
	odd := func(flag string, n int) error {
		if n != 1 && n != 3 && n != 5 {
			return fmt.Errorf("--%s is %d; it must be 1, 3 or 5, so that a majority decides", flag, n)
		}
		return nil
	}
	if s.Hosts < 1 || s.Hosts > maxHosts {
		return fmt.Errorf("--hosts is %d; it must lie between 1 and %d", s.Hosts, maxHosts)
	}
	return errors.Join(odd("schedulers", s.Schedulers), odd("nats", s.NATS))
}

// made is what a state folder remembers: addresses and members of the groups must stay what they are.
type made struct {
	Shape
	Network string `json:"network"`
}

func madeFile(dir string) string { return filepath.Join(dir, "cluster.json") }

// Made says what a state folder holds; ok is false when it holds no cluster.
func Made(dir string) (s Shape, ok bool, err error) {
	m, ok, err := readMade(dir)
	return m.Shape, ok, err
}

func readMade(dir string) (m made, ok bool, err error) {
	raw, err := os.ReadFile(madeFile(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return m, false, nil
	}
	if err == nil {
		err = json.Unmarshal(raw, &m)
	}
	if err != nil {
		return m, false, fmt.Errorf("read what the state folder holds: %w", err)
	}
	return m, true, nil
}

// fits refuses a shape that the state folder cannot take on. Hosts may be added.
func (s Shape) fits(dir string) (m made, err error) {
	m, ok, err := readMade(dir)
	if err != nil {
		return m, err
	}
	if !ok {
		if _, err := os.Stat(filepath.Join(dir, "scheduler")); err == nil {
			return m, fmt.Errorf("the state folder %s holds what one process kept; give --hosts, --schedulers and --nats a folder of their own", dir)
		}
		m.Shape = s
		return m, nil
	}
	if s.Schedulers != m.Schedulers || s.NATS != m.NATS || s.Hosts < m.Hosts {
		return m, fmt.Errorf("the state folder %s was made with %s; only hosts can be added", dir, m.Shape)
	}
	m.Shape = s
	return m, nil
}

func (m made) write(dir string) error {
	raw, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(madeFile(dir), append(raw, '\n'), 0o600)
}

// check refuses what members in namespaces of their own cannot have.
func (c *Config) check() error {
	if err := c.Shape.Check(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return stack.ErrNotRoot
	}
	if len(c.Stack.Host.Tiers) == 0 {
		c.Stack.Host.Tiers = slices.Clone(stack.FewTiers)
	}
	if err := c.Stack.Complete(); err != nil {
		return err
	}
	store, _, _ := strings.Cut(c.Stack.Host.Disk.Store, ":")
	switch {
	case store != "nats" && store != "file":
		return fmt.Errorf("--store %s: hosts in namespaces of their own reach nothing outside; use nats:// or file:///folder", c.Stack.Host.Disk.Store)
	case c.Stack.Telemetry.OTLPEndpoint != "":
		return errors.New("--otlp works with one process only: members in namespaces of their own reach nothing outside; use --spans")
	case c.Stack.Host.Socket != "":
		return errors.New("host.socket works with one process only: each host has a containerd of its own")
	case c.Stack.Host.Disk.Device != "":
		return errors.New("host.disk.device works with one process only: hosts cannot share a device")
	}
	return nil
}
