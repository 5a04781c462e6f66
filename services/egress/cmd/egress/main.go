// Command egress runs the egress service of a fleet: the policies that say what may leave a sandbox.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/egress"
)

func main() { svcmain.Main(egress.Program()) }
