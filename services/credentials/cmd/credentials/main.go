// Command credentials runs the credentials service of a fleet: grants and keys.
package main

import (
	"github.com/berth-dev/berth/internal/svcmain"
	"github.com/berth-dev/berth/services/credentials"
)

func main() { svcmain.Main(credentials.Program()) }
