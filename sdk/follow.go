package sdk

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// follow pumps streams of the process until it has ended.
func (p *Process) follow() error {
	ctx, cancel := context.WithCancelCause(p.ctx)
	defer cancel(nil)
	stop := context.AfterFunc(p.detached, func() { cancel(ErrDetached) })
	defer stop()
	var end error
	var lost time.Time
	for {
		before := p.out + p.err
		exit, err := p.pump(ctx, p.st)
		if exit != nil {
			p.st.close(nil)
			end = exitError(exit)
			break
		}
		if !isLost(err) {
			return p.giveUp(ctx, err)
		}
		if lost.IsZero() || p.out+p.err > before {
			lost = time.Now()
		}
		st, err := p.again(ctx, lost)
		if err != nil {
			p.st.close(&boxv1.Cancel{})
			return err
		}
		// Send no Cancel: if it arrived after the new stream broke, the host would detach from the process.
		p.st.close(nil)
		p.mu.Lock()
		p.st = st
		p.mu.Unlock()
	}
	if len(p.gaps) > 0 {
		return &LostOutputError{Gaps: p.gaps, Exit: end}
	}
	return end
}

// giveUp ends the stream for good. The process goes with it when the caller's
// context ended or a Writer failed, not when the host ended the stream.
func (p *Process) giveUp(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), ErrDetached) && p.ctx.Err() == nil {
		p.st.close(&boxv1.Cancel{})
		return ErrDetached
	}
	if p.ctx.Err() != nil {
		p.st.close(&boxv1.Cancel{Kill: true})
		return p.ctx.Err()
	}
	e := (*Error)(nil)
	switch {
	case p.s.c.ctx.Err() != nil:
		p.st.close(nil)
		return &UnknownExitError{Reason: "the client was closed", Cause: err}
	case errors.As(err, &e):
		p.st.close(nil)
		return &UnknownExitError{Reason: e.Error(), Cause: err}
	}
	p.st.close(&boxv1.Cancel{Kill: true}) // a Writer failed
	return err
}

// again attaches at the offsets that were reached.
func (p *Process) again(ctx context.Context, since time.Time) (*stream, error) {
	for n := 0; ; n++ {
		st, err := p.s.attach(ctx, p.key, p.out, p.err)
		if err == nil {
			return st, nil
		}
		if ctx.Err() != nil {
			return nil, p.ended(ctx)
		}
		kind := KindOf(err)
		retry := kind == errkind.Unavailable || kind == errkind.Deadline || kind == errkind.Busy || kind == errkind.Exhausted
		if kind == errkind.StaleEpoch {
			err = p.s.whyOver(ctx, err)
		}
		if end := (*EndedError)(nil); errors.As(err, &end) {
			return nil, &UnknownExitError{Reason: end.Reason, Cause: err}
		}
		if p.s.alive() != nil {
			return nil, &UnknownExitError{Reason: "the handle of the session was closed while the stream was lost", Cause: err}
		}
		if kind == errkind.NotFound {
			return nil, &UnknownExitError{Reason: "the sandbox does not know the process any more", Cause: err}
		}
		if !retry || time.Since(since) > p.s.c.cfg.Reattach {
			return nil, &UnknownExitError{Reason: "the stream was lost and could not be attached again: " + err.Error(), Cause: err}
		}
		if pause(ctx, n) != nil {
			return nil, p.ended(ctx)
		}
	}
}

func (p *Process) ended(ctx context.Context) error {
	if p.ctx.Err() != nil {
		return p.ctx.Err()
	}
	return context.Cause(ctx)
}

// pump moves frames of one stream until the exit or an error.
func (p *Process) pump(ctx context.Context, st *stream) (*boxv1.Exit, error) {
	if p.in != nil {
		feedCtx, stop := context.WithCancel(ctx)
		fed := make(chan struct{})
		go func() { defer close(fed); p.in.feed(feedCtx, st) }()
		defer func() { stop(); <-fed }()
	}
	for {
		f, err := st.recv(ctx)
		if err != nil {
			return nil, err
		}
		switch b := f.GetBody().(type) {
		case *boxv1.Frame_Data:
			if err := p.data(b.Data); err != nil {
				return nil, err
			}
			st.took(len(b.Data.GetData()))
		case *boxv1.Frame_Gap:
			p.gap(b.Gap)
		case *boxv1.Frame_InputAck:
			if p.in != nil {
				p.in.acked(b.InputAck.GetOffset())
			}
		case *boxv1.Frame_Exit:
			if b.Exit.GetStdoutBytes() > p.out || b.Exit.GetStderrBytes() > p.err {
				return nil, lostError{errors.New("the exit came before all of the output")}
			}
			return b.Exit, nil
		}
	}
}

// channel returns where a channel stands and where it goes.
func (p *Process) channel(c boxv1.Channel) (offset *uint64, w io.Writer, name string) {
	if c == boxv1.Channel_CHANNEL_STDERR {
		return &p.err, p.stderr, "stderr"
	}
	return &p.out, p.stdout, "stdout"
}

// data writes what is new of a piece. A hole that no gap announced is a loss.
func (p *Process) data(d *boxv1.Data) error {
	at, w, _ := p.channel(d.GetChannel())
	end := d.GetOffset() + uint64(len(d.GetData()))
	if d.GetOffset() > *at {
		return lostError{errors.New("output is missing that no gap announced")}
	}
	if end <= *at {
		return nil
	}
	fresh := d.GetData()[*at-d.GetOffset():]
	*at = end
	if w == nil {
		return nil
	}
	_, err := w.Write(fresh)
	return err
}

func (p *Process) gap(g *boxv1.Gap) {
	at, _, name := p.channel(g.GetChannel())
	if g.GetTo() <= *at {
		return
	}
	p.gaps = append(p.gaps, Gap{Channel: name, From: max(g.GetFrom(), *at), To: g.GetTo()})
	*at = g.GetTo()
}

func exitError(x *boxv1.Exit) error {
	switch how := x.GetHow().(type) {
	case *boxv1.Exit_Code:
		if how.Code == 0 {
			return nil
		}
		return &ExitError{Code: int(how.Code), TimedOut: x.GetTimedOut(), OOM: x.GetOom()}
	case *boxv1.Exit_Signal:
		return &ExitError{Signal: how.Signal, TimedOut: x.GetTimedOut(), OOM: x.GetOom()}
	case *boxv1.Exit_Unknown:
		return &UnknownExitError{Reason: how.Unknown}
	}
	return &UnknownExitError{Reason: "the host told no exit"}
}
