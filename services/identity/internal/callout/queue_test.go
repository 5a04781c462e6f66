package callout

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go/micro"
)

// counted is a question that is sealed to nobody, and tells when it is read.
type counted struct {
	micro.Request
	read func()
}

func (c counted) Data() []byte           { c.read(); return nil }
func (c counted) Headers() micro.Headers { return nil }

// A flood of logins is followed by answers to those who still wait, not by answers to all who have gone,
// and by few words in the log.
func TestAFloodOfLoginsIsNotAnsweredLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var mu sync.Mutex
		ctx, stop := context.WithCancel(t.Context())
		r := &Responder{cfg: Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, ctx: ctx, stop: stop, queue: make(chan asked, waiting)}
		read := 0
		flood := counted{read: func() { mu.Lock(); read++; mu.Unlock() }}
		for range 3 * waiting {
			r.take(flood)
		}
		time.Sleep(patience + time.Millisecond)
		r.under.Go(r.work)
		synctest.Wait()
		if mu.Lock(); read != 0 {
			t.Errorf("%d questions were read whose clients have gone", read)
		}
		mu.Unlock()
		r.take(flood)
		synctest.Wait()
		if mu.Lock(); read != 1 {
			t.Error("who comes after the flood is not answered")
		}
		mu.Unlock()
		stop()
		r.under.Wait()
		r.take(flood)
		r.under.Go(r.work)
		if r.under.Wait(); read != 2 {
			t.Error("who came before the stop is not answered")
		}
		if n := strings.Count(log.String(), "level=WARN"); n == 0 || n > 3 {
			t.Errorf("the log has %d lines of it", n)
		}
	})
}
