// Command berth-guest is the guest agent of a sandbox: PID 1 in every isolation
// tier but wasm. It guarantees what package agent says; its only channel is
// stdin and stdout, or the device named by -channel=PATH.
//
// As /init of a virtual machine's initramfs it is what package vm says.
package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/cover"
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
// container that is the machine, -root=DISK for the session's, with -over=FILE:PATH for each file over it.
func pod(args []string) int {
	if len(args) == 1 && args[0] == "-wait" {
		return podroot.Wait()
	}
	end := slices.Index(args, "--")
	if end < 1 || !strings.HasPrefix(args[0], "-root=") {
		return agent.Main(args)
	}
	var over []cover.File
	for _, arg := range args[1:end] {
		f, ok, err := cover.Arg(arg)
		if !ok || err != nil {
			fmt.Fprintf(os.Stderr, "berth-guest: argument %q: %v\n", arg, err)
			return 1
		}
		over = append(over, f)
	}
	argv := args[end+1:]
	if len(argv) == 0 {
		argv = []string{"/run/berth/guest"}
	}
	fmt.Fprintln(os.Stderr, "berth-guest:", podroot.Enter(args[0][len("-root="):], over, argv))
	return 1
}
