package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

// SOCKS5 as of RFC 1928.
const (
	socksVersion = 5
	noAuth       = 0
	noMethod     = 0xff

	commandConnect = 1
	typeIPv4       = 1
	typeName       = 3
	typeIPv6       = 4

	replyOK          = 0
	replyFailed      = 1
	replyRefused     = 2
	replyUnreachable = 4
	replyCommand     = 7
	replyType        = 8
)

var errSOCKS = errors.New("this is no SOCKS5")

// socks reads one SOCKS5 request.
func (f *flow) socks(ctx context.Context) {
	_ = f.client.SetReadDeadline(time.Now().Add(f.Limits.First))
	malformed := refusal{protocol: policy.TCP, decision: f.own(policy.Malformed), text: errSOCKS.Error()}
	method, err := readGreeting(f.client)
	if err != nil {
		if errors.Is(err, errSOCKS) {
			f.deny(malformed)
		}
		return
	}
	if method == noMethod {
		f.explain = func(refusal) { f.lastWords([]byte{socksVersion, noMethod}) }
		f.deny(malformed)
		return
	}
	_ = f.client.SetWriteDeadline(time.Now().Add(f.Limits.First))
	if _, err := f.client.Write([]byte{socksVersion, method}); err != nil {
		return
	}
	ask, err := readSOCKS(f.client)
	f.explain = func(r refusal) { f.lastWords(socksReply(replyOf(r, ask))) }
	f.port, f.asked = ask.port, ask.host()
	switch {
	case errors.Is(err, errSOCKS):
		f.deny(malformed)
	case err != nil: // it went again, or was too slow
	case ask.command != commandConnect, ask.port == 0:
		malformed.text = "only connections are made"
		f.deny(malformed)
	default:
		f.socksTo(ctx, ask)
	}
}

func (f *flow) socksTo(ctx context.Context, ask socksAsk) {
	var err error
	if ask.address.IsValid() {
		known := false
		if f.name, known = f.session.NameOf(ask.address.Unmap()); !known {
			err = &authority.Error{Text: "an address is not let through, use its name", Literal: true}
		}
	} else {
		f.name, err = authority.Parse(ask.name)
	}
	if err != nil {
		f.deny(refusal{protocol: policy.TCP, decision: f.own(nameReason(err)), text: err.Error()})
		return
	}
	f.greet = func() error {
		_ = f.client.SetWriteDeadline(time.Now().Add(f.Limits.First))
		_, err := f.client.Write(socksReply(replyOK))
		return err
	}
	f.run(ctx)
}

// readGreeting is the method that is taken of those that the client offers.
func readGreeting(r io.Reader) (byte, error) {
	var b [255]byte
	if _, err := io.ReadFull(r, b[:2]); err != nil {
		return 0, err
	}
	n := int(b[1])
	if b[0] != socksVersion || n == 0 {
		return 0, errSOCKS
	}
	if _, err := io.ReadFull(r, b[:n]); err != nil {
		return 0, err
	}
	for _, m := range b[:n] {
		if m == noAuth {
			return noAuth, nil
		}
	}
	return noMethod, nil
}

// socksAsk is a request; address or name says where to.
type socksAsk struct {
	command byte
	kind    byte
	address netip.Addr
	name    string
	port    uint16
}

func (a socksAsk) host() string {
	if a.address.IsValid() {
		return a.address.String()
	}
	return printable(a.name)
}

// readSOCKS takes one request and not a byte more.
func readSOCKS(r io.Reader) (socksAsk, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return socksAsk{}, err
	}
	a := socksAsk{command: head[1], kind: head[3]}
	if head[0] != socksVersion || head[2] != 0 {
		return a, errSOCKS
	}
	size := 0
	switch a.kind {
	case typeIPv4:
		size = 4
	case typeIPv6:
		size = 16
	case typeName:
		var n [1]byte
		if _, err := io.ReadFull(r, n[:]); err != nil {
			return a, err
		}
		size = int(n[0])
	}
	if size == 0 {
		return a, errSOCKS
	}
	b := make([]byte, size+2)
	if _, err := io.ReadFull(r, b); err != nil {
		return a, err
	}
	a.port = uint16(b[size])<<8 | uint16(b[size+1])
	if a.kind == typeName {
		a.name = string(b[:size])
	} else {
		a.address, _ = netip.AddrFromSlice(b[:size])
	}
	return a, nil
}

// replyOf is the code that says most of a refusal.
func replyOf(r refusal, ask socksAsk) byte {
	switch {
	case r.decision.Reason == policy.Malformed && ask.kind != typeIPv4 && ask.kind != typeIPv6 && ask.kind != typeName:
		return replyType
	case r.decision.Reason == policy.Malformed && ask.command != commandConnect:
		return replyCommand
	case r.decision.Reason == policy.Malformed:
		return replyFailed
	case r.verdict == egressv1.Verdict_VERDICT_FAILED:
		return replyUnreachable
	}
	return replyRefused
}

func socksReply(code byte) []byte {
	return []byte{socksVersion, code, 0, typeIPv4, 0, 0, 0, 0, 0, 0}
}

// printable is what was asked for as it can stand in a record.
func printable(s string) string {
	if visible(s) {
		return s
	}
	return fmt.Sprintf("%+q", s)
}
