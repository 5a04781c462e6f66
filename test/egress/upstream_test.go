package egress

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // what RFC 6455 asks for
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// internet is what the sandboxes may or may not reach: servers of the test on loopback addresses, with
// certificates of an authority of its own and names of a DNS server of its own.
type internet struct {
	dir  string
	ca   *x509.Certificate
	key  *ecdsa.PrivateKey
	dns  string // address of the DNS server
	wait sync.WaitGroup

	mu       sync.Mutex
	names    map[string][]netip.Addr // what the DNS server answers
	asked    []string                // what it was asked
	conns    map[string]int          // connections by server
	requests map[string]int          // requests by Host field and server
	secrets  []string                // what arrived as Authorization
}

// The addresses of the servers. All of 127.0.0.0/8 is this machine.
const (
	goodAddr   = "127.77.1.1" // of what policies name
	otherAddr  = "127.77.1.2" // of what they name too, another rule
	evilAddr   = "127.77.1.3" // of what nobody names
	resolverAt = "127.77.1.53:5377"
	rawPort    = 7000
)

func newInternet(t *testing.T) *internet {
	t.Helper()
	in := &internet{dir: t.TempDir(), names: map[string][]netip.Addr{}, conns: map[string]int{}, requests: map[string]int{}}
	t.Cleanup(in.wait.Wait) // after all have been told to end
	in.authority(t)
	for _, n := range []string{"api", "inject", "paths", "alias"} {
		in.name(n+".example.test", goodAddr, "::1")
	}
	for _, n := range []string{"a.wild", "other", "other-inject"} {
		in.name(n+".example.test", otherAddr, "::1")
	}
	for _, n := range []string{"evil", "shadow"} {
		in.name(n+".example.test", evilAddr)
	}
	in.name("shadow.example.test", goodAddr) // a second name on an address that another name has
	in.name("private.example.test", "127.0.0.1")
	in.resolver(t)
	for _, addr := range []string{goodAddr, otherAddr, evilAddr} {
		in.serve(t, addr, addr)
	}
	in.serve(t, "::1", "::1")
	in.raw(t)
	return in
}

// name gives a name its addresses.
func (in *internet) name(n string, addrs ...string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.names[n] = nil
	for _, a := range addrs {
		in.names[n] = append(in.names[n], netip.MustParseAddr(a))
	}
}

func (in *internet) authority(t *testing.T) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the test's internet"}, IsCA: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	if in.ca, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	in.key = key
	if err := os.WriteFile(in.roots(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (in *internet) roots() string { return filepath.Join(in.dir, "roots.pem") }

// certificate is one for whatever name is asked for, except for evil's, which is for evil alone.
func (in *internet) certificate(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	name := h.ServerName
	if name == "" {
		name = "nameless.example.test"
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, in.ca, &key.PublicKey, in.key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der, in.ca.Raw}, PrivateKey: key}, nil
}

// counted counts the connections of a server.
type counted struct {
	net.Listener
	in   *internet
	name string
}

func (c counted) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err == nil {
		c.in.mu.Lock()
		c.in.conns[c.name]++
		c.in.mu.Unlock()
	}
	return conn, err
}

func (in *internet) listen(t *testing.T, name, addr string, port int) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(addr, fmt.Sprint(port)))
	if err != nil {
		t.Fatal(err)
	}
	return counted{l, in, name}
}

// serve answers HTTP on port 80 and HTTPS on 443 and 8443 of an address.
func (in *internet) serve(t *testing.T, name, addr string) {
	t.Helper()
	in.http(t, in.listen(t, name, addr, 80), in, false)
	in.https(t, in.listen(t, name, addr, 443), in)
	in.https(t, in.listen(t, name, addr, 8443), in)
}

func (in *internet) https(t *testing.T, l net.Listener, h http.Handler) { in.http(t, l, h, true) }

func (in *internet) http(t *testing.T, l net.Listener, h http.Handler, secure bool) {
	t.Helper()
	s := &http.Server{Handler: h, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute,
		TLSConfig: &tls.Config{GetCertificate: in.certificate}}
	in.wait.Go(func() {
		if secure {
			_ = s.ServeTLS(l, "", "")
		} else {
			_ = s.Serve(l)
		}
	})
	t.Cleanup(func() { _ = s.Close() })
}

// raw answers bytes with bytes.
func (in *internet) raw(t *testing.T) {
	t.Helper()
	l := in.listen(t, "raw", goodAddr, rawPort)
	in.wait.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_, _ = io.WriteString(c, "welcome\n")
				_, _ = io.Copy(c, c)
			}()
		}
	})
	t.Cleanup(func() { _ = l.Close() })
}

func (in *internet) resolver(t *testing.T) {
	t.Helper()
	started := make(chan struct{})
	s := &dns.Server{Addr: resolverAt, Net: "udp", NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(in.resolve)}
	in.wait.Go(func() { _ = s.ListenAndServe() })
	<-started
	t.Cleanup(func() { _ = s.Shutdown() })
	in.dns = resolverAt
}

func (in *internet) resolve(w dns.ResponseWriter, m *dns.Msg) {
	r := new(dns.Msg)
	r.SetReply(m)
	in.mu.Lock()
	for _, q := range m.Question {
		name := strings.ToLower(strings.TrimSuffix(q.Name, "."))
		in.asked = append(in.asked, name)
		addrs, ok := in.names[name]
		if !ok {
			r.Rcode = dns.RcodeNameError
		}
		for _, a := range addrs {
			h := dns.RR_Header{Name: q.Name, Class: dns.ClassINET, Ttl: 1}
			switch {
			case a.Is4() && q.Qtype == dns.TypeA:
				h.Rrtype = dns.TypeA
				r.Answer = append(r.Answer, &dns.A{Hdr: h, A: a.AsSlice()})
			case a.Is6() && q.Qtype == dns.TypeAAAA:
				h.Rrtype = dns.TypeAAAA
				r.Answer = append(r.Answer, &dns.AAAA{Hdr: h, AAAA: a.AsSlice()})
			}
		}
	}
	in.mu.Unlock()
	_ = w.WriteMsg(r)
}

// reached is how many connections a server has had.
func (in *internet) reached(server string) int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.conns[server]
}

func (in *internet) all() (n int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, c := range in.conns {
		n += c
	}
	return n
}

// heard is how many requests came with this Host field.
func (in *internet) heard(host string) int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.requests[host]
}

// wasAsked reports whether the DNS server was asked for a name with this in it.
func (in *internet) wasAsked(part string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, n := range in.asked {
		if strings.Contains(n, part) {
			return true
		}
	}
	return false
}

func (in *internet) lastSecret() string {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.secrets) == 0 {
		return ""
	}
	return in.secrets[len(in.secrets)-1]
}

// ServeHTTP implements http.Handler.
func (in *internet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	in.mu.Lock()
	in.requests[r.Host]++
	if a := r.Header.Get("Authorization"); a != "" {
		in.secrets = append(in.secrets, a)
	}
	in.mu.Unlock()
	switch path, auth := r.URL.Path, r.Header.Get("Authorization"); path {
	case "/redirect":
		http.Redirect(w, r, r.URL.Query().Get("to"), http.StatusFound)
	case "/endless":
		endless(r.Context(), w)
	case "/socket":
		upgrade(w, r)
	case "/unasked":
		unasked(w)
	case "/echo":
		fmt.Fprintf(w, "you sent %s", auth)
	case "/echo-header":
		w.Header().Set("X-Echo", auth)
	case "/echo-base64":
		fmt.Fprintf(w, "you sent %s", base64.StdEncoding.EncodeToString([]byte(auth)))
	case "/echo-hex":
		fmt.Fprintf(w, "you sent %s", hex.EncodeToString([]byte(auth)))
	case "/echo-gzip":
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		fmt.Fprintf(z, "you sent %s", auth)
		_ = z.Close()
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(b.Bytes())
	case "/echo-split":
		split(w, "you sent "+auth)
	case "/body":
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d bytes", n)
	default:
		fmt.Fprintf(w, "%s %s at %s", r.Method, path, r.Host)
	}
}

// endless sends until the client is gone.
func endless(ctx context.Context, w http.ResponseWriter) {
	f, _ := w.(http.Flusher)
	chunk := bytes.Repeat([]byte("."), 1024)
	for tick := time.NewTicker(20 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		if _, err := w.Write(chunk); err != nil {
			return
		}
		f.Flush()
	}
}

// split sends a text in pieces of three bytes.
func split(w http.ResponseWriter, s string) {
	f, _ := w.(http.Flusher)
	for len(s) > 0 {
		n := min(3, len(s))
		_, _ = io.WriteString(w, s[:n])
		f.Flush()
		s = s[n:]
	}
}

// upgrade takes a WebSocket, or whatever was asked for, and echoes one frame.
func upgrade(w http.ResponseWriter, r *http.Request) {
	c, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) //nolint:gosec
	fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Accept: %s\r\n\r\n",
		r.Header.Get("Upgrade"), base64.StdEncoding.EncodeToString(sum[:]))
	_ = rw.Flush()
	var head [6]byte
	if _, err := io.ReadFull(rw, head[:]); err != nil {
		return
	}
	body := make([]byte, head[1]&0x7f)
	if _, err := io.ReadFull(rw, body); err != nil {
		return
	}
	for i := range body {
		body[i] ^= head[2+i%4]
	}
	_, _ = rw.Write(append([]byte{0x81, byte(len(body))}, body...))
	_ = rw.Flush()
}

// unasked answers 101 to a request that asked for no upgrade.
func unasked(w http.ResponseWriter) {
	c, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	_, _ = io.WriteString(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nfree bytes")
	_ = rw.Flush()
}
