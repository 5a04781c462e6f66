package errkind

// VMWritten is what a host says of a disk that it refuses to mount, with kind Refused. Scheduler takes it
// for the truth of that disk and wakes the session in a tier with a kernel of its own, so nothing else may
// say it.
const VMWritten = "a virtual machine wrote this disk"
