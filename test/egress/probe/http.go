//go:build linux

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// fetch sends one request and reads the answer.
func fetch(a args) (Outcome, error) {
	c, err := open(a)
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, request(a)); err != nil {
		return Outcome{}, err
	}
	return answer(bufio.NewReader(c), a.or("method", "GET"))
}

// twice sends a second request, for host2 and path2, on the same connection; the second answer counts.
func twice(a args) (Outcome, error) {
	c, err := open(a)
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	r := bufio.NewReader(c)
	if _, err := io.WriteString(c, request(a)); err != nil {
		return Outcome{}, err
	}
	if o, err := answer(r, "GET"); err != nil || o.Status != http.StatusOK {
		return o, fmt.Errorf("the first request: %d %w", o.Status, err)
	}
	second := args{"host": a["host2"], "path": a.or("path2", "/"), "header": a["header2"]}
	if _, err := io.WriteString(c, request(second)); err != nil {
		return Outcome{}, err
	}
	return answer(r, "GET")
}

// streams sends two requests as streams of one HTTP/2 connection, the second with another :authority.
func streams(a args) (Outcome, error) {
	tr := &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: roots(), ServerName: a["sni"]},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return reach(a) }}
	defer tr.CloseIdleConnections()
	get := func(host, path string) (Outcome, error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+a["addr"]+path, nil)
		if err != nil {
			return Outcome{}, err
		}
		req.Host = host
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return Outcome{}, err
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		return Outcome{Status: resp.StatusCode, Body: string(body), Header: map[string]string{"Proto": resp.Proto}}, err
	}
	o, err := get(a["host"], a.or("path", "/"))
	if err != nil || a["host2"] == "" {
		return o, err
	}
	if o.Status != http.StatusOK {
		return o, fmt.Errorf("the first stream: %d", o.Status)
	}
	return get(a["host2"], a.or("path2", "/"))
}

// redirect follows redirects as clients do.
func redirect(a args) (Outcome, error) {
	client := &http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots()}}}
	resp, err := client.Get(a["url"])
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return Outcome{Status: resp.StatusCode, Body: string(body), Header: map[string]string{"At": resp.Request.URL.String()}}, err
}

// send writes bytes (hex) as they are and reads an answer.
func send(a args) (Outcome, error) {
	c, err := open(a)
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	raw, err := hex.DecodeString(a["hex"])
	if err != nil {
		return Outcome{}, err
	}
	if _, err := c.Write(raw); err != nil {
		return Outcome{}, err
	}
	return answer(bufio.NewReader(c), "GET")
}

// websocket upgrades to what upgrade names, sends one text frame and reads one back.
func websocket(a args) (Outcome, error) {
	c, err := open(a)
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	a["header"] = strings.Join([]string{"Connection: Upgrade", "Upgrade: " + a.or("upgrade", "websocket"),
		"Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="}, "|")
	if _, err := io.WriteString(c, request(a)); err != nil {
		return Outcome{}, err
	}
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, &http.Request{Method: "GET"})
	if err != nil {
		return Outcome{}, err
	}
	o := Outcome{Status: resp.StatusCode}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		o.Body = string(body)
		return o, nil
	}
	text := "over the socket"
	frame := append([]byte{0x81, 0x80 | byte(len(text)), 0, 0, 0, 0}, text...) // masked by nothing
	if _, err := c.Write(frame); err != nil {
		return o, err
	}
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return o, err
	}
	body := make([]byte, head[1]&0x7f)
	_, err = io.ReadFull(r, body)
	o.Body = string(body)
	return o, err
}

// stream reads an answer that never ends, and tells how long it came: for what is revoked meanwhile.
func stream(a args) (Outcome, error) {
	c, err := open(a)
	if err != nil {
		return Outcome{}, err
	}
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, request(a)); err != nil {
		return Outcome{}, err
	}
	n := 0
	buf := make([]byte, 16<<10)
	for {
		_ = c.SetDeadline(time.Now().Add(patience))
		m, err := c.Read(buf)
		n += m
		if err != nil {
			return Outcome{Body: fmt.Sprintf("%d bytes, last at %d", n, time.Now().UnixMilli())}, err
		}
	}
}
