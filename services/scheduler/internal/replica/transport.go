package replica

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// transport is in memory for one replica and mutual TLS for a group.
func (r *Replica) transport(logger hclog.Logger) (raft.Transport, []raft.Server, error) {
	self := raft.Server{Suffrage: raft.Voter, ID: raft.ServerID(r.cfg.ID)}
	if r.cfg.Bind == "" {
		addr, t := raft.NewInmemTransport(raft.ServerAddress(r.cfg.ID))
		self.Address = addr
		return t, []raft.Server{self}, nil
	}
	l, err := tls.Listen("tcp", r.cfg.Bind, r.cfg.TLS)
	if err != nil {
		return nil, nil, fmt.Errorf("listen for replicas on %s: %w", r.cfg.Bind, err)
	}
	t := &watched{NetworkTransport: raft.NewNetworkTransportWithLogger(&layer{Listener: l, conf: r.cfg.TLS}, 3, 5*time.Second, logger),
		contacts: r.contacts}
	var peers []raft.Server
	for _, p := range r.cfg.Peers {
		peers = append(peers, raft.Server{Suffrage: raft.Voter, ID: raft.ServerID(p.ID), Address: raft.ServerAddress(p.Addr)})
	}
	if len(peers) == 0 {
		self.Address = t.LocalAddr()
		peers = []raft.Server{self}
	}
	return t, peers, nil
}

type layer struct {
	net.Listener
	conf *tls.Config
}

// Dial implements raft.StreamLayer.
func (l *layer) Dial(addr raft.ServerAddress, d time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return (&tls.Dialer{Config: l.conf}).DialContext(ctx, "tcp", string(addr))
}

// newLogger sends raft's own log to slog. Its warnings are the ordinary course of elections, also
// of the first one on a new disk, so they are information here; its errors stay errors.
func newLogger(l *slog.Logger) hclog.Logger {
	return hclog.NewInterceptLogger(&hclog.LoggerOptions{Name: "raft", Level: hclog.Warn, Output: slogWriter{l}, DisableTime: true})
}

type slogWriter struct{ l *slog.Logger }

func (w slogWriter) Write(p []byte) (int, error) {
	line := string(trimLine(p))
	if text, isError := strings.CutPrefix(line, "[ERROR] "); isError {
		w.l.Error(text)
	} else {
		w.l.Info(strings.TrimPrefix(line, "[WARN]  "))
	}
	return len(p), nil
}

func trimLine(p []byte) []byte {
	for len(p) > 0 && (p[len(p)-1] == '\n' || p[len(p)-1] == ' ') {
		p = p[:len(p)-1]
	}
	return p
}
