package errkind

// HostRemoved is what scheduler says of a host that was taken out of the cell for good, after "host <id> ",
// with kind Denied. A host takes it for its end, so nothing else may say it.
const HostRemoved = "was removed from the cell"
