// Command lifecycle runs the lifecycle service of a fleet: when, and under what terms.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/lifecycle"
)

func main() { svcmain.Main(lifecycle.Program()) }
