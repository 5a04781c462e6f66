package egress

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// routeRows: ways out that are not the gate's doors.
var routeRows = []row{
	{11, "addresses that no sandbox may reach", special, true},
	{17, "another resolver", func(t *testing.T, w *world, f string) {
		server := map[string]string{"4": "203.0.113.53", "6": "[2001:db8::53]"}[f]
		for _, network := range []string{"udp", "tcp"} {
			w.refuses(t, "dns", "server="+server+":53", "network="+network, "name=api.example.test")
		}
		w.refuses(t, "dns", "server="+resolverAt, "name=api.example.test")
		w.refuses(t, "dial", "addr="+server+":853")
		w.refuses(t, "udp", "addr="+server+":853")
		w.refuses(t, "fetch", "addr="+server+":443", "sni=evil.example.test", "verify=-", "host=evil.example.test", "path=/dns-query")
	}, false},
	{18, "QUIC, other UDP, ICMP, raw and packet sockets, vsock", notTCP, false},
	{19, "sockets of the host, the metadata address", func(t *testing.T, w *world, f string) {
		for _, path := range []string{"/run/containerd/containerd.sock", "/var/run/docker.sock", "@/containerd-shim", w.env.Dir + "/host/local/containerd/containerd.sock"} {
			w.refuses(t, "unix", "path="+path)
		}
		meta := map[string]string{"4": "169.254.169.254:80", "6": "[fd00:ec2::254]:80"}[f]
		w.refuses(t, "fetch", "addr="+meta, "host=169.254.169.254", "path=/latest/meta-data/")
		w.refuses(t, "fetch", "via=connect", "addr="+meta, "host=169.254.169.254")
		w.refuses(t, "fetch", "addr="+connectDoor, "path=http://169.254.169.254/latest/meta-data/", "host=169.254.169.254")
		w.refuses(t, "fetch", "via=connect", "addr=metadata.google.internal:80", "host=metadata.google.internal")
	}, false},
	{20, "no proxy set", func(t *testing.T, w *world, _ string) {
		before := w.in.all()
		for _, script := range []string{
			"env -u HTTP_PROXY -u HTTPS_PROXY NO_PROXY='*' curl -sS -m 20 https://evil.example.test/",
			"env NO_PROXY='*' curl -sS -m 20 --noproxy '*' http://" + evilAddr + "/",
			"env NO_PROXY='*' curl -sS -m 20 -k --resolve evil.example.test:443:" + evilAddr + " https://evil.example.test/",
		} {
			if out, err := w.output(t, tryTime, script+" -f"); err == nil {
				t.Errorf("%s: %s", script, out)
			}
		}
		if n := w.in.all() - before; n != 0 {
			t.Errorf("%d connections went out", n)
		}
	}, true},
	{32, "another sandbox", func(t *testing.T, w *world, f string) {
		for _, addr := range neighbours(t, w, f) {
			for _, port := range []string{"22", "80", "443", "7777"} {
				w.refuses(t, "dial", "addr="+addr+":"+port)
			}
			w.refuses(t, "udp", "addr="+addr+":7777")
		}
		w.refuses(t, "lookup", "name="+w.neighbour.Key()+".berth.internal")
	}, false},
	{33, "a neighbour's source address", func(t *testing.T, w *world, f string) {
		gateway := map[string]string{"4": "100.64.0.1:53", "6": "[fd62:6572:7468::1]:53"}[f]
		for _, addr := range neighbours(t, w, f) {
			w.refuses(t, "spoof", "from="+strings.Trim(addr, "[]"), "addr="+gateway)
		}
	}, false},
}

// neighbours are the addresses of the other session, as one writes them before a port.
func neighbours(t *testing.T, w *world, family string) []string {
	t.Helper()
	out, err := w.neighbour.Output(t.Context(), inside, "addresses")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for a := range strings.FieldsSeq(string(out)) {
		if strings.Contains(a, ":") == (family == "6") {
			if family == "6" {
				a = "[" + a + "]"
			}
			found = append(found, a)
		}
	}
	if len(found) == 0 {
		t.Fatalf("the neighbour has no address of IPv%s: %q", family, out)
	}
	return found
}

func special(t *testing.T, w *world, _ string) {
	for _, a := range []string{"[::ffff:127.77.1.3]", "[::127.77.1.3]", "[64:ff9b::7f4d:103]", "[64:ff9b:1::7f4d:103]", "[2002:7f4d:103::1]", "[2001::1]",
		"[fec0::1]", "[fe80::1%eth0]", "[fc00::1]", "0.0.0.0", "[::]", "169.254.0.1", "100.64.0.9", "100.100.100.200", "127.77.1.3", "10.0.0.1", "172.16.0.1",
		"192.168.0.1", "224.0.0.1", "[ff02::1]", "255.255.255.255", "[::1]", "127.0.0.1"} {
		w.refuses(t, "fetch", "addr="+a+":80", "host=api.example.test")
	}
	// Names that lead there are refused where they are dialled, though the rule allows the names.
	for _, a := range []string{"10.1.2.3", "127.0.0.1", "169.254.169.254", "100.64.0.1", "::1", "fd00::1", "fe80::1", "64:ff9b::7f00:1", "2002:7f00:1::1", "::ffff:127.0.0.1", "0.0.0.0", "198.18.0.1"} {
		w.in.name("flips.example.test", a)
		w.refuses(t, "fetch", "via=connect", "addr=flips.example.test:443", "sni=flips.example.test", "host=flips.example.test")
	}
}

func notTCP(t *testing.T, w *world, f string) {
	host := map[string]string{"4": "203.0.113.9", "6": "2001:db8::9"}[f]
	at := host
	if f == "6" {
		at = "[" + host + "]"
	}
	for _, port := range []int{443, 80, 123, 4433} {
		w.refuses(t, "udp", fmt.Sprintf("addr=%s:%d", at, port))
	}
	w.refuses(t, "udp", "addr=api.example.test:443")
	w.refuses(t, "ping", "addr="+host)
	domain := map[string]int{"4": unix.AF_INET, "6": unix.AF_INET6}[f]
	for _, s := range [][3]int{{domain, unix.SOCK_RAW, unix.IPPROTO_RAW}, {domain, unix.SOCK_RAW, unix.IPPROTO_TCP}, {domain, unix.SOCK_RAW, unix.IPPROTO_ICMP},
		{unix.AF_PACKET, unix.SOCK_RAW, 0x0300}, {unix.AF_PACKET, unix.SOCK_DGRAM, 0x0300}, {unix.AF_VSOCK, unix.SOCK_STREAM, 0}} {
		w.refuses(t, "socket", "domain="+strconv.Itoa(s[0]), "type="+strconv.Itoa(s[1]), "protocol="+strconv.Itoa(s[2]))
	}
}
