package wasm

// A few words of the binary format of WebAssembly, for modules that no compiler makes.

type section struct {
	imports, types []byte
	nImports       int
	memory         []byte
	code           []byte
}

// module puts the parts into one module with a memory and the function _start.
func module(parts ...func(*section)) []byte {
	s := &section{memory: []byte{0, 1}}
	for _, p := range parts {
		p(s)
	}
	out := []byte("\x00asm\x01\x00\x00\x00")
	add := func(id byte, content []byte) {
		out = append(append(append(out, id), uleb(uint64(len(content)))...), content...)
	}
	n := uleb(uint64(s.nImports))
	add(1, append(append(uleb(uint64(s.nImports+1)), s.types...), 0x60, 0, 0))
	if s.nImports > 0 {
		add(2, append(n, s.imports...))
	}
	add(3, append([]byte{1}, uleb(uint64(s.nImports))...))
	add(5, append([]byte{1}, s.memory...))
	start := append([]byte{2}, name("_start")...)
	start = append(append(start, 0), uleb(uint64(s.nImports))...)
	add(7, append(append(start, name("memory")...), 2, 0))
	fn := append([]byte{0}, append(s.code, 0x0b)...)
	add(10, append(append([]byte{1}, uleb(uint64(len(fn)))...), fn...))
	return out
}

// importing adds a function; i is a 32-bit number, I one of 64 bits.
func importing(from, what, params, results string) func(*section) {
	return func(s *section) {
		kinds := func(list string) []byte {
			out := uleb(uint64(len(list)))
			for _, k := range list {
				out = append(out, map[rune]byte{'i': 0x7f, 'I': 0x7e}[k])
			}
			return out
		}
		s.types = append(append(append(s.types, 0x60), kinds(params)...), kinds(results)...)
		s.imports = append(append(append(s.imports, name(from)...), name(what)...), 0)
		s.imports = append(s.imports, uleb(uint64(s.nImports))...)
		s.nImports++
	}
}

func memoryOf(pages uint64) func(*section) {
	return func(s *section) { s.memory = append([]byte{0}, uleb(pages)...) }
}

func body(ops ...[]byte) func(*section) {
	return func(s *section) {
		for _, op := range ops {
			s.code = append(s.code, op...)
		}
	}
}

func i32(n int64) []byte     { return append([]byte{0x41}, sleb(n)...) }
func i64(n int64) []byte     { return append([]byte{0x42}, sleb(n)...) }
func callOp(n uint64) []byte { return append([]byte{0x10}, uleb(n)...) }

// block is two blocks, one in the other, so that a branch by one leaves the inner one.
func block(ops ...[]byte) []byte { return wrap(0x02, ops) }

func loopOp(ops ...[]byte) []byte { return wrap(0x03, ops) }

func wrap(kind byte, ops [][]byte) []byte {
	out := []byte{kind, 0x40}
	for _, op := range ops {
		out = append(out, op...)
	}
	return append(out, 0x0b)
}

func name(s string) []byte { return append(uleb(uint64(len(s))), s...) }

func uleb(n uint64) []byte {
	var out []byte
	for {
		b := byte(n & 0x7f)
		if n >>= 7; n == 0 {
			return append(out, b)
		}
		out = append(out, b|0x80)
	}
}

func sleb(n int64) []byte {
	var out []byte
	for {
		b := byte(n & 0x7f)
		n >>= 7
		if n == 0 && b&0x40 == 0 || n == -1 && b&0x40 != 0 {
			return append(out, b)
		}
		out = append(out, b|0x80)
	}
}

// wasi is every function of WASI preview 1 but proc_exit, in an order that closes descriptors last.
var wasi = []struct{ name, params string }{
	{"args_get", "ii"}, {"args_sizes_get", "ii"}, {"environ_get", "ii"}, {"environ_sizes_get", "ii"},
	{"clock_res_get", "ii"}, {"clock_time_get", "iIi"}, {"fd_advise", "iIIi"}, {"fd_allocate", "iII"},
	{"fd_datasync", "i"}, {"fd_fdstat_get", "ii"}, {"fd_fdstat_set_flags", "ii"}, {"fd_fdstat_set_rights", "iII"},
	{"fd_filestat_get", "ii"}, {"fd_filestat_set_size", "iI"}, {"fd_filestat_set_times", "iIIi"}, {"fd_pread", "iiiIi"},
	{"fd_prestat_get", "ii"}, {"fd_prestat_dir_name", "iii"}, {"fd_pwrite", "iiiIi"}, {"fd_read", "iiii"},
	{"fd_readdir", "iiiIi"}, {"fd_seek", "iIii"}, {"fd_sync", "i"}, {"fd_tell", "ii"}, {"fd_write", "iiii"},
	{"path_create_directory", "iii"}, {"path_filestat_get", "iiiii"}, {"path_filestat_set_times", "iiiiIIi"},
	{"path_link", "iiiiiii"}, {"path_open", "iiiiiIIii"}, {"path_readlink", "iiiiii"}, {"path_remove_directory", "iii"},
	{"path_rename", "iiiiii"}, {"path_symlink", "iiiii"}, {"path_unlink_file", "iii"}, {"poll_oneoff", "iiii"},
	{"sched_yield", ""}, {"random_get", "ii"}, {"sock_accept", "iii"}, {"sock_recv", "iiiiii"}, {"sock_send", "iiiii"},
	{"sock_shutdown", "ii"}, {"proc_raise", "i"}, {"fd_renumber", "ii"}, {"fd_close", "i"},
}

// everyCall calls each function of WASI with fd as its first argument and nonsense for the others.
func everyCall(fd int64) []byte {
	var parts []func(*section)
	for _, f := range wasi {
		parts = append(parts, importing("wasi_snapshot_preview1", f.name, f.params, "i"))
	}
	for n, f := range wasi {
		for i, k := range f.params {
			switch {
			case i == 0 && f.name[:2] != "ra":
				parts = append(parts, body(i32(fd)))
			case k == 'I':
				parts = append(parts, body(i64(-1)))
			default:
				parts = append(parts, body(i32(-16)))
			}
		}
		parts = append(parts, body(callOp(uint64(n)), []byte{0x1a}))
	}
	return module(parts...)
}
