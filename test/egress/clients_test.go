package egress

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/md5" //nolint:gosec // a field of a package list
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/cgi"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/test/testenv"
)

const mirrorAddr = "127.77.1.4"

// TestRealClients: programs that people use, by names that a policy allows, with TLS that is passed through
// and TLS that the gate opens, with nothing set in the sandbox.
func TestRealClients(t *testing.T) {
	in := newInternet(t)
	e := up(t, in)
	mirror(t, in)
	apply(t, e, policy+`  - name: mirror
    allow: {hosts: [mirror.example.test], ports: [443]}
    addresses: [127.77.1.0/24]
  - name: mirror-inside
    allow: {hosts: [mirror-inside.example.test], ports: [443], protocol: https, methods: [GET, HEAD, POST]}
    addresses: [127.77.1.0/24]
`)
	program := probe(t)
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) { clients(t, e, in, tier, program) })
	}
}

func clients(t *testing.T, e *testenv.Env, in *internet, tier string, program []byte) {
	w := enter(t, e, in, tier, program)
	wait := 2 * time.Minute
	for _, host := range []string{"mirror", "mirror-inside"} {
		url := "https://" + host + ".example.test"
		for name, script := range map[string]string{
			"curl":           "curl -fsS -m 60 " + url + "/file",
			"curl-http2":     "curl -fsS -m 60 --http2 -w '%{http_version}' " + url + "/file",
			"python-urllib":  "python3 -c 'import urllib.request as u; print(u.urlopen(\"" + url + "/file\", timeout=60).read())'",
			"git-over-https": "rm -rf /tmp/" + host + " && git clone -q " + url + "/git/repo.git /tmp/" + host + " && cat /tmp/" + host + "/file",
		} {
			t.Run(name+"-"+host, func(t *testing.T) {
				out, err := w.output(t, wait, script)
				if err != nil || !strings.Contains(out, "content of the mirror") {
					t.Errorf("%s: %v: %s", script, err, out)
				}
			})
		}
		t.Run("apt-"+host, func(t *testing.T) {
			script := "set -e; echo 'deb [trusted=yes] " + url + "/debian ./' > /etc/apt/sources.list; apt-get -q -o Acquire::Languages=none update; apt-get -q -y install berth-hello; cat /usr/share/berth-hello"
			out, err := w.output(t, 3*wait, script)
			if err != nil || !strings.HasSuffix(strings.TrimSpace(out), "hello from a package") {
				t.Errorf("apt: %v: %s", err, out)
			}
		})
	}
	t.Run("node", func(t *testing.T) {
		if out, err := w.output(t, wait, "command -v node"); err != nil {
			fmt.Printf("EGRESS tier %s: node did not run: the image has none\n", tier)
			t.Skip("the image has no node", out)
		}
		out, err := w.output(t, wait, `node -e 'fetch("https://mirror-inside.example.test/file").then(r=>r.text()).then(console.log)'`)
		if err != nil || !strings.Contains(out, "content of the mirror") {
			t.Errorf("node: %v: %s", err, out)
		}
	})
}

// mirror serves a file, a git repository and a package archive over HTTPS.
func mirror(t *testing.T, in *internet) {
	t.Helper()
	for _, n := range []string{"mirror", "mirror-inside"} {
		in.name(n+".example.test", mirrorAddr)
	}
	dir := t.TempDir()
	repository(t, dir)
	packages := archive(t)
	backend, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	git := &cgi.Handler{Path: filepath.Join(strings.TrimSpace(string(backend)), "git-http-backend"), Root: "/git",
		Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1"}}
	mux := http.NewServeMux()
	mux.HandleFunc("/file", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "content of the mirror") })
	mux.Handle("/git/", git)
	mux.HandleFunc("/debian/", func(w http.ResponseWriter, r *http.Request) {
		b, ok := packages[strings.TrimPrefix(r.URL.Path, "/debian/")]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(b)
	})
	in.serveWith(t, mirrorAddr, mux)
}

func repository(t *testing.T, dir string) {
	t.Helper()
	script := `set -e
git init -q -b main work && cd work && echo "content of the mirror" > file && git add file
git -c user.name=a -c user.email=a@example.test commit -q -m first && cd .. && git clone -q --bare work repo.git`
	cmd := exec.Command("bash", "-c", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make a repository: %v: %s", err, out)
	}
}

// archive is a flat Debian archive with one package.
func archive(t *testing.T) map[string][]byte {
	t.Helper()
	control := "Package: berth-hello\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody <nobody@example.test>\nDescription: says hello\n"
	deb := ar(map[string][]byte{"debian-binary": []byte("2.0\n"), "control.tar.gz": tgz(t, "./control", control),
		"data.tar.gz": tgz(t, "./usr/share/berth-hello", "hello from a package\n")}, "debian-binary", "control.tar.gz", "data.tar.gz")
	list := fmt.Sprintf("%sFilename: ./hello.deb\nSize: %d\nSHA256: %x\n\n", control, len(deb), sha256.Sum256(deb))
	release := fmt.Sprintf("Date: %s\nMD5Sum:\n %x %d Packages\nSHA256:\n %x %d Packages\n", time.Now().UTC().Format(time.RFC1123),
		md5.Sum([]byte(list)), len(list), sha256.Sum256([]byte(list)), len(list)) //nolint:gosec
	return map[string][]byte{"./hello.deb": deb, "hello.deb": deb, "Packages": []byte(list), "Release": []byte(release)}
}

func tgz(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	h := &tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: time.Unix(0, 0)}
	if err := w.WriteHeader(h); err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write([]byte(content))
	_, _ = w.Close(), z.Close()
	return b.Bytes()
}

func ar(files map[string][]byte, order ...string) []byte {
	b := bytes.NewBufferString("!<arch>\n")
	for _, name := range order {
		fmt.Fprintf(b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", name, 0, 0, 0, "100644", len(files[name]))
		b.Write(files[name])
		if len(files[name])%2 == 1 {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}

// serveWith answers HTTPS on port 443 of an address with a handler.
func (in *internet) serveWith(t *testing.T, addr string, h http.Handler) {
	t.Helper()
	in.https(t, in.listen(t, addr, addr, 443), h)
}
