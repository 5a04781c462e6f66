// Command berth-guest is the guest agent of a sandbox: PID 1 in every isolation
// tier but wasm. It guarantees what package agent says; its only channel is
// stdin and stdout, or the device named by -channel=PATH.
package main

import (
	"os"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
)

func main() { os.Exit(agent.Main(os.Args[1:])) }
