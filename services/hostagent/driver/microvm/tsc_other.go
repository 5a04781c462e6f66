//go:build linux && !amd64

package microvm

// tscKHz is of no use where the processor has no such counter; preflight refuses such a host.
func tscKHz() uint64 { return 0 }
