package authority

import (
	"errors"
	"net/url"
	"strings"
	"testing"
)

// TestSpellingsOfOneHostHaveOneName: case, one dot at the end, and other scripts.
func TestSpellingsOfOneHostHaveOneName(t *testing.T) {
	for in, want := range map[string]Name{
		"example.com": "example.com", "EXAMPLE.com": "example.com", "example.com.": "example.com", "Example.COM.": "example.com",
		"bücher.example": "xn--bcher-kva.example", "BÜCHER.example": "xn--bcher-kva.example", "xn--bcher-kva.example": "xn--bcher-kva.example",
		"XN--BCHER-KVA.example": "xn--bcher-kva.example", "bu\u0308cher.example": "xn--bcher-kva.example", "faß.example": "xn--fa-hia.example",
		"example。com": "example.com", "ｅxample.com": "example.com", "r3---sn-abc.example.com": "r3---sn-abc.example.com",
		"1.2.3.example": "1.2.3.example", "0x7f.example": "0x7f.example", "a.b": "a.b", "beef.cafe": "beef.cafe",
	} {
		got, err := Parse(in)
		if err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
		_, err = ParseStrict(in)
		if canonical := in == string(want); (err == nil) != canonical {
			t.Errorf("%q in a policy: %v", in, err)
		} else if !canonical && !strings.Contains(err.Error(), "write "+string(want)) {
			t.Errorf("%q in a policy does not say how it is written: %v", in, err)
		}
	}
}

// TestLookAlikesAreOtherNames: a Cyrillic letter makes another host.
func TestLookAlikesAreOtherNames(t *testing.T) {
	for _, in := range []string{"ex\u0430mple.com", "evil-example.com", "example.com.evil.test", "xn--exmple-4nf.com"} {
		if got, err := Parse(in); err != nil || got == "example.com" {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}

// TestWhatIsNoHostNameIsRefused: separators, control bytes, empty labels, lengths, broken A-labels.
func TestWhatIsNoHostNameIsRefused(t *testing.T) {
	long := strings.Repeat("a", 64)
	for _, in := range []string{
		"", ".", "..", "com", "com.", "localhost", "a..b", ".example.com", "example.com..", "ex\x00ample.com", "example.com\x00.evil.test",
		"example.com\r\nhost: evil.test", "example.com\n", " example.com", "example.com ", "exa mple.com", "user@example.com", "example.com@evil.test",
		"example.com:443", "example.com/", "example.com?x", "example.com#x", "[example.com]", "example.com%2e", "%65xample.com", "example%00.com",
		"exam\\ple.com", "a_b.example.com", "*.example.com", "-a.example.com", "a-.example.com", "example.-com", "example.c0m-", "example.1com", "example.123", "example.0x1",
		long + ".com", strings.Repeat("a.", 126) + "abcd", "xn--.com", "xn--a.com", "xn--example-.com", "xn--0.com", "xn--zzzzzz.com", "xn--ls8h.com\u200d",
		"exam\u200bple.com\xff", "\xff.com", "a\u2260.com", "a..com", "a\u3002\u3002b.com", "a\uff0fb.com", "a\uff20b.com", "a\uff1a80.com",
	} {
		if n, err := Parse(in); err == nil {
			t.Errorf("%q is taken for %q", in, n)
		} else if n != "" {
			t.Errorf("%q: a refusal carries %q", in, n)
		}
	}
}

// TestAddressesInAnySpellingAreLiterals: what any parser takes for an address.
func TestAddressesInAnySpellingAreLiterals(t *testing.T) {
	for in, want := range map[string]string{
		"127.0.0.1": "127.0.0.1", "127.0.0.1.": "127.0.0.1", "2130706433": "127.0.0.1", "0x7f000001": "127.0.0.1", "0X7F.1": "127.0.0.1", "017700000001": "127.0.0.1",
		"0177.0.0.1": "127.0.0.1", "127.1": "127.0.0.1", "127.0.1": "127.0.0.1", "0x7f.0x0.0x0.0x1": "127.0.0.1", "0": "0.0.0.0", "0x": "0.0.0.0", "169.254.169.254": "169.254.169.254",
		"::1": "::1", "[::1]": "::1", "::ffff:127.0.0.1": "::ffff:127.0.0.1", "[fe80::1%eth0]": "fe80::1", "fe80::1%25eth0": "fe80::1", "64:ff9b::7f00:1": "64:ff9b::7f00:1",
		"１２７.0.0.1": "", "①②⑦.0.0.1": "", "127。0。0。1": "",
	} {
		a, is := ParseLiteral(in)
		if want != "" && (!is || a.String() != want) {
			t.Errorf("%q: %v, %v", in, a, is)
		}
		var e *Error
		if n, err := Parse(in); !errors.As(err, &e) || !e.Literal || n != "" {
			t.Errorf("%q: %q, %v", in, n, err)
		}
		host := in
		if strings.Contains(in, ":") && in[0] != '[' {
			host = "[" + in + "]"
		}
		if n, _, err := SplitHostPort(host + ":443"); !errors.As(err, &e) || !e.Literal {
			t.Errorf("%s:443: %q, %v", host, n, err)
		}
		if n, _, err := SplitHost(in, 80); !errors.As(err, &e) || !e.Literal {
			t.Errorf("Host %s: %q, %v", in, n, err)
		}
	}
	for _, in := range []string{"256.1.1.1", "1.2.3.4.5", "127.0.0.1x", "1.2.3.example", "-1", "+1", "1_0", "127..1", "0x100000000", "4294967296"} {
		if a, is := ParseLiteral(in); is {
			t.Errorf("%q is taken for %s", in, a)
		}
	}
}

// TestPortsHaveOneSpelling: of CONNECT and of the Host field.
func TestPortsHaveOneSpelling(t *testing.T) {
	for in, want := range map[string]uint16{"a.example:443": 443, "A.example.:1": 1, "a.example:65535": 65535} {
		if n, p, err := SplitHostPort(in); n != "a.example" || p != want || err != nil {
			t.Errorf("%q: %q %d %v", in, n, p, err)
		}
	}
	if n, p, err := SplitHost("a.example", 80); n != "a.example" || p != 80 || err != nil {
		t.Errorf("a.example: %q %d %v", n, p, err)
	}
	for _, in := range []string{"a.example", "a.example:", "a.example:0", "a.example:00", "a.example:0443", "a.example:+443", "a.example:65536", "a.example:4 3", "a.example:https",
		"a.example:443:443", ":443", "a.example:443/", "u@a.example:443", "[a.example]:443", "a.example:443\x00", "a.example:４４３"} {
		if n, p, err := SplitHostPort(in); err == nil {
			t.Errorf("%q: %q %d", in, n, p)
		}
	}
}

func seeds(f *testing.F) {
	for _, s := range []string{"example.com", "EXAMPLE.com.", "bücher.example", "xn--bcher-kva.example", "127.1", "0x7f.1", "[::1]", "a\x00.com", "a.com:443", "u@a.com", "a%2eb.com",
		"ｅxample.com", "127。0。0。1", "xn--a.com", "a\u200d.com", "ß.example", "[::1%25a]:80", "a.b:080", "\u0627.example", "\u05d0a.example"} {
		f.Add(s)
	}
}

// FuzzParse: the Name is its own only spelling, and holds nothing that parts or ends a host.
func FuzzParse(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, s string) {
		_, is := ParseLiteral(s)
		n, err := Parse(s)
		if err != nil {
			var e *Error
			if n != "" || !errors.As(err, &e) {
				t.Fatalf("%q: %q, %v", s, n, err)
			}
			return
		}
		if is {
			t.Fatalf("the address %q is the name %q", s, n)
		}
		if again, err := ParseStrict(string(n)); err != nil || again != n {
			t.Fatalf("%q: %q is read as %q, %v", s, n, again, err)
		}
		if dotted, err := Parse(strings.ToUpper(string(n)) + "."); err != nil || dotted != n {
			t.Fatalf("%q: in capitals and with a dot it is %q, %v", s, dotted, err)
		}
		if len(n) > maxName || strings.Trim(string(n), "abcdefghijklmnopqrstuvwxyz0123456789-.") != "" || !strings.Contains(string(n), ".") {
			t.Fatalf("%q: %q", s, n)
		}
		if _, is := ParseLiteral(string(n)); is {
			t.Fatalf("%q: the name %q is an address", s, n)
		}
	})
}

// FuzzSplitHostPort: what is read is what net/url reads, so that no two parts of the gate differ.
func FuzzSplitHostPort(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, s string) {
		n, port, err := SplitHost(s, 443)
		if err != nil {
			if n != "" || port != 0 {
				t.Fatalf("%q: a refusal carries %q %d", s, n, port)
			}
			return
		}
		u, err := url.Parse("https://" + s + "/")
		if err != nil {
			t.Fatalf("%q is %q here and nothing for net/url: %v", s, n, err)
		}
		other, err := Parse(u.Hostname())
		if err != nil || other != n || u.User != nil || u.Path != "/" {
			t.Fatalf("%q is %q here and %q for net/url (%v)", s, n, u.Host, err)
		}
		p := uint16(443)
		if u.Port() != "" {
			if p, err = ParsePort(u.Port()); err != nil {
				t.Fatalf("%q: port %q", s, u.Port())
			}
		}
		if p != port {
			t.Fatalf("%q: port %d here and %d for net/url", s, port, p)
		}
	})
}
