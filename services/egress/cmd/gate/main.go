// Command gate runs the gate of one host: everything that leaves a sandbox there leaves through it.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/egress/gate"
)

func main() { svcmain.Main(gate.Program()) }
