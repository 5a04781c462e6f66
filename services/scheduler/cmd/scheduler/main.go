// Command scheduler runs the scheduler service of a fleet: where, and the truth about every session.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/scheduler"
)

func main() { svcmain.Main(scheduler.Program()) }
