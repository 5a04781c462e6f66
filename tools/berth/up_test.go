package main

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A number that cannot be is answered with a part of the build that is missing.
func TestUpJudgesItsNumbersFirst(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // whatever is taken ends at once
	good := upCmd{Hosts: 1, Schedulers: 1, NATS: 1, LogLevel: "warn"}
	for name, change := range map[string]func(*upCmd){
		"--hosts 0":      func(c *upCmd) { c.Hosts = 0 },
		"--schedulers 2": func(c *upCmd) { c.Schedulers = 2 },
		"--nats 4":       func(c *upCmd) { c.NATS = 4 },
		"--listen":       func(c *upCmd) { c.Hosts, c.Listen = 2, "127.0.0.1:0" },
		"--idle -1s":     func(c *upCmd) { c.Idle = -time.Second },
	} {
		c := good // with the driver that needs parts of the build
		change(&c)
		var code exitCode
		if err := c.run(ctx, t.TempDir()); !errors.As(err, &code) || code.code != 2 {
			t.Errorf("%s: %v", name, err)
		}
	}
}
