package chaos

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

// Bounds of what a worker does.
const (
	opTime    = 30 * time.Second // of one operation
	endTime   = time.Minute      // until a session answers, or a delete is acknowledged
	maxFiles  = 120
	maxBytes  = 32 << 10
	filesIn   = "/root/chaos"
	listFiles = `[ -d ` + filesIn + ` ] || exit 0; cd ` + filesIn + ` && find . -type f -name 'f[0-9]*' -exec sha256sum {} +`
)

// answer is what a probe found.
type answer struct {
	worker *worker
	took   time.Duration
	files  int // that are saved
	tries  []string
	wrong  []string
}

// worker uses one session as a user does, and knows what must be in it.
type worker struct {
	name    string // of the session
	user    string
	client  *sdk.Client
	history *history
	rng     *rand.Rand
	probes  chan chan<- answer

	// Of the worker's goroutine alone.
	s       *sdk.Session
	epoch   ids.Epoch // of s
	gen     ids.Generation
	ledger  *ledger
	next    int // number of the next file
	deletes int
	wrong   []string

	mu     sync.Mutex
	key    string
	cancel context.CancelFunc // of the operation under way
	failed map[string]int     // operations that failed, by kind
}

// run works until ctx ends.
func (w *worker) run(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case reply := <-w.probes:
			reply <- w.probe(ctx)
		default:
			w.step(ctx)
			w.rest(ctx, time.Duration(50+w.rng.IntN(400))*time.Millisecond)
		}
	}
	w.detach()
}

func (w *worker) rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// ask has the worker leave what it does and look at its session.
func (w *worker) ask(reply chan<- answer) {
	w.probes <- reply // there is room: one probe at a time
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancel != nil {
		w.cancel()
	}
}

// bounded runs one operation that a probe may interrupt.
func (w *worker) bounded(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, opTime)
	defer cancel()
	w.mu.Lock()
	w.cancel = cancel
	w.mu.Unlock()
	if len(w.probes) > 0 {
		cancel()
	}
	err := f(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancel = nil
	if err != nil {
		w.failed[sdk.KindOf(err).String()]++
	}
	return err
}

// step does one thing that a user does. What fails is tried again by a later step.
func (w *worker) step(ctx context.Context) {
	if w.s == nil {
		if w.bounded(ctx, w.open) != nil {
			return
		}
	}
	n := w.rng.IntN(100)
	switch { // most sessions are saved early: what was never saved cannot be handed over
	case len(w.ledger.files) == 0:
		n = 0
	case w.ledger.safe() == 0 && n > 30:
		n = 60
	}
	err := w.bounded(ctx, func(ctx context.Context) error {
		switch {
		case n < 55:
			return w.write(ctx)
		case n < 67:
			return w.checkpoint(ctx)
		case n < 82:
			return w.exec(ctx)
		case n < 91:
			return w.close(ctx)
		case n < 98:
			w.detach()
		}
		return nil
	})
	if n >= 98 {
		w.delete(ctx)
		return
	}
	if err != nil && sdk.KindOf(err) != 0 {
		w.detach()
	}
}

func (w *worker) detach() {
	if w.s != nil {
		w.s.Detach()
		w.s = nil
	}
}

func (w *worker) open(ctx context.Context) error {
	s, err := w.client.Open(ctx, sdk.OpenOptions{Name: w.name, Risk: sdk.OwnCode(), ViaQueue: w.rng.IntN(10) == 0})
	if err != nil {
		return err
	}
	if w.epoch, err = ids.ParseEpoch(s.Epoch()); err != nil {
		return err
	}
	if w.gen, err = ids.ParseGeneration(s.Generation()); err != nil {
		return err
	}
	w.s = s
	w.mu.Lock()
	w.key = s.Key()
	w.mu.Unlock()
	return nil
}

func (w *worker) write(ctx context.Context) error {
	path := fmt.Sprintf("f%04d", w.next)
	if old := w.ledger.known(); len(old) > 0 && (len(w.ledger.files) >= maxFiles || w.rng.IntN(4) == 0) {
		path = old[w.rng.IntN(len(old))]
	} else if len(w.ledger.files) >= maxFiles {
		return nil
	} else {
		w.next++
	}
	raw := make([]byte, 1+w.rng.IntN(maxBytes))
	for i := range raw {
		raw[i] = byte(w.rng.Uint32())
	}
	sum := sha256.Sum256(raw)
	w.ledger.begin(path, hex.EncodeToString(sum[:]), w.epoch)
	_, err := w.s.Files().Write(ctx, filesIn+"/"+path, bytes.NewReader(raw), sdk.WriteOptions{Parents: true})
	if err == nil {
		w.ledger.done(path, time.Now())
	}
	return err
}

func (w *worker) checkpoint(ctx context.Context) error {
	began := time.Now()
	_, err := w.s.Checkpoint(ctx)
	if err == nil {
		w.ledger.saved(began, save{epoch: w.epoch})
	}
	return err
}

func (w *worker) exec(ctx context.Context) error {
	want := fmt.Sprint(w.rng.Uint32())
	out, err := w.s.Output(ctx, "sh", "-c", "sleep 0."+fmt.Sprint(w.rng.IntN(10))+"; echo "+want)
	if err == nil && strings.TrimSpace(string(out)) != want {
		w.wrong = append(w.wrong, fmt.Sprintf("echo %s wrote %q", want, out))
	}
	return err
}

func (w *worker) close(ctx context.Context) error {
	began := time.Now()
	err := w.s.Close(ctx)
	if err == nil {
		w.ledger.saved(began, save{w.epoch, time.Now()})
		w.s = nil
	}
	return err
}

// delete ends this life of the session: a delete always comes to its end.
func (w *worker) delete(ctx context.Context) {
	w.detach()
	var err error
	for end := time.Now().Add(endTime); time.Now().Before(end) && ctx.Err() == nil; w.rest(ctx, 200*time.Millisecond) {
		one, cancel := context.WithTimeout(ctx, opTime)
		err = w.client.DeleteSession(one, sdk.UserSession{Name: w.name})
		cancel()
		if err == nil || errors.Is(err, sdk.ErrNotFound) {
			w.ledger = newLedger()
			w.deletes++
			return
		}
	}
	if ctx.Err() == nil {
		w.wrong = append(w.wrong, fmt.Sprintf("a delete was not acknowledged within %s: %v", endTime, err))
	}
}

// probe opens the session until it answers, and compares its files.
func (w *worker) probe(ctx context.Context) answer {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	a := answer{worker: w}
	var err error
	for {
		one := time.Now()
		if err = w.look(ctx, &a); err == nil || ctx.Err() != nil {
			break
		}
		a.tries = append(a.tries, fmt.Sprintf("after %.1f s: %v", time.Since(one).Seconds(), err))
		w.rest(ctx, 100*time.Millisecond)
	}
	a.took = time.Since(began)
	a.files = w.ledger.safe()
	if a.wrong = append(a.wrong, w.wrong...); err != nil {
		a.wrong = append(a.wrong, fmt.Sprintf("it did not answer within %s: %v", endTime, err))
	}
	w.wrong = nil
	return a
}

func (w *worker) look(ctx context.Context, a *answer) error {
	ctx, cancel := context.WithTimeout(ctx, opTime)
	defer cancel()
	w.detach()
	if err := w.open(ctx); err != nil {
		return err
	}
	out, err := w.s.Output(ctx, "sh", "-c", listFiles)
	if err != nil {
		return err
	}
	found := seen{map[string]string{}, time.Now(), w.epoch}
	for line := range strings.Lines(string(out)) {
		if sum, path, ok := strings.Cut(strings.TrimSpace(line), "  "); ok {
			found.files[strings.TrimPrefix(path, "./")] = sum
		}
	}
	restores, err := w.history.restoresOf(ctx, life{ids.SessionKey(w.s.Key()), w.gen}, w.epoch)
	if err != nil {
		return err
	}
	a.wrong = w.ledger.check(found, restores)
	return nil
}

// keyNow is the session's key, empty before its first open.
func (w *worker) keyNow() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.key
}

func (w *worker) failures() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]int{}
	for k, n := range w.failed {
		out[k] = n
	}
	return out
}
