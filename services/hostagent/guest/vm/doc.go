// Package vm is the first process of a virtual machine: berth-guest as /init of the initramfs.
//
// Two processes of it run. The supervisor is PID 1 of the machine; it keeps every privilege, stays in
// the initramfs, and talks to the host over the control port (package vmwire). The stage is a second
// process in namespaces of its own, made before the machine is anybody's, so that a clone of a booted
// machine starts nothing: once the machine is personalised the stage enters the session's root, gives
// up what root of the other tiers does not have either, and becomes the guest agent, or executes the
// image's own first process. So what a session can reach by whatever means in its root is what the
// stage left: no device but those of a container, no port, no module, no kernel setting.
//
// A machine that waits may be asked to rehearse: to go once through all of that with a stage, a disk and
// a command of its own, and to leave nothing of it but warm caches. An emulated machine is then
// somebody's in a fifth of the time.
//
// # Guarantees
//
// Nothing of a session runs before the clock was set and the kernel's random source was reseeded. Every
// step of personalising has a deadline; a damaged disk is an answer with its reason, after which the
// machine powers off, and never a hang of the host. The root is the image with the session's disk on
// top, with the attributes and owners of the other tiers ("user." overlay attributes, no idmap), so
// that a disk of theirs shows the same files. A frozen file system thaws by itself after
// vmwire.MaxFreeze. When the first process ends, the disk is unmounted and the machine powers off.
package vm
