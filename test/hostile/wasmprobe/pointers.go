//go:build wasip1

package main

import "fmt"

//go:wasmimport wasi_snapshot_preview1 args_get
func wasiArgsGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 args_sizes_get
func wasiArgsSizesGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 environ_get
func wasiEnvironGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 environ_sizes_get
func wasiEnvironSizesGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 clock_res_get
func wasiClockResGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 clock_time_get
func wasiClockTimeGet(a uint32, b uint64, c uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_advise
func wasiFdAdvise(a uint32, b uint64, c uint64, d uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_allocate
func wasiFdAllocate(a uint32, b uint64, c uint64) uint32

//go:wasmimport wasi_snapshot_preview1 fd_datasync
func wasiFdDatasync(a uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_fdstat_get
func wasiFdFdstatGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_fdstat_set_flags
func wasiFdFdstatSetFlags(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_filestat_get
func wasiFdFilestatGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_filestat_set_size
func wasiFdFilestatSetSize(a uint32, b uint64) uint32

//go:wasmimport wasi_snapshot_preview1 fd_pread
func wasiFdPread(a uint32, b uint32, c uint32, d uint64, e uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_prestat_get
func wasiFdPrestatGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_prestat_dir_name
func wasiFdPrestatDirName(a uint32, b uint32, c uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_pwrite
func wasiFdPwrite(a uint32, b uint32, c uint32, d uint64, e uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_read
func wasiFdRead(a uint32, b uint32, c uint32, d uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_readdir
func wasiFdReaddir(a uint32, b uint32, c uint32, d uint64, e uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_seek
func wasiFdSeek(a uint32, b uint64, c uint32, d uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_sync
func wasiFdSync(a uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_tell
func wasiFdTell(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_write
func wasiFdWrite(a uint32, b uint32, c uint32, d uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_create_directory
func wasiPathCreateDirectory(a uint32, b uint32, c uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_filestat_get
func wasiPathFilestatGet(a uint32, b uint32, c uint32, d uint32, e uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_filestat_set_times
func wasiPathFilestatSetTimes(a uint32, b uint32, c uint32, d uint32, e uint64, f uint64, g uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_link
func wasiPathLink(a uint32, b uint32, c uint32, d uint32, e uint32, f uint32, g uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_open
func wasiPathOpen(a uint32, b uint32, c uint32, d uint32, e uint32, f uint64, g uint64, h uint32, i uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_readlink
func wasiPathReadlink(a uint32, b uint32, c uint32, d uint32, e uint32, f uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_remove_directory
func wasiPathRemoveDirectory(a uint32, b uint32, c uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_rename
func wasiPathRename(a uint32, b uint32, c uint32, d uint32, e uint32, f uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_symlink
func wasiPathSymlink(a uint32, b uint32, c uint32, d uint32, e uint32) uint32

//go:wasmimport wasi_snapshot_preview1 path_unlink_file
func wasiPathUnlinkFile(a uint32, b uint32, c uint32) uint32

//go:wasmimport wasi_snapshot_preview1 poll_oneoff
func wasiPollOneoff(a uint32, b uint32, c uint32, d uint32) uint32

//go:wasmimport wasi_snapshot_preview1 random_get
func wasiRandomGet(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 sock_accept
func wasiSockAccept(a uint32, b uint32, c uint32) uint32

//go:wasmimport wasi_snapshot_preview1 sock_recv
func wasiSockRecv(a uint32, b uint32, c uint32, d uint32, e uint32, f uint32) uint32

//go:wasmimport wasi_snapshot_preview1 sock_send
func wasiSockSend(a uint32, b uint32, c uint32, d uint32, e uint32) uint32

//go:wasmimport wasi_snapshot_preview1 sock_shutdown
func wasiSockShutdown(a uint32, b uint32) uint32

//go:wasmimport wasi_snapshot_preview1 proc_raise
func wasiProcRaise(a uint32) uint32

//go:wasmimport wasi_snapshot_preview1 fd_renumber
func wasiFdRenumber(a uint32, b uint32) uint32

// pointers calls every function of WASI with numbers that are no pointers, no lengths and no
// descriptors. Each must answer with an error or do nothing; the module must get to the end. It comes
// through if a function takes a pointer beyond the module's memory for one.
func pointers([]string) (string, error) {
	const beyond = 0xfffffff0
	n := 0
	for _, fd := range []uint32{3, 4, 1023, 0x7fffffff, 0xffffffff} {
		for _, p := range []uint32{beyond, 0x80000000, 0xffffffff} {
			for _, size := range []uint32{1, 0x7fffffff, 0xffffffff} {
				if name := call(fd, p, size); name != "" {
					return fmt.Sprintf("%s(%d, %#x, %#x) was done", name, fd, p, size), nil
				}
				n++
			}
		}
	}
	return "", fmt.Errorf("all of %d times every function were refused", n)
}

// call names the first function that took what it must not take.
func call(fd, p, size uint32) string {
	far := uint64(p)<<32 | uint64(size)
	for _, c := range []struct {
		name  string
		errno uint32
		may   bool // it takes no pointer, so it may succeed
	}{
		{"args_get", wasiArgsGet(p, size), false},
		{"args_sizes_get", wasiArgsSizesGet(p, size), false},
		{"environ_get", wasiEnvironGet(p, size), false},
		{"environ_sizes_get", wasiEnvironSizesGet(p, size), false},
		{"clock_res_get", wasiClockResGet(0, p), false},
		{"clock_time_get", wasiClockTimeGet(0, far, p), false},
		{"fd_advise", wasiFdAdvise(fd, far, far, p), true},
		{"fd_allocate", wasiFdAllocate(fd, far, far), true},
		{"fd_datasync", wasiFdDatasync(fd), true},
		{"fd_fdstat_get", wasiFdFdstatGet(fd, p), false},
		{"fd_fdstat_set_flags", wasiFdFdstatSetFlags(fd, p), true},
		{"fd_filestat_get", wasiFdFilestatGet(fd, p), false},
		{"fd_filestat_set_size", wasiFdFilestatSetSize(fd, far), true},
		{"fd_pread", wasiFdPread(fd, p, size, far, p), false},
		{"fd_prestat_get", wasiFdPrestatGet(fd, p), false},
		{"fd_prestat_dir_name", wasiFdPrestatDirName(fd, p, size), false},
		{"fd_pwrite", wasiFdPwrite(fd, p, size, far, p), false},
		{"fd_read", wasiFdRead(fd, p, size, p), false},
		{"fd_readdir", wasiFdReaddir(fd, p, size, far, p), false},
		{"fd_seek", wasiFdSeek(fd, far, p, size), false},
		{"fd_sync", wasiFdSync(fd), true},
		{"fd_tell", wasiFdTell(fd, p), false},
		{"fd_write", wasiFdWrite(fd, p, size, p), false},
		{"path_create_directory", wasiPathCreateDirectory(fd, p, size), false},
		{"path_filestat_get", wasiPathFilestatGet(fd, p, size, p, size), false},
		{"path_filestat_set_times", wasiPathFilestatSetTimes(fd, p, size, p, far, far, size), false},
		{"path_link", wasiPathLink(fd, p, size, p, size, p, size), false},
		{"path_open", wasiPathOpen(fd, p, size, p, size, far, far, p, size), false},
		{"path_readlink", wasiPathReadlink(fd, p, size, p, size, p), false},
		{"path_remove_directory", wasiPathRemoveDirectory(fd, p, size), false},
		{"path_rename", wasiPathRename(fd, p, size, p, size, p), false},
		{"path_symlink", wasiPathSymlink(fd, p, size, p, size), false},
		{"path_unlink_file", wasiPathUnlinkFile(fd, p, size), false},
		{"poll_oneoff", wasiPollOneoff(p, size, p, size), false},
		{"random_get", wasiRandomGet(p, size), false},
		{"sock_accept", wasiSockAccept(fd, p, size), false},
		{"sock_recv", wasiSockRecv(fd, p, size, p, size, p), false},
		{"sock_send", wasiSockSend(fd, p, size, p, size), false},
		{"sock_shutdown", wasiSockShutdown(fd, p), true},
		{"proc_raise", wasiProcRaise(size), true},
		{"fd_renumber", wasiFdRenumber(fd, p), true},
	} {
		if c.errno == 0 && !c.may {
			return c.name
		}
	}
	return ""
}
