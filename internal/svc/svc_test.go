package svc

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

var quiet = Options{Log: slog.New(slog.DiscardHandler), MinPause: time.Millisecond, MaxPause: 10 * time.Millisecond, StopAfter: 5 * time.Second, MustStart: 5 * time.Second}

func TestOrderOfStartAndStop(t *testing.T) {
	var mu sync.Mutex
	var events []string
	note := func(s string) { mu.Lock(); events = append(events, s); mu.Unlock() }
	make := func(name string) Service {
		return Func(name, func(ctx context.Context, ready func()) error {
			note("start " + name)
			ready()
			<-ctx.Done()
			note("stop " + name)
			return nil
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	g := NewGroup(quiet, make("a"), make("b"), make("c"))
	if g.Healthy() {
		t.Error("healthy before it started")
	}
	err := g.Run(ctx, func() {
		if !g.Healthy() {
			t.Error("ready and not healthy")
		}
		cancel()
	})
	want := []string{"start a", "start b", "start c", "stop c", "stop b", "stop a"}
	if err != nil || !reflect.DeepEqual(events, want) {
		t.Fatalf("%v, %v", events, err)
	}
}

func TestAFailedServiceIsRestarted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	runs := 0
	g := NewGroup(quiet, Func("a", func(ctx context.Context, ready func()) error {
		ready()
		switch runs++; runs {
		case 1:
			return errors.New("lost it")
		case 2:
			panic("oops")
		case 3:
			return nil // without being told
		}
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}))
	if err := g.Run(ctx, nil); err != nil || g.States()[0].Restarts != 3 {
		t.Fatalf("%v, %+v", err, g.States())
	}
}

func TestAServiceThatCannotStartEndsTheGroup(t *testing.T) {
	stopped := false
	g := NewGroup(quiet,
		Func("a", func(ctx context.Context, ready func()) error { ready(); <-ctx.Done(); stopped = true; return nil }),
		Func("b", func(context.Context, func()) error { return errors.New("port 4222 is taken") }))
	err := g.Run(context.Background(), func() { t.Error("ready") })
	if err == nil || !strings.Contains(err.Error(), "b did not start: port 4222 is taken") || !stopped {
		t.Fatalf("%v, %t", err, stopped)
	}
}

type config struct {
	Name string        `yaml:"name"`
	Idle time.Duration `yaml:"idle"`
}

func (c *config) Validate() error {
	if c.Idle <= 0 {
		return errors.New("idle must be more than 0")
	}
	return nil
}

func TestLoadConfig(t *testing.T) {
	for in, want := range map[string]string{
		"":                      "",
		"name: x":               "",
		"idle: 3s":              "",
		"idle: -1s":             "idle must be more",
		"nmae: x":               "nmae",
		"idle: x":               "Duration",
		"name: [":               "yaml",
		"name: a\n---\nname: b": "more than one document",
	} {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(in), 0o600); err != nil {
			t.Fatal(err)
		}
		c := config{Name: "default", Idle: time.Minute}
		err := LoadConfig(path, &c)
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %+v", in, err, c)
		}
	}
	if err := LoadConfig("/nowhere/c.yaml", &config{}); err == nil {
		t.Error("a missing file was accepted")
	}
}
