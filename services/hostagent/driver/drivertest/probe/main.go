//go:build linux

// Command probe is the guest of the driver suite: the first process of a sandbox, which answers
// requests on its standard input, one JSON object per line, and tells what it can see and do.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
)

// operations by name; each takes the request's arguments.
var operations = map[string]func(args []string) (string, error){
	"read":     func(a []string) (string, error) { b, err := os.ReadFile(a[0]); return string(b), err },
	"write":    func(a []string) (string, error) { return "", os.WriteFile(a[0], []byte(a[1]), 0o644) },
	"remove":   func(a []string) (string, error) { return "", os.RemoveAll(a[0]) },
	"list":     list,
	"stat":     stat,
	"find":     find,
	"chown":    chown,
	"link":     func(a []string) (string, error) { return os.Readlink(a[0]) },
	"hostname": func([]string) (string, error) { return os.Hostname() },
	"env":      func([]string) (string, error) { return strings.Join(os.Environ(), "\n"), nil },
	"netifs":   netifs,
	"setuid":   setuidCopy,
	"try":      try,
	"thread":   thread,
	"spawn":    spawn,
	"fork":     fork,
	"exit":     func(a []string) (string, error) { n, _ := strconv.Atoi(a[0]); os.Exit(n); return "", nil },
}

func main() {
	if len(os.Args) > 1 {
		child(os.Args[1:])
		return
	}
	signal.Ignore(syscall.SIGPIPE)
	drivertest.Answer(os.Stdin, os.Stdout, func(op string, args []string) (string, error) {
		f, ok := operations[op]
		if !ok {
			return "", fmt.Errorf("no operation %q", op)
		}
		return f(args)
	})
}

// child is a process of the sandbox other than the first.
func child(args []string) {
	switch args[0] {
	case "sleep":
		time.Sleep(time.Hour)
	case "euid":
		fmt.Print(os.Geteuid())
	case "alloc": // MiB
		n, _ := strconv.Atoi(args[1])
		b := make([]byte, n<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		fmt.Print(len(b))
	case "burn": // milliseconds; prints the CPU time that it got
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
		var u syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
		fmt.Print(u.Utime.Nano()/1e6 + u.Stime.Nano()/1e6)
	}
}

func list(a []string) (string, error) {
	entries, err := os.ReadDir(a[0])
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, "\n"), err
}

func stat(a []string) (string, error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(a[0], &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d:%d %o", st.Uid, st.Gid, st.Mode&0o7777), nil
}

// find lists the files below a folder that hold a word in their name, their target or their first
// bytes. It follows no links and waits for nothing.
func find(a []string) (string, error) {
	var found []string
	err := filepath.WalkDir(a[0], func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return fs.SkipDir // a folder that is not for us to see, or is gone
		}
		to, _ := os.Readlink(path)
		if strings.Contains(path+" "+to, a[1]) || e.Type().IsRegular() && holds(path, a[1]) {
			found = append(found, path)
		}
		return nil
	})
	return strings.Join(found, "\n"), err
}

func holds(path, word string) bool {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = syscall.Close(fd) }()
	b := make([]byte, 64<<10)
	n, err := syscall.Read(fd, b)
	return err == nil && strings.Contains(string(b[:n]), word)
}

func chown(a []string) (string, error) {
	uid, err := strconv.Atoi(a[1])
	if err != nil {
		return "", err
	}
	return "", os.Lchown(a[0], uid, uid)
}

func netifs([]string) (string, error) {
	ifs, err := net.Interfaces()
	var names []string
	for _, i := range ifs {
		names = append(names, i.Name)
	}
	return strings.Join(names, "\n"), err
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

// try attempts what a sandbox must not be able to do.
func try(a []string) (string, error) {
	switch a[0] {
	case "mount":
		return "", syscall.Mount("tmpfs", "/mnt", "tmpfs", 0, "")
	case "mknod":
		return "", syscall.Mknod("/disk", syscall.S_IFBLK|0o600, 7<<8)
	case "raw":
		_, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, 0)
		return "", err
	case "socket":
		family, _ := strconv.Atoi(a[1])
		fd, err := syscall.Socket(family, syscall.SOCK_DGRAM, 0)
		if err == nil {
			_ = syscall.Close(fd)
		}
		return "", err
	case "userns":
		return "", syscall.Unshare(syscall.CLONE_NEWUSER)
	case "keyring": // blocked by the seccomp profile alone
		_, _, errno := syscall.Syscall6(syscall.SYS_ADD_KEY, 0, 0, 0, 0, 0, 0)
		if errno == syscall.EFAULT || errno == syscall.EINVAL || errno == syscall.ENOSYS {
			if errno == syscall.ENOSYS {
				return "", errno
			}
			return "", nil
		}
		return "", errno
	case "sysctl":
		return "", os.WriteFile("/proc/sys/kernel/core_pattern", []byte("|/x"), 0o644)
	case "reboot":
		return "", syscall.Reboot(syscall.LINUX_REBOOT_CMD_CAD_OFF)
	case "dial":
		c, err := net.DialTimeout("tcp", "192.0.2.1:80", time.Second)
		if err == nil {
			_ = c.Close()
		}
		return "", err
	}
	return "", errors.New("unknown attempt")
}

// thread makes the call with which a libc starts threads: it may be missing, but not forbidden.
func thread([]string) (string, error) {
	const clone3 = 435
	_, _, errno := syscall.Syscall(clone3, 0, 0, 0)
	if errno == syscall.EPERM || errno == syscall.EACCES {
		return "", errno
	}
	return "", nil
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
