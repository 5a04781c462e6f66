package sdk_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

func newJSON(subject string, body []byte) *nats.Msg {
	return &nats.Msg{Subject: subject, Data: body, Header: nats.Header{"Content-Type": []string{"application/json"}}}
}

// fake starts the in-memory Berth for an example. A real frontend has a
// client file and the tokens of its users.
func fake() (clientFile string, user sdk.TokenSource, stop func()) {
	dir, err := os.MkdirTemp("", "berth-example")
	if err != nil {
		log.Fatal(err)
	}
	srv, err := sdktest.New(sdktest.Options{Dir: dir, Tenants: []string{"acme"}})
	if err != nil {
		log.Fatal(err)
	}
	return srv.ClientFile("acme"), sdk.Token(srv.Token("acme", "ann")), func() { srv.Close(); os.RemoveAll(dir) }
}

func Example() {
	clientFile, user, stop := fake()
	defer stop()
	ctx := context.Background()
	c, err := sdk.Connect(ctx, sdk.Config{ClientFile: clientFile})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	s, err := c.Open(ctx, sdk.OpenOptions{User: user})
	if err != nil {
		log.Fatal(err)
	}
	out, err := s.Output(ctx, "echo", "hello")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s in a session that was %s", out[:len(out)-1], s.Origin())
	// Output: hello in a session that was created
}

func ExampleSession_Run() {
	clientFile, user, stop := fake()
	defer stop()
	ctx := context.Background()
	c, err := sdk.Connect(ctx, sdk.Config{ClientFile: clientFile, User: user})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	s, err := c.Open(ctx, sdk.OpenOptions{})
	if err != nil {
		log.Fatal(err)
	}
	err = s.Run(ctx, sdk.Cmd{Args: []string{"sh", "-c", "cat; exit 3"}, Stdin: strings.NewReader("in and out\n"), Stdout: os.Stdout})
	exit, unknown := (*sdk.ExitError)(nil), (*sdk.UnknownExitError)(nil)
	switch {
	case errors.As(err, &exit):
		fmt.Println("exit code", exit.Code)
	case errors.As(err, &unknown):
		fmt.Println("nobody can know:", unknown.Reason)
	}
	// Output:
	// in and out
	// exit code 3
}

func ExampleFiles_Write() {
	clientFile, user, stop := fake()
	defer stop()
	ctx := context.Background()
	c, err := sdk.Connect(ctx, sdk.Config{ClientFile: clientFile, User: user})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	s, err := c.Open(ctx, sdk.OpenOptions{})
	if err != nil {
		log.Fatal(err)
	}
	n, err := s.Files().Write(ctx, "/work/notes.txt", strings.NewReader("keep me"), sdk.WriteOptions{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(n, "bytes are fsynced on the host")
	if err := s.Close(ctx); err != nil { // asleep: the manifest is committed
		log.Fatal(err)
	}
	s, err = c.Open(ctx, sdk.OpenOptions{})
	if err != nil {
		log.Fatal(err)
	}
	b, err := s.Files().ReadAll(ctx, "/work/notes.txt")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %s\n", s.Origin(), b)
	// Output:
	// 7 bytes are fsynced on the host
	// resumed: keep me
}

func ExampleClient_Events() {
	clientFile, user, stop := fake()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c, err := sdk.Connect(ctx, sdk.Config{ClientFile: clientFile, User: user})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	events, err := c.Events(ctx, sdk.EventFilter{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.Open(ctx, sdk.OpenOptions{}); err != nil {
		log.Fatal(err)
	}
	for e, err := range events {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(e.Name)
		if e.Name == "active" {
			break
		}
	}
	// Output:
	// admitted
	// placed
	// active
}
