package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
	"github.com/berth-dev/berth/tools/image/builder"
)

// TestATemplateNamesALocalLayoutOrArchive: not only the default image runs.
func TestATemplateNamesALocalLayoutOrArchive(t *testing.T) {
	layout, err := builder.Busybox(t.Context(), io.Discard)
	if err != nil {
		t.Skipf("no busybox image: %v", err)
	}
	archive := filepath.Join(t.TempDir(), "busybox.tar")
	run(t, "tar", "-C", layout, "-cf", archive, ".")
	config := filepath.Join(t.TempDir(), "berth.yaml")
	text := fmt.Sprintf(`lifecycle:
  policy:
    templates:
      layout: {image: %q, tier: container, limits: {cpu_millis: 500, memory_bytes: 134217728, pids: 64, disk_bytes: 268435456}}
      archive: {image: %q, tier: gvisor, limits: {cpu_millis: 500, memory_bytes: 268435456, pids: 64, disk_bytes: 268435456}}
`, layout, archive)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	e := testenv.Start(t, "--config", config)
	for _, template := range []string{"layout", "archive"} {
		s := open(t, e.Client("acme", "ann-"+template), sdk.OpenOptions{Template: template})
		if out := sh(t, s, "busybox | head -n1; test -e /usr/bin/python3 || echo no python"); !strings.Contains(out, "BusyBox") || !strings.Contains(out, "no python") {
			t.Errorf("%s: the image is another one: %s", template, out)
		}
		if limits := s.Place().Limits; limits.DiskBytes != 268435456 {
			t.Errorf("%s: the limits are %+v", template, limits)
		}
	}
}

// TestOperatorSeesTheFleet: metrics by HTTP, the fleet by `nats micro ls`.
func TestOperatorSeesTheFleet(t *testing.T) {
	e := common.For(t)
	open(t, e.Client("acme", "ann"), sdk.OpenOptions{Template: "container"})
	resp, err := http.Get(e.Metrics)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"berth_", "go_goroutines"} {
		if !bytes.Contains(body, []byte(name)) {
			t.Errorf("the metrics lack %s*", name)
		}
	}
	nats := os.Getenv("BERTH_NATSCLI")
	if _, err := os.Stat(nats); nats == "" || err != nil {
		t.Skip("natscli is not built (make test does it): nats micro ls was not tried")
	}
	login, err := sdk.ReadClientFile(e.ClientFile("operator"))
	if err != nil {
		t.Fatal(err)
	}
	seed := filepath.Join(t.TempDir(), "operator.nk")
	if err := os.WriteFile(seed, []byte(login.Seed), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), nats, "--server", login.URL, "--tlsca", e.Roots(), "--nkey", seed, "--inbox-prefix", login.Inbox, "micro", "ls")
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nats micro ls: %v\n%s", err, out)
	}
	for _, service := range []string{"identity", "lifecycle", "scheduler", "credentials", "host"} {
		if !bytes.Contains(out, []byte(service)) {
			t.Errorf("nats micro ls does not show %s:\n%s", service, out)
		}
	}
}

// TestBadStartsSayOneSentenceAndMakeNothing: what the machine or the caller
// lacks ends with status 1 before anything is made.
func TestBadStartsSayOneSentenceAndMakeNothing(t *testing.T) {
	bin := testenv.Bin(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	typo := filepath.Join(t.TempDir(), "typo.yaml")
	if err := os.WriteFile(typo, []byte("lisen: 127.0.0.1:0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	shared := t.TempDir()
	if err := os.Chmod(shared, 0o777); err != nil {
		t.Fatal(err)
	}
	// nobody must be able to read the program and the folder above the state
	public, err := os.MkdirTemp("/tmp", "berth-nobody-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(public)
	if err := os.Chmod(public, 0o777); err != nil {
		t.Fatal(err)
	}
	copyOf := filepath.Join(public, "berth")
	run(t, "cp", bin, copyOf)
	run(t, "cp", bin+"-guest", copyOf+"-guest")
	cases := map[string]struct {
		args   []string
		nobody bool
		want   string
	}{
		"port taken":    {args: []string{"--listen", taken.Addr().String()}, want: "cannot be used"},
		"bad address":   {args: []string{"--listen", "nowhere"}, want: "not an address"},
		"unknown key":   {args: []string{"--config", typo}, want: "lisen"},
		"missing guest": {args: []string{"--listen", "127.0.0.1:0"}, want: "guest agent"},
		"not root":      {args: []string{"--listen", "127.0.0.1:0"}, nobody: true, want: "root"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			program := bin
			if c.nobody {
				program = copyOf
			}
			if name == "missing guest" {
				program = filepath.Join(t.TempDir(), "berth")
				run(t, "cp", bin, program)
			}
			dir := filepath.Join(public, "state-"+strings.ReplaceAll(name, " ", "-"))
			cmd := exec.CommandContext(t.Context(), program, append([]string{"up", "--dir", dir}, c.args...)...)
			if c.nobody {
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			}
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("it ended with %v, want status 1", err)
			}
			text := strings.TrimSpace(string(out))
			if strings.Contains(text, "\n") || !strings.Contains(text, c.want) {
				t.Errorf("it says:\n%s\nwant one sentence with %q", text, c.want)
			}
			if _, err := os.Stat(dir); err == nil {
				t.Error("it made the state folder all the same")
			}
		})
	}
}
