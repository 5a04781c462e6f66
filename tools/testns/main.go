// Command testns runs a test binary in namespaces of its own, for `go test -exec`:
//
//	go test -p 2 -exec bin/testns ./test/... ./services/hostagent/...
//
// It guarantees that two test binaries share no process, mount, network address, IPC object, cgroup path,
// /run or temporary directory, so that they may run at the same time, also from two clones. When the test
// binary ends, testns names each process, mount, cgroup, loop device, network link, network namespace and nft
// table that the tests left behind, and exits with status 1 if there is one. When testns or `go test` is
// killed, the kernel ends every process of the tests; the next testns removes the cgroups and the temporary
// directory of the killed run.
//
// testns needs root on Linux. Without root, or with BERTH_TESTNS=off, it runs the test binary as it is.
// BERTH_TESTNS_USAGE names a file to which testns appends one line of JSON with the processor time that the
// tests and all of their processes used; tools/testreport reads it.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// initArg as the first argument marks the process that is PID 1 of the new namespaces.
const initArg = "--init"

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: testns TEST-BINARY [ARGUMENT...]")
		os.Exit(2)
	}
	if os.Args[1] == initArg {
		os.Exit(runInit(os.Args[2:]))
	}
	if os.Geteuid() != 0 || os.Getenv("BERTH_TESTNS") == "off" {
		path, err := exec.LookPath(os.Args[1])
		if err == nil {
			err = syscall.Exec(path, os.Args[1:], os.Environ())
		}
		fmt.Fprintln(os.Stderr, "testns:", err)
		os.Exit(2)
	}
	os.Exit(runOuter(os.Args[1:]))
}
