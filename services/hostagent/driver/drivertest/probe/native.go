//go:build linux

package main

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/cover"
	"github.com/berth-dev/berth/services/hostagent/guest/enter"
)

func init() {
	for name, f := range map[string]operation{
		"find":     find,
		"chown":    chown,
		"mknod":    mknod,
		"space":    space,
		"openmany": openMany,
		"netifs":   netifs,
		"netaddrs": netaddrs,
		"dial":     dial,
		"listen":   listen,
		"setuid":   setuidCopy,
		"try":      try,
		"thread":   thread,
		"spawn":    spawn,
		"fork":     fork,
		"bomb":     bomb,
		"enter":    enterRoot,
	} {
		operations[name] = f
	}
}

func prepare() {
	signal.Ignore(syscall.SIGPIPE)
	if len(os.Args) < 2 || os.Args[1] != enter.Flag {
		return
	}
	var over []cover.File
	for _, arg := range os.Args[2:] {
		if f, ok, err := cover.Arg(arg); ok && err == nil {
			over = append(over, f)
		}
	}
	enter.Over(over)
	if err := enter.Prepare(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// enterRoot makes a folder the root of all that runs here, as the guest agent does after a claim.
func enterRoot(a []string) (string, error) {
	_, err := enter.Root(a[0])
	return "", err
}

// child is a process of the sandbox other than the first.
func child(args []string) bool {
	switch args[0] {
	case "sleep":
		time.Sleep(time.Hour)
	case "bomb":
		for {
			_ = exec.Command("/proc/self/exe", "bomb").Start()
		}
	case "euid":
		fmt.Print(os.Geteuid())
	case "alloc": // MiB
		n, _ := keep(args[1:])
		fmt.Print(n)
	case "burn": // milliseconds
		ms, _ := strconv.Atoi(args[1])
		done := make(chan struct{})
		for range 4 {
			go func() {
				for {
					select {
					case <-done:
						return
					default:
					}
				}
			}()
		}
		time.Sleep(time.Duration(ms) * time.Millisecond)
		close(done)
	default:
		return false
	}
	return true
}

func stat(a []string) (string, error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(a[0], &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d:%d %o", st.Uid, st.Gid, st.Mode&0o7777), nil
}

// find lists the files below a directory that hold one of the words in their name, their target or their first
// bytes. It follows no links and waits for nothing.
func find(a []string) (string, error) {
	var found []string
	root, err := filepath.EvalSymlinks(a[0])
	if err != nil {
		return "", nil // it is not there
	}
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return fs.SkipDir // a folder that is not for us to see, or is gone
		}
		to, _ := os.Readlink(path)
		text := path + " " + to
		if e.Type().IsRegular() {
			text += " " + head(path)
		}
		if slices.ContainsFunc(a[1:], func(word string) bool { return strings.Contains(text, word) }) {
			found = append(found, path)
		}
		return nil
	})
	return strings.Join(found, "\n"), err
}

// head returns the beginning of a file; it is empty if the file cannot be read.
func head(path string) string {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = syscall.Close(fd) }()
	b := make([]byte, 64<<10)
	n, err := syscall.Read(fd, b)
	if err != nil {
		return ""
	}
	return string(b[:n])
}

func chown(a []string) (string, error) {
	uid, err := strconv.Atoi(a[1])
	if err != nil {
		return "", err
	}
	return "", os.Lchown(a[0], uid, uid)
}

func mknod(a []string) (string, error) {
	dev, _ := strconv.Atoi(a[1])
	return "", syscall.Mknod(a[0], syscall.S_IFBLK|0o600, dev)
}

// space is the size of the file system at a path.
func space(a []string) (string, error) {
	var st syscall.Statfs_t
	err := syscall.Statfs(a[0], &st)
	return strconv.FormatUint(st.Blocks*uint64(st.Bsize), 10), err
}

// openMany opens files until it cannot, or has so many, and closes them again.
func openMany(a []string) (string, error) {
	limit, _ := strconv.Atoi(a[0])
	var fds []int
	for len(fds) < limit {
		fd, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		fds = append(fds, fd)
	}
	for _, fd := range fds {
		_ = syscall.Close(fd)
	}
	return strconv.Itoa(len(fds)), nil
}

func netifs([]string) (string, error) {
	ifs, err := net.Interfaces()
	var names []string
	for _, i := range ifs {
		names = append(names, i.Name)
	}
	return strings.Join(names, "\n"), err
}

func netaddrs([]string) (string, error) {
	ifs, err := net.Interfaces()
	var all []string
	for _, i := range ifs {
		all = append(all, i.HardwareAddr.String())
	}
	return strings.Join(all, "\n"), err
}

func dial(a []string) (string, error) {
	c, err := net.DialTimeout(a[0], a[1], time.Second)
	if err == nil {
		_ = c.Close()
	}
	return "", err
}

// listen listens on the loopback address from now on.
func listen([]string) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	return l.Addr().String(), nil
}

// setuidCopy runs a set-user-id copy of this program as another user and tells who it is then.
func setuidCopy(a []string) (string, error) {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(a[0], b, 0o755); err != nil {
		return "", err
	}
	if err := os.Chmod(a[0], 0o755|os.ModeSetuid); err != nil {
		return "", err
	}
	cmd := exec.Command(a[0], "euid")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
	out, err := cmd.Output()
	return string(out), err
}

// spawn runs this program as a child and gives its output; a signal is an error that names it.
func spawn(a []string) (string, error) {
	out, err := exec.Command("/proc/self/exe", a...).Output()
	return string(out), err
}

// fork starts children until it cannot, or has started so many, and ends them again.
func fork(a []string) (string, error) {
	limit, _ := strconv.Atoi(a[0])
	var cmds []*exec.Cmd
	defer func() {
		for _, c := range cmds {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}()
	for len(cmds) < limit {
		c := exec.Command("/proc/self/exe", "sleep")
		c.Env = append(os.Environ(), "GOMAXPROCS=1")
		if err := c.Start(); err != nil {
			break
		}
		cmds = append(cmds, c)
	}
	return strconv.Itoa(len(cmds)), nil
}

// bomb starts children that start children, and waits for none of them.
func bomb([]string) (string, error) {
	return "", exec.Command("/proc/self/exe", "bomb").Start()
}
