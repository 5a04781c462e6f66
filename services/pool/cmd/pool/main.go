// Command pool runs the pool service of a fleet: how many warm sandboxes each template has, and where.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/pool"
)

func main() { svcmain.Main(pool.Program()) }
