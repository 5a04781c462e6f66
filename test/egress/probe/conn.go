//go:build linux

package main

import (
	"bufio"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	patience = 20 * time.Second
	dialTime = 5 * time.Second
)

// open makes the connection that a describes: addr is where to (host:port), family 4 or 6, via connect or
// socks an explicit proxy at proxy, sni the name of TLS (absent: plain; "-": none), verify the name that the
// certificate must have.
func open(a args) (net.Conn, error) {
	c, err := reach(a)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	name, secure := a["sni"]
	if !secure {
		return c, nil
	}
	if name == "-" {
		name = ""
	}
	return handshake(c, name, a.or("verify", name), a["ech"], strings.Fields(a.or("alpn", "http/1.1")))
}

func reach(a args) (net.Conn, error) {
	d := &net.Dialer{Timeout: dialTime}
	network := "tcp" + a["family"]
	switch a["via"] {
	case "connect":
		c, err := d.Dial(network, a.or("proxy", "100.64.0.1:3128"))
		if err != nil {
			return nil, err
		}
		return c, throughConnect(c, a["addr"])
	case "socks":
		c, err := d.Dial(network, a.or("proxy", "100.64.0.1:1080"))
		if err != nil {
			return nil, err
		}
		return c, throughSocks(c, a["addr"])
	}
	return d.Dial(network, a["addr"])
}

func throughConnect(c net.Conn, target string) error {
	if _, err := fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReaderSize(c, 16), &http.Request{Method: http.MethodConnect})
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return fmt.Errorf("CONNECT: %s: %s", resp.Status, body)
	}
	return nil
}

func throughSocks(c net.Conn, target string) error {
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	if _, err := c.Write([]byte{5, 1, 0}); err != nil {
		return err
	}
	var hello [2]byte
	if _, err := io.ReadFull(c, hello[:]); err != nil {
		return err
	}
	req := append([]byte{5, 1, 0, 3, byte(len(host))}, host...)
	if _, err := c.Write(binary.BigEndian.AppendUint16(req, uint16(n))); err != nil {
		return err
	}
	var head [10]byte
	if _, err := io.ReadFull(c, head[:4]); err != nil {
		return err
	}
	if head[1] != 0 {
		return fmt.Errorf("SOCKS5: reply %d", head[1])
	}
	rest := 6
	if head[3] == 4 {
		rest = 18
	}
	_, err = io.CopyN(io.Discard, c, int64(rest))
	return err
}

func roots() *x509.CertPool {
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if raw, err := os.ReadFile("/run/berth/trust.pem"); err == nil {
		pool.AppendCertsFromPEM(raw)
	}
	return pool
}

func handshake(c net.Conn, sni, verify, ech string, alpn []string) (net.Conn, error) {
	conf := &tls.Config{ServerName: sni, NextProtos: alpn, InsecureSkipVerify: true, //nolint:gosec // verified below, by another name than the SNI
		VerifyConnection: func(s tls.ConnectionState) error {
			if verify == "" || verify == "-" {
				return nil
			}
			more := x509.NewCertPool()
			for _, m := range s.PeerCertificates[1:] {
				more.AddCert(m)
			}
			_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{DNSName: verify, Roots: roots(), Intermediates: more})
			return err
		}}
	if ech != "" {
		list, err := configList(ech)
		if err != nil {
			return nil, err
		}
		conf.EncryptedClientHelloConfigList, conf.MinVersion = list, tls.VersionTLS13
		conf.EncryptedClientHelloRejectionVerify = func(tls.ConnectionState) error { return nil }
	}
	t := tls.Client(c, conf)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("TLS: %w", err)
	}
	return t, nil
}

// request writes one request by hand: method, path, host, header (lines parted by |), body.
func request(a args) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\n", a.or("method", "GET"), a.or("path", "/"))
	if h := a["host"]; h != "-" {
		fmt.Fprintf(&b, "Host: %s\r\n", h)
	}
	for line := range strings.SplitSeq(a["header"], "|") {
		if line != "" {
			fmt.Fprintf(&b, "%s\r\n", line)
		}
	}
	if body := a["body"]; body != "" {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(body))
	}
	return b.String() + "\r\n" + a["body"]
}

func answer(r *bufio.Reader, method string) (Outcome, error) {
	resp, err := http.ReadResponse(r, &http.Request{Method: method})
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	o := Outcome{Status: resp.StatusCode, Body: string(body), Header: map[string]string{}}
	for k := range resp.Header {
		o.Header[k] = resp.Header.Get(k)
	}
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return o, err
	}
	return o, nil
}

// configList is an ECHConfigList (draft-ietf-tls-esni, version 0xfe0d) with a fresh X25519 key, whose outer
// name is public.
func configList(public string) ([]byte, error) {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	pub := key.PublicKey().Bytes()
	body := []byte{7, 0, 0x20} // id, KEM X25519
	body = append(binary.BigEndian.AppendUint16(body, uint16(len(pub))), pub...)
	body = append(body, 0, 4, 0, 1, 0, 1, 64, byte(len(public))) // HKDF-SHA256, AES-128-GCM; longest name
	body = append(append(body, public...), 0, 0)
	config := append(binary.BigEndian.AppendUint16([]byte{0xfe, 0x0d}, uint16(len(body))), body...)
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(config))), config...), nil
}
