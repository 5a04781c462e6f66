// Command identity runs the identity service of a fleet: who is asking.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/identity"
)

func main() { svcmain.Main(identity.Program()) }
