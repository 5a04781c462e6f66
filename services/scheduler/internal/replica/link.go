package replica

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/berth-dev/berth/internal/certs"
)

const (
	// greetTime bounds the handshake and the greeting of a connection.
	greetTime = 5 * time.Second
	greetMax  = 4 << 10
	// greetAtOnce bounds connections that have not shown who they are.
	greetAtOnce = 64
)

// hello is the first word on a connection, welcome its answer; both are JSON
// after their length. A certificate shows that the peer is who it says; the
// folder, that it still has what it promised.
type hello struct {
	ID     string `json:"id"`
	Want   string `json:"want"`
	Folder string `json:"folder"`
	// New: no replica yet, only asks whether it may begin with these peers.
	New   bool   `json:"new,omitempty"`
	Peers string `json:"peers,omitempty"`
}

type welcome struct {
	Folder  string `json:"folder"`
	Refused string `json:"refused,omitempty"`
	// Reads is the newest format of log entries that the replica reads.
	Reads int `json:"reads,omitempty"`
}

// refused is a peer's word that it will not speak with this replica.
type refused struct{ text string }

func (r refused) Error() string { return r.text }

// link is raft's stream layer: mutual TLS 1.3, where a certificate must name
// the replica id that its holder speaks for, then a greeting.
type link struct {
	self, addr, peers string
	reads             int // newest format of log entries that this replica reads
	conf              *tls.Config
	log               *slog.Logger
	pins              *pins
	// idOf knows who is at an address, mayTalk who may speak with this replica.
	idOf    func(raft.ServerAddress) (string, bool)
	mayTalk func(id string) error
	wrap    func(c net.Conn, dialed bool) net.Conn // for tests

	listener net.Listener
	ready    chan net.Conn
	slots    chan struct{}
	done     chan struct{}
	once     sync.Once
	refusals atomic.Uint64
	mu       sync.Mutex
	open     map[net.Conn]struct{}
}

// start accepts connections until Close.
func (l *link) start() {
	l.ready, l.slots = make(chan net.Conn), make(chan struct{}, greetAtOnce)
	l.done, l.open = make(chan struct{}), map[net.Conn]struct{}{}
	go func() {
		for {
			c, err := l.listener.Accept()
			if err != nil {
				select {
				case <-l.done:
					return
				case <-time.After(10 * time.Millisecond): // out of descriptors, mostly
				}
				continue
			}
			select {
			case l.slots <- struct{}{}:
				go l.receive(c)
			default:
				_ = c.Close()
			}
		}
	}()
}

func (l *link) receive(raw net.Conn) {
	defer func() { <-l.slots }()
	if l.wrap != nil {
		raw = l.wrap(raw, false)
	}
	c := &conn{Conn: tls.Server(raw, l.conf), link: l}
	if !l.track(c) {
		_ = raw.Close()
		return
	}
	asks, err := l.greeted(c)
	if err != nil {
		l.refusals.Add(1)
		l.log.Info("refused a connection from a replica", "from", raw.RemoteAddr(), "error", err)
	}
	if err != nil || asks {
		_ = c.Close()
		return
	}
	select {
	case l.ready <- c:
	case <-l.done:
		_ = c.Close()
	}
}

// greeted reports whether the other side only asks.
func (l *link) greeted(c *conn) (asks bool, err error) {
	_ = c.SetDeadline(time.Now().Add(greetTime))
	t := c.Conn.(*tls.Conn)
	if err := t.Handshake(); err != nil {
		return false, err
	}
	var h hello
	if err := readFrame(c, &h); err != nil {
		return false, fmt.Errorf("read greeting: %w", err)
	}
	verdict := l.judge(h, t.ConnectionState().PeerCertificates[0])
	w := welcome{Folder: l.pins.own, Reads: l.reads}
	if verdict != nil {
		w.Refused = verdict.Error()
	}
	if err := writeFrame(c, w); err != nil {
		return false, fmt.Errorf("greet: %w", err)
	}
	_ = c.SetDeadline(time.Time{})
	return h.New, verdict
}

func (l *link) judge(h hello, cert *x509.Certificate) error {
	if !names(cert, h.ID) {
		return fmt.Errorf("the certificate names %q, not replica %.40q", append(cert.DNSNames, cert.Subject.CommonName), h.ID)
	}
	if h.Want != l.self {
		return fmt.Errorf("replica %s is here, not %.40q", l.self, h.Want)
	}
	if err := l.mayTalk(h.ID); err != nil {
		return err
	}
	if !h.New {
		return l.pins.pin(h.ID, h.Folder)
	}
	if l.peers != "" && h.Peers != l.peers {
		return fmt.Errorf("replica %s was given other peers (%s) than replica %s (%.512s)", l.self, l.peers, h.ID, h.Peers)
	}
	return l.pins.check(h.ID, h.Folder)
}

// names: a certificate with a SPIFFE ID speaks for the replica that it names; one without, for the
// replica ids that are its DNS names or its common name.
func names(c *x509.Certificate, id string) bool {
	if len(c.URIs) > 0 {
		return certs.Only(certs.RoleScheduler, id)(c) == nil && id != ""
	}
	return id != "" && (c.Subject.CommonName == id || slices.Contains(c.DNSNames, id))
}

// Dial implements raft.StreamLayer.
func (l *link) Dial(addr raft.ServerAddress, d time.Duration) (net.Conn, error) {
	id, ok := l.idOf(addr)
	if !ok {
		return nil, fmt.Errorf("no replica is known at %s", addr)
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(d, greetTime))
	defer cancel()
	c, err := l.dial(ctx, string(addr), hello{ID: l.self, Want: id, Folder: l.pins.own})
	if err != nil {
		return nil, err // not a nil *conn in an interface
	}
	return c, nil
}

// ask asks a peer whether this replica may begin with an empty folder.
func (l *link) ask(ctx context.Context, p Peer) error {
	ctx, cancel := context.WithTimeout(ctx, greetTime)
	defer cancel()
	c, err := l.dial(ctx, p.Addr, hello{ID: l.self, Want: p.ID, Folder: l.pins.own, New: true, Peers: l.peers})
	if err != nil {
		return err
	}
	return c.Close()
}

func (l *link) dial(ctx context.Context, addr string, h hello) (*conn, error) {
	conf := l.conf.Clone()
	conf.ServerName = h.Want // the certificate must name the replica, wherever it is
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if l.wrap != nil {
		raw = l.wrap(raw, true)
	}
	c := &conn{Conn: tls.Client(raw, conf), link: l}
	if !l.track(c) {
		_ = raw.Close()
		return nil, net.ErrClosed
	}
	if err := l.greet(ctx, c, h); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("greet replica %s at %s: %w", h.Want, addr, err)
	}
	return c, nil
}

func (l *link) greet(ctx context.Context, c *conn, h hello) error {
	until, _ := ctx.Deadline()
	_ = c.SetDeadline(until)
	t := c.Conn.(*tls.Conn)
	if err := t.HandshakeContext(ctx); err != nil {
		return err
	}
	if cert := t.ConnectionState().PeerCertificates[0]; !names(cert, h.Want) {
		return fmt.Errorf("the certificate there is not replica %.40q's", h.Want)
	}
	if err := writeFrame(c, h); err != nil {
		return err
	}
	var w welcome
	if err := readFrame(c, &w); err != nil {
		return err
	}
	if w.Refused != "" {
		return refused{w.Refused}
	}
	c.reads = cmp.Or(w.Reads, silentFormat)
	_ = c.SetDeadline(time.Time{})
	if h.New {
		return l.pins.check(h.Want, w.Folder)
	}
	return l.pins.pin(h.Want, w.Folder)
}

// Accept implements net.Listener.
func (l *link) Accept() (net.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Addr implements net.Listener: where the others reach this replica.
func (l *link) Addr() net.Addr { return address(l.addr) }

type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }

// Close implements net.Listener; it ends the connections too.
func (l *link) Close() error {
	var err error
	l.once.Do(func() {
		close(l.done)
		err = l.listener.Close()
		l.mu.Lock()
		all := make([]net.Conn, 0, len(l.open))
		for c := range l.open {
			all = append(all, c)
		}
		l.mu.Unlock()
		for _, c := range all {
			_ = c.Close()
		}
	})
	return err
}

func (l *link) track(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.done:
		return false
	default:
	}
	l.open[c] = struct{}{}
	return true
}

// conn is forgotten when it is closed.
type conn struct {
	net.Conn
	link  *link
	reads int // newest format of log entries that the dialled replica reads
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.link.mu.Lock()
	delete(c.link.open, c)
	c.link.mu.Unlock()
	// Closing the TLS connection waits for its peer, which may be stopped.
	return c.Conn.(*tls.Conn).NetConn().Close()
}

func writeFrame(w io.Writer, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(raw))), raw...))
	return err
}

func readFrame(r io.Reader, v any) error {
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(n[:])
	if size > greetMax {
		return errors.New("the greeting is too long")
	}
	raw := make([]byte, size)
	if _, err := io.ReadFull(r, raw); err != nil {
		return err
	}
	return json.Unmarshal(raw, v)
}
