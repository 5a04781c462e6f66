package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/tools/residue"
)

// endTime is how long processes that the tests stopped have to end.
var endTime = 10 * time.Second

// addrGenNone is IN6_ADDR_GEN_MODE_NONE of linux/if_link.h: a device without a link-local address.
const addrGenNone = 1

// runInit is PID 1: it prepares the namespaces, runs the test binary, reaps every orphan, and names what the
// tests left behind.
func runInit(args []string) int {
	runtime.LockOSThread() // the cgroup namespace belongs to the thread, and a child inherits it
	if err := prepare(); err != nil {
		return fail(err)
	}
	before := look()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	signals := make(chan os.Signal, 64)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGHUP, unix.SIGCHLD)
	if err := cmd.Start(); err != nil {
		return fail(err)
	}
	code := waitFor(cmd.Process.Pid, signals)
	if left := leftovers(before, signals); len(left) > 0 {
		fmt.Printf("left behind by the tests of %s:\n  %s\n", filepath.Base(args[0]), strings.Join(left, "\n  "))
		if code == 0 {
			code = 1
		}
	}
	return code
}

// prepare mounts what the new namespaces need: /proc, /sys, cgroups and an empty /run.
func prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := detachForeign(); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := enterCgroups(os.Getenv("BERTH_TESTNS_CGROUP")); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	return network()
}

// network brings up the loopback device and gives the namespace an address beside it, as a machine has, so
// that tests can prove that a sandbox does not reach its host there. The address is one for documentation
// (RFC 5737), and no route leads out.
func network() error {
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"}); err != nil {
		return fmt.Errorf("make a network device: %w", err)
	}
	for _, name := range []string{"lo", "eth0", "eth1"} {
		link, err := netlink.LinkByName(name)
		if err == nil && name == "eth0" {
			err = netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(192, 0, 2, 2), Mask: net.CIDRMask(24, 32)}})
		}
		if err == nil && name != "lo" {
			err = netlink.LinkSetIP6AddrGenMode(link, addrGenNone)
		}
		if err == nil {
			err = netlink.LinkSetUp(link)
		}
		if err != nil {
			return fmt.Errorf("bring up %s: %w", name, err)
		}
	}
	return nil
}

// detachForeign detaches the copies of disks, root file systems and network namespaces that other programs
// mounted: a copy would keep the original busy after its owner unmounted it.
func detachForeign() error {
	all := mountsBelow("/")
	for _, m := range slices.Backward(all) {
		if m.point == "/" || !strings.HasPrefix(m.source, "/dev/loop") && m.fstype != "nsfs" && m.fstype != "overlay" {
			continue
		}
		if err := unix.Unmount(m.point, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("detach the copy of %s: %w", m.point, err)
		}
	}
	return nil
}

// waitFor reaps processes until pid ends and returns its exit status; other signals go to pid.
func waitFor(pid int, signals <-chan os.Signal) int {
	for s := range signals {
		if s != unix.SIGCHLD {
			_ = syscall.Kill(pid, s.(syscall.Signal))
			continue
		}
		for {
			var ws unix.WaitStatus
			got, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || got <= 0 {
				break
			}
			if got == pid && ws.Exited() {
				return ws.ExitStatus()
			}
			if got == pid {
				fmt.Fprintf(os.Stderr, "testns: the test binary ended by signal %s\n", ws.Signal())
				return 128 + int(ws.Signal())
			}
		}
	}
	return 2
}

// state is what may be left behind.
type state struct {
	residue residue.Residue
	tables  []string
}

func look() state {
	s := state{residue: residue.Take()}
	s.residue.Processes, s.residue.Namespaces = nil, nil // every process of these namespaces counts; see processes
	s.residue.Loops = slices.DeleteFunc(s.residue.Loops, func(l string) bool { return !strings.Contains(l, os.Getenv("TMPDIR")+"/") })
	c := nftables.Conn{}
	if all, err := c.ListTables(); err == nil {
		for _, t := range all {
			s.tables = append(s.tables, "nft table "+t.Name)
		}
	}
	return s
}

// leftovers names what the tests left behind. A process that is on its way out has endTime.
func leftovers(before state, signals <-chan os.Signal) []string {
	end := time.After(endTime)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		for {
			got, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if err != nil || got <= 0 {
				break
			}
		}
		now := look()
		left := slices.Concat(processes(), now.residue.Since(before.residue).List())
		for _, t := range now.tables {
			if !slices.Contains(before.tables, t) {
				left = append(left, t)
			}
		}
		if len(left) == 0 {
			return nil
		}
		select {
		case <-end:
			return left
		case <-signals:
		case <-tick.C:
		}
	}
}

// processes lists those of this PID namespace but PID 1.
func processes() (out []string) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid != 1 {
			cmd, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
			out = append(out, fmt.Sprintf("process %d %.200s", pid, strings.ReplaceAll(string(cmd), "\x00", " ")))
		}
	}
	return out
}
