// Command berth-guest is the guest agent of a sandbox: PID 1 in every isolation
// tier but wasm. It guarantees what package agent says; its only channel is
// stdin and stdout, or the device named by -channel=PATH.
//
// As /init of a virtual machine's initramfs it is what package vm says.
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/podroot"
	"github.com/berth-dev/berth/services/hostagent/guest/vm"
)

func main() {
	if os.Getpid() == 1 {
		switch os.Args[0] {
		case vm.InitName:
			os.Exit(vm.Main())
		case vm.StageName:
			os.Exit(vm.Stage())
		}
	}
	os.Exit(pod(os.Args[1:]))
}

// pod is what the agent does in a machine of Kata Containers, before it is the agent: -wait for the
// container that is the machine, -root=DISK for the session's.
func pod(args []string) int {
	if len(args) == 1 && args[0] == "-wait" {
		return podroot.Wait()
	}
	if len(args) > 1 && strings.HasPrefix(args[0], "-root=") && args[1] == "--" {
		argv := args[2:]
		if len(argv) == 0 {
			argv = []string{"/run/berth/guest"}
		}
		fmt.Fprintln(os.Stderr, "berth-guest:", podroot.Enter(args[0][len("-root="):], argv))
		return 1
	}
	return agent.Main(args)
}
