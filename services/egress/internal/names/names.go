// Package names answers the DNS questions of sandboxes. It guarantees that no question, and nothing out of one,
// goes to another server: the answers are addresses of the gate's own, one for each name that the session's
// policy could allow, and mean nothing elsewhere; that any other name does not exist, with the reason in an
// extended error (RFC 8914) and in the audit log; and that a packet which is no plain question changes nothing.
package names

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

const (
	ttl     = 10 // seconds: an address is the session's own, and lives as long as it is used
	maxUDP  = 1232
	maxText = 200 // of an extended error
)

// Session is what the server needs of one.
type Session interface {
	session.Session
	// Assign gives the addresses that stand for a name; false: there is no room for another one.
	Assign(authority.Name) (four, six netip.Addr, ok bool)
}

// Finder finds the session of a source address.
type Finder func(netip.Addr) (Session, bool)

// Answer answers one packet of a source address; nil: it gets none. limit is the longest answer in bytes.
func (s *Server) Answer(from netip.Addr, raw []byte, limit int) []byte {
	var q dns.Msg
	if err := q.Unpack(raw); err != nil || q.Response {
		return s.malformed(raw)
	}
	m := new(dns.Msg)
	m.SetReply(&q)
	m.RecursionAvailable, m.Answer, m.Ns, m.Extra = true, nil, nil, nil
	opt := q.IsEdns0()
	if opt != nil {
		m.SetEdns0(maxUDP, false)
	}
	switch {
	case q.Opcode != dns.OpcodeQuery:
		m.Rcode, m.Question = dns.RcodeNotImplemented, nil
	case len(q.Question) != 1:
		m.Rcode, m.Question = dns.RcodeFormatError, nil
	case opt != nil && opt.Version() != 0:
		m.Rcode = dns.RcodeBadVers
	default:
		s.question(from, q.Question[0], m)
	}
	return pack(m, limit)
}

// malformed answers a packet that has no more than a head.
func (s *Server) malformed(raw []byte) []byte {
	if len(raw) < 12 || raw[2]&0x80 != 0 { // an answer is never answered
		return nil
	}
	m := new(dns.Msg)
	m.Id, m.Response, m.Rcode = uint16(raw[0])<<8|uint16(raw[1]), true, dns.RcodeFormatError
	return pack(m, 512)
}

func pack(m *dns.Msg, limit int) []byte {
	m.Compress = true
	out, err := m.Pack()
	if err == nil && len(out) <= limit {
		return out
	}
	m.Answer, m.Ns, m.Extra, m.Truncated = nil, nil, nil, true
	if out, err = m.Pack(); err != nil || len(out) > limit {
		return nil
	}
	return out
}

// noise are names that programs ask for by themselves and that no policy can mean: they do not exist, and
// nobody is told.
var noise = []string{"local", "localdomain", "lan", "home", "arpa", "invalid", "onion"}

// question answers one question.
func (s *Server) question(from netip.Addr, q dns.Question, m *dns.Msg) {
	b, ok := s.find(from)
	if !ok {
		refuse(m, dns.RcodeRefused, dns.ExtendedErrorCodeProhibited, "this address is nobody's")
		return
	}
	if q.Qclass != dns.ClassINET {
		m.Rcode = dns.RcodeRefused
		return
	}
	text := strings.ToLower(strings.TrimSuffix(q.Name, "."))
	if text == "localhost" || strings.HasSuffix(text, ".localhost") {
		s.answer(m, q, netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback())
		return
	}
	if strings.Contains(q.Name, "\\") { // a byte that is no text
		s.deny(b, q, m, policy.Decision{Reason: policy.BadName})
		return
	}
	name, err := authority.Parse(text)
	if err != nil {
		if last := text[strings.LastIndexByte(text, '.')+1:]; last == text || slices.Contains(noise, last) {
			none(m, q)
			return
		}
		d := policy.Decision{Reason: policy.BadName}
		if _, is := authority.ParseLiteral(text); is {
			d.Reason = policy.Literal
		}
		s.deny(b, q, m, d)
		return
	}
	d := b.Policy().Resolve(name)
	if !d.Allowed {
		if slices.Contains(noise, text[strings.LastIndexByte(text, '.')+1:]) {
			none(m, q)
			return
		}
		s.deny(b, q, m, d)
		return
	}
	four, six, ok := b.Assign(name)
	if !ok {
		refuse(m, dns.RcodeServerFailure, dns.ExtendedErrorCodeOther, "the session has connections to as many names as it may")
		return
	}
	s.counted("answered")
	s.answer(m, q, four, six)
}

// answer gives a name's addresses; of any other type there are none.
func (s *Server) answer(m *dns.Msg, q dns.Question, four, six netip.Addr) {
	h := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: ttl}
	switch q.Qtype {
	case dns.TypeA:
		m.Answer = []dns.RR{&dns.A{Hdr: h, A: four.AsSlice()}}
	case dns.TypeAAAA:
		m.Answer = []dns.RR{&dns.AAAA{Hdr: h, AAAA: six.AsSlice()}}
	default:
		m.Ns = []dns.RR{soa(q.Name)}
	}
}

// soa lets resolvers in the sandbox remember for a moment that there is nothing.
func soa(name string) dns.RR {
	return &dns.SOA{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: ttl},
		Ns: "gate.invalid.", Mbox: "nobody.invalid.", Serial: 1, Refresh: ttl, Retry: ttl, Expire: ttl, Minttl: ttl}
}

// none says that there is no such name.
func none(m *dns.Msg, q dns.Question) {
	m.Rcode, m.Ns = dns.RcodeNameError, []dns.RR{soa(q.Name)}
}

// refuse answers with an error and says why to who can read it.
func refuse(m *dns.Msg, rcode int, code uint16, text string) {
	m.Rcode = rcode
	if opt := m.IsEdns0(); opt != nil {
		if len(text) > maxText {
			text = strings.ToValidUTF8(text[:maxText], "")
		}
		opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: code, ExtraText: text})
	}
}

// deny says that there is no such name, why, and has it recorded.
func (s *Server) deny(b Session, q dns.Question, m *dns.Msg, d policy.Decision) {
	s.counted("denied")
	name := strings.TrimSuffix(q.Name, ".")
	code, text := dns.ExtendedErrorCodeBlocked, fmt.Sprintf("no rule of this session's policy allows it (%s, policy generation %d)", d.Reason, d.Generation)
	if d.Rule != "" {
		code = dns.ExtendedErrorCodeProhibited
		text = fmt.Sprintf("rule %s of the %s's policy denies it (policy generation %d)", d.Rule, policy.LayerName(d.Layer), d.Generation)
	}
	if d.Ask != "" {
		text += "; ask " + d.Ask
	}
	none(m, q)
	refuse(m, dns.RcodeNameError, code, text)
	// A record that is not kept changes nothing: the answer is no either way.
	_ = b.Note(&egressv1.Record{Protocol: "dns", Door: "dns", Authority: strings.ToLower(name), Verdict: egressv1.Verdict_VERDICT_DENIED,
		Rule: d.Rule, Layer: d.Layer, PolicyGeneration: d.Generation, Reason: string(d.Reason), Reported: d.Reported})
}
