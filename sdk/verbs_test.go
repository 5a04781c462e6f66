package sdk_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

// A handle is good for what it was opened for, also after its grant was renewed, and for nothing else.
func TestAHandleForReadingChangesNothing(t *testing.T) {
	srv := sdktest.Start(t)
	c, full := open(t, srv)
	if err := full.Run(t.Context(), sdk.Command("true")); err != nil {
		t.Fatal(err)
	}
	s, err := c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann")), Verbs: []sdk.Verb{sdk.VerbRead}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Files().List(t.Context(), "/"); err != nil {
		t.Errorf("look: %v", err)
	}
	if err := s.Run(t.Context(), sdk.Command("true")); !errors.Is(err, sdk.ErrDenied) || !strings.Contains(err.Error(), "read alone") {
		t.Errorf("exec: %v", err)
	}
	if err := s.Files().MakeDir(t.Context(), "/new", 0o755); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("change: %v", err)
	}
}

func TestAVerbThatIsNoneIsRefusedBeforeItIsSent(t *testing.T) {
	srv := sdktest.Start(t)
	c, _ := open(t, srv)
	if _, err := c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann")), Verbs: []sdk.Verb{"root"}}); !errors.Is(err, sdk.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

// A stream that is open for longer than a grant lives goes on: its handle shows each renewed grant.
func TestAStreamOutlivesItsGrantWhileTheHandleRenews(t *testing.T) {
	t.Parallel()
	srv, err := sdktest.New(sdktest.Options{Dir: t.TempDir(), Tenants: []string{"acme"}, GrantLife: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	_, s := open(t, srv)
	in, feed := io.Pipe()
	p, err := s.Exec(t.Context(), sdk.Cmd{Args: []string{"cat"}, Stdin: in})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(11 * time.Second) // longer than two grants live
	_ = feed.Close()
	if err := p.Wait(); err != nil || srv.Lapsed() != 0 {
		t.Errorf("%v, %d streams ended with their grant", err, srv.Lapsed())
	}
}
