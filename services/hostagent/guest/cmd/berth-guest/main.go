// Command berth-guest is the guest agent of a sandbox: PID 1 in every isolation
// tier but wasm. It guarantees what package agent says; its only channel is
// stdin and stdout, or the device named by -channel=PATH.
//
// As /init of a virtual machine's initramfs it is what package vm says.
package main

import (
	"os"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
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
	os.Exit(agent.Main(os.Args[1:]))
}
