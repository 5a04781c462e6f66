package hostend_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// patternReader gives size bytes of the pattern of seed 5.
type patternReader struct{ at, size uint64 }

func (r *patternReader) Read(p []byte) (int, error) {
	if r.at == r.size {
		return 0, io.EOF
	}
	n := min(uint64(len(p)), r.size-r.at)
	fill(p[:n], 5, r.at)
	r.at += n
	return int(n), nil
}

func put(t *testing.T, c *hostend.Conn, path, text string, opts hostend.WriteOptions) error {
	t.Helper()
	_, err := c.WriteFile(testContext(t), hostend.Path{Name: path}, strings.NewReader(text), opts)
	return err
}

func get(t *testing.T, c *hostend.Conn, path hostend.Path, offset, length uint64) (string, error) {
	t.Helper()
	r, err := c.ReadFile(testContext(t), path, offset, length)
	if err != nil {
		return "", err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return string(b), err
}

func TestLargeFileThereAndBack(t *testing.T) {
	c := startGuest(t).attach()
	const size = 80<<20 + 12345
	path := hostend.Path{Name: filepath.Join(t.TempDir(), "a", "b", "large")}
	info, err := c.WriteFile(testContext(t), path, &patternReader{size: size}, hostend.WriteOptions{Parents: true})
	if err != nil || info.Size != size || info.Mode != 0o644 || info.Name != "large" {
		t.Fatalf("%+v, %v", info, err)
	}
	r, err := c.ReadFile(testContext(t), path, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	buf := make([]byte, 1<<20)
	for at := uint64(0); ; {
		n, err := io.ReadFull(r, buf)
		if bad := checkPattern(buf[:n], 5, at); bad >= 0 {
			t.Fatalf("wrong byte at %d", bad)
		}
		if at += uint64(n); err != nil {
			if at != size || err != io.ErrUnexpectedEOF {
				t.Fatalf("%d bytes, %v", at, err)
			}
			break
		}
	}
}

func TestWriteReplacesAtOnceOrNotAtAll(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	dir := t.TempDir()
	file := dir + "/f"
	mode := uint32(0o4751)
	if err := put(t, c, file, "old", hostend.WriteOptions{Mode: &mode}); err != nil {
		t.Fatal(err)
	}
	broken := io.MultiReader(strings.NewReader(strings.Repeat("new", 1<<20)), failing{})
	if _, err := c.WriteFile(testContext(t), hostend.Path{Name: file}, broken, hostend.WriteOptions{}); !errors.Is(err, errBroken) {
		t.Fatalf("broken content: %v", err)
	}
	if err := put(t, c, file, "x", hostend.WriteOptions{New: true}); !errors.Is(err, hostend.ErrExists) {
		t.Errorf("new where there is one: %v", err)
	}
	if text, err := get(t, c, hostend.Path{Name: file}, 0, 0); text != "old" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if err := put(t, c, file, "new", hostend.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if st, err := c.Stat(testContext(t), hostend.Path{Name: file}, false); err != nil || st.Mode != mode || st.Size != 3 {
		t.Errorf("%+v, %v", st, err)
	}
	if err := put(t, c, file, "EW!", hostend.WriteOptions{InPlace: true, Offset: 1}); err != nil {
		t.Fatal(err)
	}
	if text, _ := get(t, c, hostend.Path{Name: file}, 0, 0); text != "nEW!" {
		t.Errorf("%q", text)
	}
	if text, _ := get(t, c, hostend.Path{Name: file}, 1, 2); text != "EW" {
		t.Errorf("%q", text)
	}
	if text, err := get(t, c, hostend.Path{Name: file}, 100, 2); text != "" || err != nil {
		t.Errorf("beyond the end: %q, %v", text, err)
	}
	// The cancelled write is cleaned up by the guest in its own time.
	for range 1000 {
		if left, _ := filepath.Glob(dir + "/.berth-*"); len(left) == 0 {
			return
		}
		if _, err := c.Ping(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	t.Error("temporary files are left")
}

var errBroken = errors.New("content broke")

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errBroken }

func TestPathsAtTheEdge(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	dir := t.TempDir()
	ctx := testContext(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(dir+"/d", 0o755))
	must(unix.Mkfifo(dir+"/fifo", 0o644))
	must(os.Symlink("real", dir+"/link"))
	must(os.Symlink("loop", dir+"/loop"))
	must(os.Symlink("nowhere/file", dir+"/deep"))
	for name, want := range map[string]error{
		"": hostend.ErrInvalid, "a\x00b": hostend.ErrInvalid, dir: hostend.ErrIsDir, dir + "/d/": hostend.ErrIsDir,
		dir + "/d/..": hostend.ErrIsDir, dir + "/fifo": hostend.ErrNotRegular, "/dev/null": hostend.ErrNotRegular,
		dir + "/no/such": hostend.ErrNotFound, dir + "/deep": hostend.ErrNotFound, "/": hostend.ErrIsDir,
		dir + "/fifo/x":                      hostend.ErrNotDir,
		dir + "/" + strings.Repeat("n", 256): &hostend.Error{Kind: "name_too_long"},
		dir + "/loop":                        &hostend.Error{Kind: "symlink_loop"},
	} {
		if err := put(t, c, name, "x", hostend.WriteOptions{}); !errors.Is(err, want) {
			t.Errorf("write %q: %v, want %v", name, err, want)
		}
		if _, err := get(t, c, hostend.Path{Name: name}, 0, 0); err == nil {
			t.Errorf("read of %q gave no error", name)
		}
	}
	must(put(t, c, dir+"/link", "through", hostend.WriteOptions{}))
	if b, err := os.ReadFile(dir + "/real"); string(b) != "through" {
		t.Errorf("%q, %v", b, err)
	}
	if st, err := c.Stat(ctx, hostend.Path{Name: dir + "/link"}, false); err != nil || st.Type != "symlink" || st.Target != "real" {
		t.Errorf("%+v, %v", st, err)
	}
	if st, err := c.Stat(ctx, hostend.Path{Name: "link", Cwd: dir}, true); err != nil || st.Type != "file" || st.Size != 7 {
		t.Errorf("%+v, %v", st, err)
	}
	odd := dir + "/\xff new\nline\xfe"
	must(put(t, c, odd, "odd", hostend.WriteOptions{}))
	if text, err := get(t, c, hostend.Path{Name: odd}, 0, 0); text != "odd" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	files, more, err := c.List(ctx, hostend.Path{Name: dir}, "loop", 0)
	if err != nil || more || len(files) != 2 || string(files[1].Name) != filepath.Base(odd) {
		t.Errorf("%+v, %v, %v", files, more, err)
	}
	must(put(t, c, dir+"/"+strings.Repeat("n", 255), "x", hostend.WriteOptions{}))
	must(put(t, c, dir+"/empty", "", hostend.WriteOptions{}))
	if text, err := get(t, c, hostend.Path{Name: dir + "/empty"}, 0, 0); text != "" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if text, err := get(t, c, hostend.Path{Name: "/proc/self/status"}, 0, 0); !strings.HasPrefix(text, "Name:") || err != nil {
		t.Errorf("a file without a size: %q, %v", text, err)
	}
}

func TestListIsPaged(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	dir := t.TempDir()
	want := 0
	for i := range 2500 {
		if err := os.WriteFile(fmt.Sprintf("%s/%s-%05d", dir, strings.Repeat("n", 200), i), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		want++
	}
	for _, limit := range []int{0, 7, 333} {
		got, after := 0, ""
		for more := true; more; {
			var files []hostend.FileInfo
			var err error
			if files, more, err = c.List(testContext(t), hostend.Path{Name: dir}, after, limit); err != nil {
				t.Fatal(err)
			}
			got += len(files)
			if len(files) > 0 {
				after = string(files[len(files)-1].Name)
			}
		}
		if got != want {
			t.Errorf("limit %d: %d of %d", limit, got, want)
		}
	}
	if _, _, err := c.List(testContext(t), hostend.Path{Name: dir + "/none"}, "", 0); !errors.Is(err, hostend.ErrNotFound) {
		t.Error(err)
	}
}

func TestMakeMoveRemove(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	ctx := testContext(t)
	dir := t.TempDir()
	at := func(name string) hostend.Path { return hostend.Path{Name: name, Cwd: dir} }
	check := func(what string, err, want error) {
		t.Helper()
		if want == nil && err != nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	check("mkdir without parents", c.Mkdir(ctx, at("a/b"), 0, false), hostend.ErrNotFound)
	check("mkdir", c.Mkdir(ctx, at("a/b"), 0o1777, true), nil)
	check("mkdir again", c.Mkdir(ctx, at("a/b"), 0, true), nil)
	check("mkdir that exists", c.Mkdir(ctx, at("a/b"), 0, false), hostend.ErrExists)
	if st, _ := c.Stat(ctx, at("a/b"), false); st.Mode != 0o1777 || st.Type != "dir" {
		t.Errorf("%+v", st)
	}
	check("write", put(t, c, dir+"/a/f", "f", hostend.WriteOptions{}), nil)
	check("write", put(t, c, dir+"/g", "g", hostend.WriteOptions{}), nil)
	check("move onto a file", c.Move(ctx, at("a/f"), "g", false), hostend.ErrExists)
	check("move and replace", c.Move(ctx, at("a/f"), "g", true), nil)
	check("move of nothing", c.Move(ctx, at("a/f"), "g", true), hostend.ErrNotFound)
	check("move to another file system", c.Move(ctx, at("g"), "/dev/shm/berth-test-g", true), hostend.ErrCrossDevice)
	check("remove of a full directory", c.Remove(ctx, at("a"), false), hostend.ErrNotEmpty)
	check("remove all", c.Remove(ctx, at("a"), true), nil)
	check("remove all again", c.Remove(ctx, at("a"), true), hostend.ErrNotFound)
	check("remove the root", c.Remove(ctx, hostend.Path{Name: "//."}, true), hostend.ErrInvalid)
	check("remove", c.Remove(ctx, at("g"), false), nil)
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestFilesWithThePermissionsOfTheUser(t *testing.T) {
	ctx := testContext(t)
	dir, err := os.MkdirTemp("/tmp", "berth-guest-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for _, step := range []error{
		os.Chmod(dir, 0o755), os.Mkdir(dir+"/open", 0), os.Chmod(dir+"/open", 0o777),
		os.WriteFile(dir+"/secret", []byte("s"), 0o600), os.Mkdir(dir+"/group", 0), os.Chmod(dir+"/group", 0o770), os.Chown(dir+"/group", 0, 777),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	c := startGuest(t).attach()
	as := func(name, user string) hostend.Path { return hostend.Path{Name: dir + "/" + name, User: user} }
	if _, err := get(t, c, as("secret", "nobody"), 0, 0); !errors.Is(err, hostend.ErrPermission) {
		t.Errorf("read of a secret: %v", err)
	}
	write := func(p hostend.Path) (hostend.FileInfo, error) {
		return c.WriteFile(ctx, p, bytes.NewReader([]byte("x")), hostend.WriteOptions{})
	}
	for name, err := range map[string]error{
		"write":  func() error { _, err := write(as("new", "nobody")); return err }(),
		"mkdir":  c.Mkdir(ctx, as("new", "nobody"), 0, false),
		"move":   c.Move(ctx, as("secret", "nobody"), dir+"/open/secret", false),
		"remove": c.Remove(ctx, as("secret", "nobody"), false),
		"group":  c.Mkdir(ctx, as("group/d", "nobody"), 0, false),
	} {
		if !errors.Is(err, hostend.ErrPermission) {
			t.Errorf("%s by nobody: %v", name, err)
		}
	}
	if info, err := write(as("open/f", "1234:777")); err != nil || info.UID != 1234 || info.GID != 777 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := c.Mkdir(ctx, as("group/d", "1234:777"), 0, false); err != nil {
		t.Error(err)
	}
	// root replaces the file of a user, who keeps it.
	if info, err := write(as("open/f", "root")); err != nil || info.UID != 1234 {
		t.Errorf("%+v, %v", info, err)
	}
	// The threads that played the user are root again.
	for i := range 50 {
		if _, err := get(t, c, as("secret", ""), 0, 0); err != nil {
			t.Fatal(i, err)
		}
		_, _ = get(t, c, as("secret", "nobody"), 0, 0)
	}
}

func TestNoSpace(t *testing.T) {
	c := startGuest(t).attach()
	// The mount is inside the guest's own mount namespace.
	dir := t.TempDir()
	run(t, c, "mount", "mount -t tmpfs -o size=1m none "+dir).wantCode(t, 0)
	if err := put(t, c, dir+"/f", "old", hostend.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := c.WriteFile(testContext(t), hostend.Path{Name: dir + "/f"}, &patternReader{size: 3 << 20}, hostend.WriteOptions{})
	if !errors.Is(err, hostend.ErrNoSpace) {
		t.Errorf("write to a full disk: %v", err)
	}
	if text, err := get(t, c, hostend.Path{Name: dir + "/f"}, 0, 0); text != "old" {
		t.Errorf("%q, %v", text, err)
	}
}

func TestWatch(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	dir := t.TempDir()
	ctx := testContext(t)
	w, err := c.Watch(ctx, hostend.Path{Name: dir}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	await := func(op, path string) {
		t.Helper()
		for {
			ev, err := w.Next(ctx)
			if err != nil {
				t.Fatalf("%s %s never came: %v", op, path, err)
			}
			if ev.Op == op && string(ev.Path) == path {
				return
			}
		}
	}
	if err := os.Mkdir(dir+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	await("create", dir+"/sub")
	run(t, c, "churn", fmt.Sprintf("for i in $(seq 3000); do echo > %s/f$i; done", dir))
	await("overflow", "") // nobody took events meanwhile
	if _, err := c.Watch(ctx, hostend.Path{Name: dir + "/none"}, false); !errors.Is(err, hostend.ErrNotFound) {
		t.Error(err)
	}
	short, cancel := context.WithCancel(ctx)
	cancel()
	w.Close()
	for {
		if _, err := w.Next(short); err != nil {
			break
		}
	}
}
