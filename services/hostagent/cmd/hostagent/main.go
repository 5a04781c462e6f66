// Command hostagent runs the hostagent service of a fleet: the sandboxes, disks and data plane of one host.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/hostagent"
)

func main() { svcmain.Main(hostagent.Program()) }
