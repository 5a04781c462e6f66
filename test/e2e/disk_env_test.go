package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"text/template"
	"time"

	"google.golang.org/protobuf/proto"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// diskTerms are how the tests of disks run berth up: small disks, in tier container if nothing else is asked for.
type diskTerms struct {
	CPU     uint64        // thousandths of a core of each session
	Store   string        // empty: nats://
	Disk    uint64        // bytes of each disk
	Every   time.Duration // between snapshots while awake; 0: only at checkpoints and sleep
	Idle    time.Duration
	Pool    uint64 // bytes; 0: as large as the file system
	Reserve uint64
	Evict   int
}

var diskConfig = template.Must(template.New("").Parse(`lifecycle:
  policy:
    templates:
      default: {image: default, tier: gvisor, limits: {cpu_millis: {{.CPU}}, memory_bytes: 536870912, pids: 256, disk_bytes: {{.Disk}}}}
      container: {image: default, tier: container, limits: {cpu_millis: {{.CPU}}, memory_bytes: 536870912, pids: 256, disk_bytes: {{.Disk}}}}
    plans:
      default: {template: container, idle: {{.Idle}}, retention: 720h, snapshots: {every: {{.Every}}}}
host:
  disk: {store: "{{.Store}}", pool_bytes: {{.Pool}}, reserve: {{.Reserve}}, evict_above: {{.Evict}}, ready: 1}
`))

// diskEnv starts berth up with these terms.
func diskEnv(t *testing.T, d diskTerms) *testenv.Env {
	t.Helper()
	return testenv.Start(t, "--config", diskFile(t, d))
}

// diskFile is a configuration with these terms.
func diskFile(t *testing.T, d diskTerms) string {
	t.Helper()
	config := filepath.Join(t.TempDir(), "berth.yaml")
	file, err := os.Create(config)
	if err == nil {
		defer file.Close()
		err = writeDiskConfig(file, d)
	}
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// writeDiskConfig writes the configuration; what is zero has a default for tests.
func writeDiskConfig(w io.Writer, d diskTerms) error {
	d.Store = cmp.Or(d.Store, "nats://")
	d.CPU = cmp.Or(d.CPU, 2000)
	d.Disk = cmp.Or(d.Disk, 256<<20)
	d.Idle = cmp.Or(d.Idle, time.Hour)
	d.Reserve = cmp.Or(d.Reserve, 256<<20)
	d.Evict = cmp.Or(d.Evict, 85)
	return diskConfig.Execute(w, d)
}

// fileStore is a folder for a store in files, and its URL.
func fileStore(t *testing.T) (dir, url string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "store")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir, "file://" + dir
}

// tree makes files of all kinds in the session and returns what sums says of them.
func tree(t *testing.T, s *sdk.Session) string {
	t.Helper()
	sh(t, s, `set -e
		mkdir -p /root/work/deep /opt/pkg; head -c 20000000 /dev/urandom > /root/work/random
		head -c 30000000 /dev/zero > /root/work/zeros; truncate -s 40M /root/work/hole; echo end >> /root/work/hole
		i=0; while [ $i -lt 200 ]; do echo $i > /root/work/deep/$i; i=$((i+1)); done
		echo tool > /opt/pkg/tool; chmod 4755 /opt/pkg/tool; chown 1000:1000 /opt/pkg; ln -s ../work/random /root/work/deep/link
		rm /etc/issue; echo changed >> /etc/profile; sync`)
	return sums(t, s)
}

// sums is a digest of every file that tree made, with owners, modes and links.
func sums(t *testing.T, s *sdk.Session) string {
	t.Helper()
	return sh(t, s, `set -e
		find /root /opt /etc/profile -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum
		find /root /opt /etc -printf '%p %y %m %U:%G %l\n' | grep -v -e /etc/hosts -e /etc/resolv -e /etc/hostname -e /etc/mtab | sort | sha256sum
		test ! -e /etc/issue && echo removed`)
}

// put writes a file, which is acknowledged only when it is on the host's disk.
func put(t *testing.T, s *sdk.Session, path, content string) {
	t.Helper()
	if _, err := s.Files().Write(t.Context(), path, strings.NewReader(content), sdk.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// content reads a file; "-" when it is not there.
func content(t *testing.T, s *sdk.Session, path string) string {
	t.Helper()
	return sh(t, s, "cat "+path+" 2>/dev/null || echo -")
}

// shown is what `berth session show` says of a session.
type shown struct {
	State        string     `json:"state"`
	Manifest     string     `json:"manifest"`
	Origin       string     `json:"origin"`
	RestoredAsOf *time.Time `json:"restored_as_of"`
	Generation   string     `json:"generation"`
	Failure      struct {
		Kind, Reason string
	} `json:"failure"`
}

func show(t *testing.T, e *testenv.Env, key string) (out shown) {
	t.Helper()
	text, err := e.CLI("session", "show", key, "--json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

// placeInside is what the session itself can read of where it is.
func placeInside(t *testing.T, s *sdk.Session) (p struct {
	Origin string
	AsOf   *time.Time `json:"restored_as_of"`
	Text   []string
}) {
	t.Helper()
	text := sh(t, s, "cat /run/berth/session.json")
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return p
}

// listener notes the events of one session.
type listener struct {
	mu   sync.Mutex
	seen []sdk.Event
	more chan struct{}
}

// listen hears as c, from now on, until the test ends.
func listen(t *testing.T, c *sdk.Client, key string) *listener {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	events, err := c.Events(ctx, sdk.EventFilter{Session: key})
	if err != nil {
		t.Fatal(err)
	}
	l := &listener{more: make(chan struct{}, 1)}
	go func() {
		for ev, err := range events {
			if err != nil {
				return
			}
			l.mu.Lock()
			l.seen = append(l.seen, ev)
			l.mu.Unlock()
			select {
			case l.more <- struct{}{}:
			default:
			}
		}
	}()
	return l
}

// await waits for an event of the name which ok, when given, agrees with.
func (l *listener) await(t *testing.T, name string, ok func(sdk.Event) bool) sdk.Event {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		l.mu.Lock()
		seen := l.seen
		l.mu.Unlock()
		for _, ev := range seen {
			if ev.Name == name && (ok == nil || ok(ev)) {
				return ev
			}
		}
		select {
		case <-l.more:
		case <-timeout:
			var names []string
			for _, ev := range seen {
				names = append(names, ev.Name)
			}
			t.Fatalf("no event %s; there were %v", name, names)
		}
	}
}

// names of the events so far.
func (l *listener) names() (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ev := range l.seen {
		out = append(out, ev.Name)
	}
	return out
}

// hostEvent reads the body of an event of a host.
func hostEvent(t *testing.T, ev sdk.Event) *hostv1.Event {
	t.Helper()
	if b, ok := ev.Body.(*hostv1.Event); ok {
		return b
	}
	b := &hostv1.Event{}
	if err := proto.Unmarshal(ev.Raw, b); err != nil {
		t.Fatal(err)
	}
	return b
}

// sentence checks that a reason is one that a user can read.
func sentence(t *testing.T, what, text string) {
	t.Helper()
	if len(text) < 20 || text[0] < 'A' || text[0] > 'Z' || !strings.HasSuffix(text, ".") || strings.Contains(text, "\n") {
		t.Errorf("%s: no sentence for a user: %q", what, text)
	}
}

// eventually waits until f is nil.
func eventually(t *testing.T, most time.Duration, f func() error) {
	t.Helper()
	for end := time.Now().Add(most); ; time.Sleep(100 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after %s: %v", most, err)
		}
	}
}

// images are the disk images of a session in the pool.
func images(t *testing.T, e *testenv.Env, key string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(e.PoolDir(), "sessions", key+"*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// objects are the files of a store that belong to a session.
func objects(t *testing.T, store, key string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(store, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		}
		if strings.Contains(path, key) {
			out = append(out, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
