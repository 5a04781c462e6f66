package drivertest

import (
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// check is one row of the suite.
type check struct {
	name  string
	theme string
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
	warm     = need{"Warm", "its sandboxes are not prepared ahead", func(c driver.Capabilities) bool { return c.Warm }}
	links    = need{"Network", "its sandboxes have no network", func(c driver.Capabilities) bool { return c.Network }}
	noLinks  = need{"not Network", "its sandboxes have a network", func(c driver.Capabilities) bool { return !c.Network }}
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
	{"a sandbox starts and answers", "life", honest, (*suite).starts, nil, true},
	{"the same create again gives the same sandbox", "life", twice, (*suite).sameAgain, nil, true},
	{"stop of what never was", "life", stuck, (*suite).stopNothing, nil, false},
	{"stop twice", "life", leaking, (*suite).stopTwice, nil, false},
	{"stop of what is no name", "life", reach, (*suite).stopBadName, nil, false},
	{"the same epoch again after a stop", "life", stuck, (*suite).againAfterStop, nil, false},
	{"the same epoch again after an exit", "life", stuck, (*suite).againAfterExit, nil, false},
	{"another epoch of a session is busy", "life", twice, (*suite).otherEpoch, nil, false},
	{"another generation of a session is busy", "life", twice, (*suite).otherGeneration, nil, true},
	{"steps are timed", "life", stuck, (*suite).timed, nil, true},
	{"what it declares is consistent", "life", honest, (*suite).declares, nil, true},

	{"eight equal creates give one sandbox", "calls at once", twice, (*suite).sameAtOnce, nil, false},
	{"many sessions", "calls at once", leaking, (*suite).many, nil, false},
	{"four epochs of a session: one gets compute", "calls at once", twice, (*suite).epochsAtOnce, nil, false},
	{"stop while it is created", "calls at once", leaking, (*suite).stopWhileCreated, nil, false},
	{"four stops", "calls at once", stuck, (*suite).stopAtOnce, nil, false},
	{"a create that is given up at any moment", "calls at once", leaking, (*suite).cancelled, nil, false},
	{"a create that is given up before it begins", "calls at once", stuck, (*suite).endless, nil, false},

	{"identity", "wrong requests", reach, (*suite).badIdentity, nil, false},
	{"tier", "wrong requests", honest, (*suite).badTier, nil, false},
	{"limits", "wrong requests", greed, (*suite).badLimits, nil, false},
	{"names and variables", "wrong requests", reach, (*suite).badWords, nil, false},
	{"paths", "wrong requests", reach, (*suite).badPaths, needs(disk), false},
	{"an image, a disk or a program that is absent", "wrong requests", honest, (*suite).absent, needs(disk, native), false},

	{"a create that fails, at every step", "leaks", leaking, (*suite).failures, nil, false},
	{"a create that fails five times", "leaks", leaking, (*suite).failsAgain, nil, false},
	{"a crash, at every step", "leaks", leaking, (*suite).crashes, needs(adopts), false},
	{"three crashes at one step", "leaks", leaking, (*suite).crashesAgain, needs(adopts), false},
	{"twenty lives", "leaks", leaking, (*suite).twentyLives, nil, false},
	{"opened and closed again", "leaks", leaking, (*suite).reopened, nil, false},
	{"removed by hand", "leaks", outside, (*suite).removedByHand, nil, false},

	{"what runs is shown as it is", "list", blind, (*suite).lists, nil, true},
	{"a list that was given up is not empty", "list", blind, (*suite).listEmpty, nil, true},
	{"half-made is partial", "list", leaking, (*suite).listPartial, needs(adopts), false},
	{"a part without a record is shown", "list", leaking, (*suite).listLitter, nil, false},
	{"during a create", "list", blind, (*suite).listWhile, nil, false},

	{"what runs is adopted as it is", "restart", restarts, (*suite).adoptsRunning, needs(adopts), false},
	{"a session stays busy", "restart", twice, (*suite).adoptsBusy, needs(adopts), false},
	{"what ended meanwhile is told", "restart", outside, (*suite).adoptsExited, needs(adopts), false},
	{"half a message before it", "restart", restarts, (*suite).adoptsHalf, needs(adopts, holds), false},
	{"what another made is stopped", "restart", leaking, (*suite).adoptsStop, needs(adopts), false},

	{"the exit status is its own", "watch", streams, (*suite).toldStatus, nil, false},
	{"an end before the watch", "watch", outside, (*suite).toldLate, nil, false},
	{"an end is told once", "watch", stuck, (*suite).toldOnce, nil, false},
	{"a kill is told within five seconds", "watch", outside, (*suite).toldKilled, nil, false},
	{"everybody is told", "watch", outside, (*suite).toldAll, nil, false},
	{"a slow watcher blocks nobody", "watch", stuck, (*suite).slowWatcher, nil, false},
	{"a watch ends", "watch", leaking, (*suite).watchEnds, nil, true},
	{"running out of memory is named", "watch", greed, (*suite).toldMemory, needs(memory), false},

	{"it outlives its writer", "channel", restarts, (*suite).outlivesWriter, needs(holds), false},
	{"fifty openers, one after the other", "channel", restarts, (*suite).reopens, needs(holds), false},
	{"sizes around those of buffers", "channel", streams, (*suite).boundaries, nil, true},
	{"64 MiB of output", "channel", streams, (*suite).bulkOutput, nil, true},
	{"64 MiB of input", "channel", streams, (*suite).bulkInput, nil, true},
	{"both ways at once", "channel", streams, (*suite).bothWays, nil, true},
	{"a slow reader", "channel", streams, (*suite).slowReader, nil, true},
	{"last words before the end", "channel", streams, (*suite).lastWords, nil, false},
	{"output ends with the sandbox", "channel", streams, (*suite).endOfOutput, nil, false},
	{"a second opener", "channel", streams, (*suite).secondOpener, needs(holds), true},
	{"two channels are two", "channel", reach, (*suite).channelsApart, nil, true},

	{"nothing runs", "freeze", data, (*suite).frozenRunsNot, nil, true},
	{"twice", "freeze", stuck, (*suite).frozenTwice, nil, true},
	{"six times, and it works", "freeze", stuck, (*suite).frozenOften, nil, false},
	{"a frozen sandbox is stopped", "freeze", stuck, (*suite).frozenStops, nil, false},
	{"a frozen sandbox is listed as running", "freeze", blind, (*suite).frozenListed, nil, true},
	{"a neighbour goes on", "freeze", reach, (*suite).frozenAlone, nil, true},
	{"of nothing", "freeze", blind, (*suite).frozenNothing, nil, false},
	{"thawed by the next driver", "freeze", stuck, (*suite).frozenAdopted, needs(adopts), false},

	{"cpu", "usage", greed, (*suite).usageOfCPU, nil, true},
	{"memory", "usage", greed, (*suite).usageOfMemory, needs(memory), true},
	{"processes", "usage", greed, (*suite).usageOfProcesses, needs(pids), true},
	{"of nothing", "usage", blind, (*suite).usageOfNothing, nil, false},

	{"cpu, up and down", "resize", greed, (*suite).resizes, needs(cpu), false},
	{"a refused change changes nothing", "resize", honest, (*suite).resizeRefused, nil, false},
	{"of nothing", "resize", blind, (*suite).resizeNothing, nil, false},
	{"disk", "resize", full, (*suite).resizesDisk, needs(disk), false},

	{"one waits, as nobody's, until it is stopped", warmTheme, stuck, (*suite).warmWaits, needs(warm), false},
	{"two names at once", warmTheme, leaking, (*suite).warmAtOnce, needs(warm), false},
	{"requests that are wrong", warmTheme, reach, (*suite).warmWrong, needs(warm), false},
	{"fifty claim one", warmTheme, twice, (*suite).claimedOnce, needs(warm), false},
	{"a claimed one is its session's", warmTheme, twice, (*suite).claimedIsIt, needs(warm), false},
	{"a claim for a session that is awake", warmTheme, twice, (*suite).claimBusy, needs(warm), false},
	{"two claims and a create of one session at once", warmTheme, twice, (*suite).claimsOfOne, needs(warm), false},
	{"a claim of what does not fit", warmTheme, honest, (*suite).claimUnfit, needs(warm), false},
	{"a claim that is given up at any moment", warmTheme, leaking, (*suite).claimGivenUp, needs(warm), false},
	{"a claim that fails, at every step", warmTheme, leaking, (*suite).claimFails, needs(warm), false},
	{"a crash during a claim, at every step", warmTheme, twice, (*suite).claimCrashes, needs(warm, adopts), false},
	{"warm ones of an earlier driver", warmTheme, leaking, (*suite).warmOfAnother, needs(warm, adopts), false},
	{"a claimed one is adopted as it is", warmTheme, restarts, (*suite).claimedAdopted, needs(warm, adopts), false},
	{"one that ended while it waited", warmTheme, outside, (*suite).warmEnds, needs(warm), false},
	{"stop while it is claimed", warmTheme, leaking, (*suite).warmStopRace, needs(warm), false},
	{"nothing of the first for the second", warmTheme, reach, (*suite).warmPrivate, needs(warm, disk), false},
	{"it is bound to its session", warmTheme, honest, (*suite).claimedIsBound, needs(warm, disk), false},
	{"two are no copies", warmTheme, copies, (*suite).warmCopies, needs(warm), false},
	{"limits of the claim", warmTheme, greed, (*suite).claimedLimits, needs(warm, cpu), false},
	{"the disk is free after a stop", warmTheme, data, (*suite).claimedDetaches, needs(warm, disk), false},

	{"only its own interfaces", "network", reach, (*suite).interfaces, needs(isolated, native), true},
	{"no way out", "network", reach, (*suite).noRoute, needs(isolated, native), true},
	{"the host's loopback", "network", reach, (*suite).hostLoopback, needs(isolated, native), true},
	{"sockets of the host without a path", "network", reach, (*suite).hostSockets, needs(isolated, native), true},
	{"two loopbacks are two", "network", reach, (*suite).loopbacksApart, needs(isolated, native), true},
	{"a namespace of its own", "network", reach, (*suite).netns, needs(isolated), true},

	{"exactly its link", linkTheme, reach, (*suite).linkIsAll, needs(links), true},
	{"the doors, when it is bound", linkTheme, reach, (*suite).linkBound, needs(links), true},
	{"what goes through it comes back whole", linkTheme, data, (*suite).linkCarries, needs(links), true},
	{"no other way", linkTheme, reach, (*suite).linkNoWay, needs(links), true},
	{"nothing is forged or changed", linkTheme, reach, (*suite).linkNoForgery, needs(links), true},
	{"two links are two", linkTheme, reach, (*suite).linksApart, needs(links), true},
	{"none is none", linkTheme, reach, (*suite).noLink, needs(links), false},
	{"nothing of it is left", linkTheme, leaking, (*suite).linkEnds, needs(links), false},
	{"links that are wrong", linkTheme, honest, (*suite).linkRefused, needs(links), false},
	{"one where there is none", linkTheme, honest, (*suite).linkImpossible, needs(noLinks), false},
	{"a warm one keeps its link", linkTheme, honest, (*suite).linkWarm, needs(links, warm), false},

	{"they are there, and are not the session's", "files over the root", data, (*suite).over, needs(disk, native), false},
	{"links where one goes", "files over the root", reach, (*suite).overLinks, needs(disk, native), false},
	{"one that is missing", "files over the root", honest, (*suite).overMissing, needs(disk, native), false},

	{"memory", "limits", greed, (*suite).memory, needs(memory), false},
	{"memory, and a neighbour", "limits", greed, (*suite).memoryOfNeighbour, needs(memory), false},
	{"processes", "limits", greed, (*suite).processes, needs(pids, native), false},
	{"processes that make processes", "limits", greed, (*suite).forkBomb, needs(pids, native), false},
	{"cpu", "limits", greed, (*suite).cpu, needs(cpu), false},
	{"open files", "limits", greed, (*suite).openFiles, needs(files, native), false},
	{"disk space", "limits", greed, (*suite).diskSpace, needs(disk), false},
	{"a full disk starts again", "limits", full, (*suite).fullStarts, needs(disk), false},
	{"disk traffic", "limits", greed, (*suite).diskRate, needs(disk, diskIO), false},
	{"files in /tmp are charged", "limits", greed, (*suite).tmpIsCharged, needs(memory, native), false},
	{"files in /tmp are bounded", "limits", greed, (*suite).tmpIsBounded, needs(memory, native), false},

	{"namespaces", "walls", reach, (*suite).namespaces, needs(isolated, native, userNS), true},
	{"its processes are its own", "walls", reach, (*suite).alone, needs(isolated, native, hostKern), true},
	{"capabilities", "walls", reach, (*suite).capabilities, needs(isolated, native), true},
	{"no new privileges, and a filter of calls", "walls", reach, (*suite).noNewPrivileges, needs(isolated, native, userNS), true},
	{"root is nobody outside", "walls", reach, (*suite).nobodyOutside, needs(isolated, native, userNS), true},
	{"calls that reach the kernel", "walls", reach, (*suite).forbiddenCalls, needs(isolated, native), true},
	{"keys of the kernel", "walls", reach, (*suite).keyring, needs(isolated, native, hostKern), true},
	{"kinds of socket", "walls", reach, (*suite).families, needs(isolated, native, hostKern), true},
	{"files of the kernel are masked", "walls", reach, (*suite).masked, needs(isolated, native, hostKern), true},
	{"files of the kernel are read-only", "walls", reach, (*suite).readOnly, needs(isolated, native, hostKern), true},
	{"what the host hands in", "walls", reach, (*suite).runFolder, needs(isolated, disk, mounted, native), true},
	{"the image", "walls", reach, (*suite).imageIsNobodys, needs(isolated, disk), true},
	{"devices", "walls", reach, (*suite).devices, needs(isolated, native, hostKern), true},
	{"set-user-id programs", "walls", reach, (*suite).setuid, needs(isolated, native, disk), true},

	{"files of a neighbour", "privacy", reach, (*suite).filesApart, needs(isolated, disk, native), true},
	{"the environment of a neighbour", "privacy", reach, (*suite).environmentsApart, needs(isolated, native), true},
	{"no variable of the host", "privacy", reach, (*suite).onlyGiven, needs(isolated), true},
	{"no open file of the host", "privacy", reach, (*suite).noFiles, needs(isolated, native, hostKern), true},
	{"no writable mount from outside", "privacy", reach, (*suite).mountsFromOutside, needs(isolated, native, hostKern), true},
	{"the names of a neighbour", "privacy", reach, (*suite).names, needs(isolated, native), true},
	{"the disks of the host", "privacy", reach, (*suite).disksOfHost, needs(isolated, native, hostKern), true},
	{"host names", "privacy", copies, (*suite).hostnames, needs(isolated, native), true},
	{"the clock is right", "privacy", copies, (*suite).clock, nil, true},
	{"random numbers differ", "privacy", copies, (*suite).random, nil, true},
	{"numbers of the machine", "privacy", copies, (*suite).bootIDs, needs(isolated, native), true},

	{"it persists", "disk", data, (*suite).persists, needs(disk), false},
	{"deleted stays deleted", "disk", data, (*suite).deleted, needs(disk), false},
	{"it moves between tiers", "disk", data, (*suite).moves, needs(disk), false},
	{"owners", "disk", data, (*suite).owners, needs(disk, native), false},
	{"nothing on it works on the host", "disk", reach, (*suite).diskIsHarmless, needs(disk, mounted, isolated), true},
	{"synced bytes survive a kill", "disk", data, (*suite).killedKeeps, needs(disk), false},
	{"links where the host mounts", "disk", reach, (*suite).lyingDisk, needs(disk, mounted, isolated), false},
	{"an image that is no file system", "disk", stuck, (*suite).brokenDisk, needs(rawDisk), false},
}
