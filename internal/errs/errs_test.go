package errs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

func TestKindSurvivesWrapping(t *testing.T) {
	inner := errs.E("host.wake", errkind.NoCapacity, "h1", "no room")
	err := fmt.Errorf("open: %w", errs.Wrap("scheduler.wake", "s1", inner))
	if errs.Kind(err) != errkind.NoCapacity || !errs.Is(err, errkind.NoCapacity) {
		t.Fatalf("kind %s", errs.Kind(err))
	}
	if !errors.Is(err, errs.Of(errkind.NoCapacity)) || errors.Is(err, errs.Of(errkind.Busy)) {
		t.Fatal("errors.Is by kind")
	}
	if !errors.Is(err, inner) || errors.Is(err, errs.E("host.wake", errkind.NoCapacity, "h1", "no room")) {
		t.Fatal("errors.Is by identity")
	}
	if want := "open: scheduler.wake s1: host.wake h1: no room"; err.Error() != want {
		t.Fatalf("got %q", err)
	}
}

func TestKindOfForeignErrors(t *testing.T) {
	_, bad := ids.ParseTenant("A")
	for _, c := range []struct {
		err  error
		want errkind.Kind
	}{
		{nil, errkind.OK}, {io.EOF, errkind.Internal}, {context.Canceled, errkind.Canceled},
		{fmt.Errorf("x: %w", context.DeadlineExceeded), errkind.Deadline}, {bad, errkind.Invalid},
	} {
		if got := errs.Kind(c.err); got != c.want {
			t.Errorf("%v: %s", c.err, got)
		}
	}
	if errs.Wrap("x", "", nil) != nil {
		t.Error("nil must stay nil")
	}
}

func TestWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		kind := errkind.Kind(rapid.IntRange(1, 40).Draw(t, "kind"))
		text := rapid.String().Draw(t, "text")
		id := rapid.String().Draw(t, "id")
		h := map[string][]string{}
		errs.ToHeader(errs.E("op", kind, id, text), h)
		for k, v := range h {
			if strings.ContainsAny(v[0], "\r\n") || len(v[0]) > 1100 {
				t.Fatalf("%s: %q", k, v[0])
			}
		}
		err := errs.FromHeader("call", h)
		if errs.Kind(err) != kind {
			t.Fatalf("%s became %s", kind, errs.Kind(err))
		}
	})
	if err := errs.FromHeader("call", nil); err != nil {
		t.Fatal(err)
	}
	if err := errs.FromHeader("call", map[string][]string{errs.HeaderCode: {"?"}}); errs.Kind(err) != errkind.Internal {
		t.Fatal(err)
	}
}
