// Package first measures what a user waits for: from the request for a session to the first byte that a
// program in it prints. It guarantees that the clock runs on the client's side, over the whole of it.
package first

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// Output opens a session, runs a program and returns the time until its first byte.
func Output(ctx context.Context, client *sdk.Client, o sdk.OpenOptions, argv ...string) (time.Duration, *sdk.Session, error) {
	began := time.Now()
	s, err := client.Open(ctx, o)
	if err != nil {
		return 0, nil, err
	}
	var once sync.Once
	var took time.Duration
	err = s.Run(ctx, sdk.Cmd{Args: argv, Stdout: writer(func(p []byte) {
		once.Do(func() { took = time.Since(began) })
	})})
	if err == nil && took == 0 {
		err = fmt.Errorf("%s printed nothing: %w", argv[0], io.ErrUnexpectedEOF)
	}
	return took, s, err
}

type writer func([]byte)

func (f writer) Write(p []byte) (int, error) {
	if len(p) > 0 {
		f(p)
	}
	return len(p), nil
}

// Claimed reports whether the session's last wake took a warm sandbox.
func Claimed(s *sdk.Session) bool {
	return slices.ContainsFunc(s.Timing().Steps, func(st sdk.Step) bool { return st.Name == "host.claim" })
}

// Together runs n calls at once and returns the first error.
func Together(n int, do func(int) error) error {
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	for i := range n {
		wg.Go(func() {
			if err := do(i); err != nil {
				once.Do(func() { first = err })
			}
		})
	}
	wg.Wait()
	return first
}
