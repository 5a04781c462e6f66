package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/internal/bus"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	loginTime = 5 * time.Second
	loginers  = 8
	revokes   = 100
)

var silent = bus.WithLogger(slog.New(slog.DiscardHandler))

// logins measures logins from several clients at once: by an nkey that the server knows itself, by one that it
// asks identity about, and by users' tokens, each new.
func (b *bench) logins(ctx context.Context, up *installation) error {
	byKey := func(c subjects.Caller) (func(context.Context) error, error) {
		login, err := bus.ReadLogin(bus.LoginPath(up.dir, c))
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error {
			conn, err := bus.Connect(ctx, login, silent)
			if err == nil {
				conn.Close()
			}
			return err
		}, nil
	}
	static, err := byKey(subjects.Service("lifecycle"))
	if err != nil {
		return err
	}
	asked, err := byKey(subjects.Frontend(tenant, "cli"))
	if err != nil {
		return err
	}
	var rates [3]float64
	for i, login := range []func(context.Context) error{static, asked, func(ctx context.Context) error {
		conn, err := up.user(ctx, fmt.Sprint("u", up.n.Load()))
		if err == nil {
			conn.Close()
		}
		return err
	}} {
		if rates[i], err = loginRate(ctx, login); err != nil {
			return err
		}
	}
	peer := "logins of a user that the server knows itself"
	b.set.Add(figures.Result{Name: "logins a second through the callout, by nkey", Value: rates[1], Unit: "1/s", Floor: rates[0], FloorOf: peer}, figures.None)
	b.set.Add(figures.Result{Name: "logins a second through the callout, by a user's new token", Value: rates[2], Unit: "1/s", Floor: rates[0], FloorOf: peer}, figures.None)
	return nil
}

func loginRate(ctx context.Context, login func(context.Context) error) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 6*loginTime)
	defer cancel()
	var n atomic.Int64
	failed := make(chan error, loginers)
	began := time.Now()
	var wg sync.WaitGroup
	for range loginers {
		wg.Go(func() {
			for time.Since(began) < loginTime {
				if err := login(ctx); err != nil {
					failed <- err
					return
				}
				n.Add(1)
			}
		})
	}
	wg.Wait()
	select {
	case err := <-failed:
		return 0, err
	default:
		return float64(n.Load()) / time.Since(began).Seconds(), nil
	}
}

// user logs a user in with a token of its own.
func (i *installation) user(ctx context.Context, name string, opts ...nats.Option) (*bus.Conn, error) {
	token, err := i.mint(name)
	if err != nil {
		return nil, err
	}
	issuer, err := i.issuer()
	if err != nil {
		return nil, err
	}
	login, err := bus.ReadLogin(bus.LoginPath(i.dir, subjects.Frontend(tenant, "cli"))) // for the address and its roots
	if err != nil {
		return nil, err
	}
	login.Name, login.Seed = subjects.Frontend(tenant, subjects.UserFrontend(issuer, name)).Name(), ""
	return bus.Connect(ctx, login, silent, bus.WithToken(func() string { return token }), bus.WithNATS(opts...))
}

func (i *installation) issuer() (string, error) {
	return devissuer.URL(i.dir+"/keys", ids.Tenant(tenant))
}

// revoke measures from the call that suspends a user until its connection is gone.
func (b *bench) revoke(ctx context.Context, up *installation) error {
	op, err := sdk.Connect(ctx, sdk.Config{ClientFile: up.ClientFile("operator")})
	if err != nil {
		return err
	}
	defer op.Close()
	issuer, err := up.issuer()
	if err != nil {
		return err
	}
	suspend := func(user string, on bool) error {
		return op.Call(ctx, "identity", "suspend", &identityv1.SuspendRequest{Suspended: on,
			What: &identityv1.Suspension{Tenant: tenant, Issuer: issuer, Subject: user, Reason: "the benchmark ends it"}}, &identityv1.SuspendReply{})
	}
	var took []time.Duration
	for n := range revokes {
		user, gone := fmt.Sprint("revoked", n), make(chan time.Time, 8)
		conn, err := up.user(ctx, user, nats.DisconnectErrHandler(func(*nats.Conn, error) { gone <- time.Now() }))
		if err != nil {
			return err
		}
		began := time.Now()
		if err := suspend(user, true); err != nil {
			conn.Close()
			return err
		}
		select {
		case at := <-gone:
			took = append(took, at.Sub(began))
		case <-time.After(30 * time.Second):
			conn.Close()
			return fmt.Errorf("user %d is still connected after 30 s", n)
		}
		conn.Close()
		if err := suspend(user, false); err != nil {
			return err
		}
	}
	b.set.Add(figures.Result{Name: "from suspending a user until it is disconnected, p50", Value: figures.Quantile(took, 0.5), Unit: "ms"}, figures.None)
	b.set.Add(figures.Result{Name: "from suspending a user until it is disconnected, p99", Value: figures.Quantile(took, 0.99), Unit: "ms"}, figures.AtMost(2000, "ms"))
	return nil
}
