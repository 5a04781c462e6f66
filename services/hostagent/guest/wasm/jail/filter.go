//go:build linux

package jail

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// filter is a seccomp program: what is not named fails with EPERM. A call of another machine's kind
// (32 bits) kills the process.
type filter struct{ prog []unix.SockFilter }

const (
	offNr   = 0
	offArch = 4
	offArg0 = 16 // low half of the first argument, on the little-endian machines that Go runs on here

	retAllow = 0x7fff0000
	retErrno = 0x00050000
	retKill  = 0x80000000
)

func (f *filter) add(code uint16, k uint32, jt, jf uint8) {
	f.prog = append(f.prog, unix.SockFilter{Code: code, K: k, Jt: jt, Jf: jf})
}

func (f *filter) load(off uint32) { f.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, off, 0, 0) }
func (f *filter) ret(v uint32)    { f.add(unix.BPF_RET|unix.BPF_K, v, 0, 0) }

// begin checks the architecture and loads the number of the call.
func (f *filter) begin() {
	f.load(offArch)
	f.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, auditArch, 1, 0)
	f.ret(retKill)
	f.load(offNr)
	if x32 != 0 {
		f.add(unix.BPF_JMP|unix.BPF_JGE|unix.BPF_K, x32, 0, 1)
		f.ret(retKill)
	}
}

func (f *filter) allow(nrs ...uintptr) {
	for _, nr := range nrs {
		f.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, uint32(nr), 0, 1)
		f.ret(retAllow)
	}
}

// allowThreads permits a clone that makes a thread of this process, and no namespaces.
func (f *filter) allowThreads() {
	const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	f.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, uint32(unix.SYS_CLONE), 0, 5)
	f.load(offArg0)
	f.add(unix.BPF_JMP|unix.BPF_JSET|unix.BPF_K, namespaces, 2, 0)
	f.add(unix.BPF_JMP|unix.BPF_JSET|unix.BPF_K, unix.CLONE_THREAD, 0, 1)
	f.ret(retAllow)
	f.ret(retErrno | uint32(unix.EPERM))
}

// install puts the filter on every thread of the process, for good.
func (f *filter) install() error {
	f.ret(retErrno | uint32(unix.EPERM))
	prog := unix.SockFprog{Len: uint16(len(f.prog)), Filter: &f.prog[0]}
	r, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		return fmt.Errorf("install system call filter: %w", e)
	}
	if r != 0 {
		return errors.New("install system call filter: a thread could not take it")
	}
	return nil
}

// FilterCall leaves the process what wazero and Go's runtime need to run a module on files: no new
// process, no program, no socket, no mount, no signal to others.
func FilterCall() error {
	f := &filter{}
	f.begin()
	f.allow(common...)
	f.allow(old...)
	f.allowThreads()
	return f.install()
}

// FilterSupervisor adds what starts calls, each in namespaces of its own, and serves files. It also
// bounds what every call can ever do, since filters only add up.
func FilterSupervisor() error {
	f := &filter{}
	f.begin()
	f.allow(common...)
	f.allow(old...)
	f.allow(supervising...)
	f.allow(supervisingOld...)
	return f.install()
}

// common are system calls of a module's process.
var common = []uintptr{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_PREAD64, unix.SYS_PWRITE64,
	unix.SYS_OPENAT, unix.SYS_CLOSE, unix.SYS_LSEEK, unix.SYS_FSTAT, unix.SYS_STATX,
	unix.SYS_GETDENTS64, unix.SYS_FCNTL, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_FTRUNCATE, unix.SYS_FALLOCATE,
	unix.SYS_MKDIRAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2, unix.SYS_LINKAT, unix.SYS_SYMLINKAT,
	unix.SYS_READLINKAT, unix.SYS_UTIMENSAT, unix.SYS_FACCESSAT, unix.SYS_FACCESSAT2, unix.SYS_FCHMOD, unix.SYS_FCHMODAT,
	unix.SYS_GETCWD, unix.SYS_DUP, unix.SYS_DUP3,
	unix.SYS_RECVMSG, // of the one socket that tells it what to run
	unix.SYS_MMAP, unix.SYS_MUNMAP, unix.SYS_MPROTECT, unix.SYS_MADVISE, unix.SYS_MREMAP, unix.SYS_BRK,
	unix.SYS_FUTEX, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP,
	unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_GETRES, unix.SYS_GETTIMEOFDAY, unix.SYS_GETRANDOM, unix.SYS_GETPID, unix.SYS_GETTID,
	unix.SYS_GETRUSAGE, unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_TGKILL,
	unix.SYS_RESTART_SYSCALL, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_PPOLL, unix.SYS_PSELECT6,
	unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE, unix.SYS_SETITIMER, unix.SYS_RSEQ, unix.SYS_UNAME,
}

// supervising are those that the supervisor needs besides, and a call before its own filter stands.
var supervising = []uintptr{
	unix.SYS_CLONE, unix.SYS_EXECVE, unix.SYS_WAIT4, unix.SYS_WAITID, unix.SYS_KILL, unix.SYS_PIPE2, unix.SYS_SETSID,
	unix.SYS_SOCKETPAIR, unix.SYS_SENDMSG, unix.SYS_SETSOCKOPT, unix.SYS_GETSOCKOPT, unix.SYS_SHUTDOWN,
	unix.SYS_MEMFD_CREATE, unix.SYS_CHDIR, unix.SYS_FCHDIR, unix.SYS_CHROOT, unix.SYS_UMASK,
	unix.SYS_CAPGET, unix.SYS_CAPSET, unix.SYS_PRCTL, unix.SYS_SECCOMP, unix.SYS_PRLIMIT64, unix.SYS_GETRLIMIT, unix.SYS_SETRLIMIT, unix.SYS_SETPRIORITY,
	unix.SYS_INOTIFY_INIT1, unix.SYS_INOTIFY_ADD_WATCH, unix.SYS_INOTIFY_RM_WATCH,
	unix.SYS_FCHOWN, unix.SYS_FCHOWNAT, unix.SYS_FSTATFS, unix.SYS_STATFS, unix.SYS_SYNCFS, unix.SYS_FADVISE64, unix.SYS_SENDFILE,
	unix.SYS_COPY_FILE_RANGE, unix.SYS_SPLICE, unix.SYS_OPENAT2, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID,
	unix.SYS_GETPPID, unix.SYS_GETPGID, unix.SYS_GETGROUPS, unix.SYS_PIDFD_OPEN, unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_MKNODAT,
	unix.SYS_GETXATTR, unix.SYS_LGETXATTR, unix.SYS_FGETXATTR, unix.SYS_LISTXATTR, unix.SYS_LLISTXATTR, unix.SYS_FLISTXATTR,
	unix.SYS_SETXATTR, unix.SYS_LSETXATTR, unix.SYS_FSETXATTR, unix.SYS_REMOVEXATTR, unix.SYS_LREMOVEXATTR, unix.SYS_FREMOVEXATTR,
	unix.SYS_IOCTL,
}
