package netns

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes network namespaces, so it needs root")
	}
}

func pinned(t testing.TB) string {
	t.Helper()
	needRoot(t)
	path := filepath.Join(t.TempDir(), "ns")
	if made, err := Pin(path); err != nil || !made {
		t.Fatalf("pin: %v, %v", made, err)
	}
	t.Cleanup(func() {
		if err := Remove(path); err != nil {
			t.Error(err)
		}
	})
	return path
}

// inode is the number of the namespace that the calling thread is in.
func inode() (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat(own, &st)
	return st.Ino, err
}

func inodeAt(t testing.TB, path string) uint64 {
	t.Helper()
	var in uint64
	if err := Do(path, func() (err error) { in, err = inode(); return err }); err != nil {
		t.Fatal(err)
	}
	return in
}

func TestAPinIsANamespaceOfItsOwnAndIsFoundAgain(t *testing.T) {
	path := pinned(t)
	here, err := inode()
	if err != nil {
		t.Fatal(err)
	}
	there := inodeAt(t, path)
	if here == there {
		t.Fatal("the namespace is the process's own")
	}
	if made, err := Pin(path); err != nil || made {
		t.Fatalf("pinned again: %v, %v", made, err)
	}
	if again := inodeAt(t, path); again != there {
		t.Error("the pin is another namespace now")
	}
	out, err := exec.Command("readlink", "/proc/self/ns/net").Output()
	if err != nil || string(out) != fmt.Sprintf("net:[%d]\n", here) {
		t.Errorf("the process is elsewhere: %s, %v", out, err)
	}
}

func TestAFileThatIsNoMountIsReplaced(t *testing.T) {
	needRoot(t)
	path := filepath.Join(t.TempDir(), "ns")
	if err := os.WriteFile(path, []byte("left by an earlier start"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); !errors.Is(err, ErrNotPinned) {
		t.Errorf("a plain file: %v", err)
	}
	if made, err := Pin(path); err != nil || !made {
		t.Fatalf("pin: %v, %v", made, err)
	}
	inodeAt(t, path)
	if err := Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
	if err := Remove(path); err != nil {
		t.Errorf("removed twice: %v", err)
	}
}

// TestAProcessNamesItsNamespaceToo: what the kernel gives is a link.
func TestAProcessNamesItsNamespaceToo(t *testing.T) {
	needRoot(t)
	here, err := inode()
	if err != nil {
		t.Fatal(err)
	}
	if there := inodeAt(t, fmt.Sprintf("/proc/%d/ns/net", os.Getpid())); there != here {
		t.Errorf("%d, not %d", there, here)
	}
}

// TestOtherThingsAreNoNamespace: a namespace of another kind is refused, and a link to nothing.
func TestOtherThingsAreNoNamespace(t *testing.T) {
	path := pinned(t)
	link := filepath.Join(filepath.Dir(path), "link")
	if err := os.Symlink(filepath.Join(filepath.Dir(path), "elsewhere"), link); err != nil {
		t.Fatal(err)
	}
	if _, err := Pin(link); err == nil {
		t.Error("a symbolic link was pinned over")
	}
	if f, err := Open("/proc/self/ns/mnt"); !errors.Is(err, ErrNotPinned) {
		f.Close()
		t.Errorf("a mount namespace: %v", err)
	}
	if isNetwork(-1) {
		t.Error("nothing is a namespace")
	}
	if err := Do(filepath.Join(filepath.Dir(path), "none"), func() error { return nil }); !errors.Is(err, ErrNotPinned) {
		t.Errorf("none: %v", err)
	}
}

// TestNoGoroutineStaysThere: whatever became of a function, no thread of the process is left in the namespace.
func TestNoGoroutineStaysThere(t *testing.T) {
	path := pinned(t)
	here, err := inode()
	if err != nil {
		t.Fatal(err)
	}
	fault := errors.New("a fault")
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			err := Do(path, func() error {
				if i%4 == 0 { // it cannot come back from here but by the way that was kept
					_ = unix.Unshare(unix.CLONE_NEWNET)
				}
				runtime.Gosched()
				return fault
			})
			if !errors.Is(err, fault) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, th := range threads {
		to, err := os.Readlink("/proc/self/task/" + th.Name() + "/ns/net")
		if err == nil && to != fmt.Sprintf("net:[%d]", here) {
			t.Errorf("the thread %s is in %s", th.Name(), to)
		}
	}
}

func TestSocketsStayWhereTheyWereOpened(t *testing.T) {
	path := pinned(t)
	if err := Do(path, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	}); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(path, "tcp4", "127.0.0.1:0", Transparent)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "here")
			c.Close()
		}
	}()
	if c, err := net.Dial("tcp4", l.Addr().String()); err == nil {
		c.Close()
		t.Error("the listener is in the process's own namespace")
	}
	var c net.Conn
	err = Do(path, func() (err error) { c, err = net.Dial("tcp4", l.Addr().String()); return err })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := io.ReadAll(c); err != nil || string(b) != "here" {
		t.Errorf("%q, %v", b, err)
	}
	p, err := ListenPacket(path, "udp6", "[::1]:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.WriteTo([]byte("to itself"), p.LocalAddr()); err != nil {
		t.Error(err)
	}
	if n, _, err := p.ReadFrom(make([]byte, 64)); err != nil || n != 9 {
		t.Error(n, err)
	}
	l6, err := Listen(path, "tcp6", "[::]:0", Transparent)
	if err != nil {
		t.Fatal(err)
	}
	l6.Close()
}

// TestANameIsNoAddress: to look it up would be the work of goroutines that are elsewhere.
func TestANameIsNoAddress(t *testing.T) {
	path := pinned(t)
	for _, a := range []string{"localhost:0", "example.com:80", "127.0.0.1", "1.2.3:1"} {
		if l, err := Listen(path, "tcp", a, nil); err == nil {
			l.Close()
			t.Errorf("listens at %q", a)
		}
		if l, err := ListenPacket(path, "udp", a, nil); err == nil {
			l.Close()
			t.Errorf("listens at %q", a)
		}
	}
}
