package gate

import (
	"context"
	"crypto/rand"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/internal/web"
)

const (
	secretLife = 30 * time.Second // a secret that was removed is forgotten within a minute
	maxSecrets = 4096
	revealTime = 5 * time.Second
)

// secrets implements web.Secrets. Each session, at its epoch, asks for its own: what one was given is never
// another's.
type secrets struct {
	conn *bus.Conn
	key  seal.XKey

	mu sync.Mutex
	by map[secretKey]*held
}

type secretKey struct{ tenant, session, epoch, name string }

func keyOf(ref *corev1.SessionRef, name string) (secretKey, error) {
	epoch, err := proto.MarshalOptions{Deterministic: true}.Marshal(ref)
	return secretKey{ref.GetTenant(), ref.GetSession(), string(epoch), name}, err
}

type held struct {
	done   chan struct{}
	secret web.Secret
	err    error
	until  time.Time
}

func newSecrets(conn *bus.Conn) (*secrets, error) {
	key, err := seal.NewKey(rand.Reader)
	return &secrets{conn: conn, key: key, by: map[secretKey]*held{}}, err
}

// Reveal implements web.Secrets.
func (s *secrets) Reveal(ctx context.Context, of session.Session, name string) (web.Secret, error) {
	ref := of.Binding().GetSession()
	k, err := keyOf(ref, name)
	if err != nil {
		return web.Secret{}, err
	}
	s.mu.Lock()
	h := s.by[k]
	if h == nil || h.over() {
		h = &held{done: make(chan struct{})}
		s.by[k] = h
		go s.ask(k, h, &credentialsv1.RevealRequest{Session: ref, Name: name, GateKey: string(s.key.Public())})
	}
	s.mu.Unlock()
	select {
	case <-h.done:
		return h.secret, h.err
	case <-ctx.Done():
		return web.Secret{}, ctx.Err()
	}
}

func (h *held) over() bool {
	select {
	case <-h.done:
		return time.Now().After(h.until)
	default:
		return false
	}
}

// ask asks credentials, for all who wait.
func (s *secrets) ask(k secretKey, h *held, req *credentialsv1.RevealRequest) {
	ctx, cancel := context.WithTimeout(context.Background(), revealTime)
	defer cancel()
	h.secret, h.err = s.reveal(ctx, req)
	h.until = time.Now().Add(secretLife)
	if h.err != nil {
		h.until = time.Now().Add(time.Second)
	}
	close(h.done)
	time.AfterFunc(time.Until(h.until), func() { s.forget(k, h) })
}

func (s *secrets) reveal(ctx context.Context, req *credentialsv1.RevealRequest) (web.Secret, error) {
	s.mu.Lock()
	full := len(s.by) > maxSecrets
	s.mu.Unlock()
	if full {
		return web.Secret{}, errs.E("reveal", errkind.Exhausted, "", "the gate has as many secrets in use as it may")
	}
	reply, err := bus.Invoke[*credentialsv1.RevealReply](ctx, s.conn, "credentials", "reveal", req)
	if err != nil {
		return web.Secret{}, err
	}
	out := web.Secret{}
	for _, h := range reply.GetHosts() {
		n, err := authority.ParseStrict(h)
		if err != nil {
			return web.Secret{}, err
		}
		out.Hosts = append(out.Hosts, n)
	}
	if out.Value, err = s.key.Open(reply.GetSealed()); err != nil {
		return web.Secret{}, err
	}
	out.Value = slices.Clip(out.Value)
	return out, nil
}

// ended drops all that a session was given at its epoch.
func (s *secrets) ended(ref *corev1.SessionRef) {
	of, err := keyOf(ref, "")
	if err != nil {
		return // then it was given nothing
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.by, func(k secretKey, _ *held) bool { k.name = ""; return k == of })
}

// forget drops what was kept long enough. Requests that were given it may still hold it.
func (s *secrets) forget(k secretKey, h *held) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by[k] == h {
		delete(s.by, k)
	}
}
