package drivertest

import (
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// check is one row of the suite.
type check struct {
	theme string
	name  string
	// fault is the kind of fault that it belongs to.
	fault string
	run   func(*suite, *testing.T)
	needs []need
	// shared: it looks at the pair of sandboxes that all such checks have in common.
	shared bool
}

// need is what a driver must declare for a check to make sense.
type need struct {
	name, why string
	has       func(driver.Capabilities) bool
}

var (
	isolated = need{"Isolated", "it does not isolate", func(c driver.Capabilities) bool { return c.Isolated }}
	native   = need{"Native", "it runs no native programs", func(c driver.Capabilities) bool { return c.Native }}
	hostKern = need{"not OwnKernel", "its kernel is its own, and nobody else's to protect", func(c driver.Capabilities) bool { return !c.OwnKernel }}
	userNS   = need{"UserNamespace", "it has no user namespace", func(c driver.Capabilities) bool { return c.UserNamespace }}
	disk     = need{"Disk", "it has no disk", func(c driver.Capabilities) bool { return c.Disk }}
	rawDisk  = need{"RawDisk", "its disk is no image that the driver opens", func(c driver.Capabilities) bool { return c.RawDisk }}
	mounted  = need{"not RawDisk", "its disk is not mounted on the host", func(c driver.Capabilities) bool { return !c.RawDisk }}
	memory   = need{"Memory", "it does not limit memory", func(c driver.Capabilities) bool { return c.Memory }}
	pids     = need{"PIDs", "it does not limit processes", func(c driver.Capabilities) bool { return c.PIDs }}
	cpu      = need{"CPU", "it does not limit cpu", func(c driver.Capabilities) bool { return c.CPU }}
	diskIO   = need{"DiskIO", "it does not limit what a disk does in a second", func(c driver.Capabilities) bool { return c.DiskIO }}
	files    = need{"OpenFiles", "it does not limit open files", func(c driver.Capabilities) bool { return c.OpenFiles }}
	adopts   = need{"Adopts", "it does not adopt", func(c driver.Capabilities) bool { return c.Adopts }}
	holds    = need{"Holds", "it does not hold the channel", func(c driver.Capabilities) bool { return c.Holds }}
)

// Kinds of fault.
const (
	stuck    = "stuck between states"
	outside  = "compute removed from outside"
	leaking  = "leaks"
	blind    = "an unknown taken for nothing"
	twice    = "one session on two sandboxes"
	data     = "lost data"
	full     = "a full disk that does not start"
	restarts = "a restart that ends sessions"
	copies   = "copies that are alike"
	streams  = "cut, stalled or invented output"
	reach    = "reach beyond one's own"
	greed    = "limits that do not hold"
	honest   = "asked for one thing, given another"
)

func needs(n ...need) []need { return n }

var checks = []check{
	{"life", "a sandbox starts and answers", honest, (*suite).starts, nil, false},
	{"life", "the same create again gives the same sandbox", twice, (*suite).sameAgain, nil, false},
	{"life", "stop of what never was", stuck, (*suite).stopNothing, nil, false},
	{"life", "stop twice", leaking, (*suite).stopTwice, nil, false},
	{"life", "stop of what is no name", reach, (*suite).stopBadName, nil, false},
	{"life", "the same epoch again after a stop", stuck, (*suite).againAfterStop, nil, false},
	{"life", "the same epoch again after an exit", stuck, (*suite).againAfterExit, nil, false},
	{"life", "another epoch of a session is busy", twice, (*suite).otherEpoch, nil, false},
	{"life", "another generation of a session is busy", twice, (*suite).otherGeneration, nil, false},
	{"life", "steps are timed", stuck, (*suite).timed, nil, false},
	{"life", "what it declares is consistent", honest, (*suite).declares, nil, true},

	{"calls at once", "eight equal creates give one sandbox", twice, (*suite).sameAtOnce, nil, false},
	{"calls at once", "many sessions", leaking, (*suite).many, nil, false},
	{"calls at once", "four epochs of a session: one gets compute", twice, (*suite).epochsAtOnce, nil, false},
	{"calls at once", "stop while it is created", leaking, (*suite).stopWhileCreated, nil, false},
	{"calls at once", "four stops", stuck, (*suite).stopAtOnce, nil, false},
	{"calls at once", "a create that is given up at any moment", leaking, (*suite).cancelled, nil, false},
	{"calls at once", "a create that is given up before it begins", stuck, (*suite).endless, nil, false},

	{"wrong requests", "identity", reach, (*suite).badIdentity, nil, false},
	{"wrong requests", "tier", honest, (*suite).badTier, nil, false},
	{"wrong requests", "limits", greed, (*suite).badLimits, nil, false},
	{"wrong requests", "names and variables", reach, (*suite).badWords, nil, false},
	{"wrong requests", "paths", reach, (*suite).badPaths, needs(disk), false},
	{"wrong requests", "an image, a disk or a program that is absent", honest, (*suite).absent, needs(disk, native), false},

	{"leaks", "a create that fails, at every step", leaking, (*suite).failures, nil, false},
	{"leaks", "a create that fails five times", leaking, (*suite).failsAgain, nil, false},
	{"leaks", "a crash, at every step", leaking, (*suite).crashes, needs(adopts), false},
	{"leaks", "three crashes at one step", leaking, (*suite).crashesAgain, needs(adopts), false},
	{"leaks", "twenty lives", leaking, (*suite).twentyLives, nil, false},
	{"leaks", "opened and closed again", leaking, (*suite).reopened, nil, false},
	{"leaks", "removed by hand", outside, (*suite).removedByHand, nil, false},

	{"list", "what runs is shown as it is", blind, (*suite).lists, nil, false},
	{"list", "a list that was given up is not empty", blind, (*suite).listEmpty, nil, false},
	{"list", "half-made is partial", leaking, (*suite).listPartial, needs(adopts), false},
	{"list", "a part without a record is shown", leaking, (*suite).listLitter, nil, false},
	{"list", "during a create", blind, (*suite).listWhile, nil, false},

	{"restart", "what runs is adopted as it is", restarts, (*suite).adoptsRunning, needs(adopts), false},
	{"restart", "a session stays busy", twice, (*suite).adoptsBusy, needs(adopts), false},
	{"restart", "what ended meanwhile is told", outside, (*suite).adoptsExited, needs(adopts), false},
	{"restart", "half a message before it", restarts, (*suite).adoptsHalf, needs(adopts, holds), false},
	{"restart", "what another made is stopped", leaking, (*suite).adoptsStop, needs(adopts), false},

	{"watch", "the exit status is its own", streams, (*suite).toldStatus, nil, false},
	{"watch", "an end before the watch", outside, (*suite).toldLate, nil, false},
	{"watch", "an end is told once", stuck, (*suite).toldOnce, nil, false},
	{"watch", "a kill is told within five seconds", outside, (*suite).toldKilled, nil, false},
	{"watch", "everybody is told", outside, (*suite).toldAll, nil, false},
	{"watch", "a slow watcher blocks nobody", stuck, (*suite).slowWatcher, nil, false},
	{"watch", "a watch ends", leaking, (*suite).watchEnds, nil, false},
	{"watch", "running out of memory is named", greed, (*suite).toldMemory, needs(memory), false},

	{"channel", "it outlives its writer", restarts, (*suite).outlivesWriter, needs(holds), false},
	{"channel", "fifty openers, one after the other", restarts, (*suite).reopens, needs(holds), false},
	{"channel", "sizes around those of buffers", streams, (*suite).boundaries, nil, true},
	{"channel", "64 MiB of output", streams, (*suite).bulkOutput, nil, true},
	{"channel", "64 MiB of input", streams, (*suite).bulkInput, nil, true},
	{"channel", "both ways at once", streams, (*suite).bothWays, nil, true},
	{"channel", "a slow reader", streams, (*suite).slowReader, nil, true},
	{"channel", "last words before the end", streams, (*suite).lastWords, nil, false},
	{"channel", "output ends with the sandbox", streams, (*suite).endOfOutput, nil, false},
	{"channel", "a second opener", streams, (*suite).secondOpener, needs(holds), true},
	{"channel", "two channels are two", reach, (*suite).channelsApart, nil, true},

	{"freeze", "nothing runs", data, (*suite).frozenRunsNot, nil, false},
	{"freeze", "twice", stuck, (*suite).frozenTwice, nil, false},
	{"freeze", "a frozen sandbox is stopped", stuck, (*suite).frozenStops, nil, false},
	{"freeze", "a frozen sandbox is listed as running", blind, (*suite).frozenListed, nil, false},
	{"freeze", "a neighbour goes on", reach, (*suite).frozenAlone, nil, false},
	{"freeze", "of nothing", blind, (*suite).frozenNothing, nil, false},
	{"freeze", "thawed by the next driver", stuck, (*suite).frozenAdopted, needs(adopts), false},

	{"usage", "cpu", greed, (*suite).usageOfCPU, nil, true},
	{"usage", "memory", greed, (*suite).usageOfMemory, needs(memory), true},
	{"usage", "processes", greed, (*suite).usageOfProcesses, needs(pids), true},
	{"usage", "of nothing", blind, (*suite).usageOfNothing, nil, false},

	{"resize", "cpu, up and down", greed, (*suite).resizes, needs(cpu), false},
	{"resize", "a refused change changes nothing", honest, (*suite).resizeRefused, nil, false},
	{"resize", "of nothing", blind, (*suite).resizeNothing, nil, false},
	{"resize", "disk", full, (*suite).resizesDisk, needs(disk), false},

	{"network", "only its own interfaces", reach, (*suite).interfaces, needs(isolated, native), true},
	{"network", "no way out", reach, (*suite).noRoute, needs(isolated, native), true},
	{"network", "the host's loopback", reach, (*suite).hostLoopback, needs(isolated, native), true},
	{"network", "sockets of the host without a path", reach, (*suite).hostSockets, needs(isolated, native), true},
	{"network", "two loopbacks are two", reach, (*suite).loopbacksApart, needs(isolated, native), true},
	{"network", "a namespace of its own", reach, (*suite).netns, needs(isolated), true},

	{"limits", "memory", greed, (*suite).memory, needs(memory), false},
	{"limits", "memory, and a neighbour", greed, (*suite).memoryOfNeighbour, needs(memory), false},
	{"limits", "processes", greed, (*suite).processes, needs(pids, native), false},
	{"limits", "processes that make processes", greed, (*suite).forkBomb, needs(pids, native), false},
	{"limits", "cpu", greed, (*suite).cpu, needs(cpu), false},
	{"limits", "open files", greed, (*suite).openFiles, needs(files, native), false},
	{"limits", "disk space", greed, (*suite).diskSpace, needs(disk), false},
	{"limits", "a full disk starts again", full, (*suite).fullStarts, needs(disk), false},
	{"limits", "disk traffic", greed, (*suite).diskRate, needs(disk, diskIO), false},
	{"limits", "/tmp is charged", greed, (*suite).tmpIsCharged, needs(memory, native), false},
	{"limits", "/tmp is bounded", greed, (*suite).tmpIsBounded, needs(memory, native), false},

	{"walls", "namespaces", reach, (*suite).namespaces, needs(isolated, native, userNS), true},
	{"walls", "its processes are its own", reach, (*suite).alone, needs(isolated, native, hostKern), true},
	{"walls", "capabilities", reach, (*suite).capabilities, needs(isolated, native), true},
	{"walls", "no new privileges, and a filter of calls", reach, (*suite).noNewPrivileges, needs(isolated, native, userNS), true},
	{"walls", "root is nobody outside", reach, (*suite).nobodyOutside, needs(isolated, native, userNS), true},
	{"walls", "calls that reach the kernel", reach, (*suite).forbiddenCalls, needs(isolated, native), true},
	{"walls", "keys of the kernel", reach, (*suite).keyring, needs(isolated, native, hostKern), true},
	{"walls", "kinds of socket", reach, (*suite).families, needs(isolated, native, hostKern), true},
	{"walls", "files of the kernel are masked", reach, (*suite).masked, needs(isolated, native, hostKern), true},
	{"walls", "files of the kernel are read-only", reach, (*suite).readOnly, needs(isolated, native, hostKern), true},
	{"walls", "what the host hands in", reach, (*suite).runFolder, needs(isolated, disk, mounted, native), true},
	{"walls", "the image", reach, (*suite).imageIsNobodys, needs(isolated, disk), true},
	{"walls", "devices", reach, (*suite).devices, needs(isolated, native, hostKern), true},
	{"walls", "set-user-id programs", reach, (*suite).setuid, needs(isolated, native, disk), true},

	{"privacy", "files of a neighbour", reach, (*suite).filesApart, needs(isolated, disk, native), true},
	{"privacy", "the environment of a neighbour", reach, (*suite).environmentsApart, needs(isolated, native), true},
	{"privacy", "no variable of the host", reach, (*suite).onlyGiven, needs(isolated), true},
	{"privacy", "no open file of the host", reach, (*suite).noFiles, needs(isolated, native, hostKern), true},
	{"privacy", "no writable mount from outside", reach, (*suite).mountsFromOutside, needs(isolated, native, hostKern), true},
	{"privacy", "the names of a neighbour", reach, (*suite).names, needs(isolated, native), true},
	{"privacy", "the disks of the host", reach, (*suite).disksOfHost, needs(isolated, native, hostKern), true},
	{"privacy", "host names", copies, (*suite).hostnames, needs(isolated, native), true},
	{"privacy", "the clock is right", copies, (*suite).clock, nil, true},
	{"privacy", "random numbers differ", copies, (*suite).random, nil, true},
	{"privacy", "numbers of the machine", copies, (*suite).bootIDs, needs(isolated, native), true},

	{"disk", "it persists", data, (*suite).persists, needs(disk), false},
	{"disk", "deleted stays deleted", data, (*suite).deleted, needs(disk), false},
	{"disk", "it moves between tiers", data, (*suite).moves, needs(disk), false},
	{"disk", "owners", data, (*suite).owners, needs(disk, native), false},
	{"disk", "nothing on it works on the host", reach, (*suite).diskIsHarmless, needs(disk, mounted, isolated), true},
	{"disk", "synced bytes survive a kill", data, (*suite).killedKeeps, needs(disk), false},
	{"disk", "links where the host mounts", reach, (*suite).lyingDisk, needs(disk, mounted, isolated), false},
	{"disk", "an image that is no file system", stuck, (*suite).brokenDisk, needs(rawDisk), false},
}
