package proxy

import (
	"errors"
	"io"
	"testing"
)

// A gate that dies, or whose audit log is full, at the end of a connection leaves a trace of it: it is recorded
// before the audit log forgets that it is open, and not forgotten if it is not recorded.
func TestAConnectionStaysOpenUntilItIsRecorded(t *testing.T) {
	for name, answers := range map[string]bool{"ended": true, "not reached": false} {
		t.Run(name, func(t *testing.T) {
			g := open(t, standard, Limits{})
			if answers {
				g.host(echo, "bytes.example.com")
			}
			g.change(func() { g.box.away = errors.New("full") })
			if answers {
				c := g.direct("bytes.example.com")
				_, _ = c.Write([]byte("x"))
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				_ = closeWrite(c)
				_, _ = io.Copy(io.Discard, c)
			} else if _, status, _ := g.through(t, connectTo(g.target("bytes.example.com"))); status < 400 {
				t.Errorf("status %d", status)
			}
			g.box.last(t, 1)
			g.stop()
			g.box.mu.Lock()
			defer g.box.mu.Unlock()
			if g.box.atNote != 1 || g.box.kept != 1 || len(g.box.lives) != 0 {
				t.Errorf("%d were open when it was recorded, %d are kept", g.box.atNote, g.box.kept)
			}
		})
	}
}
