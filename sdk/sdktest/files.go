package sdktest

import (
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// files is a file system: paths to files and directories. There are no links
// and no users.
type files struct {
	mu       sync.Mutex
	all      map[string]*file
	watchers map[*hostStream]watching
}

type file struct {
	dir      bool
	data     []byte
	mode     uint32
	modified time.Time
}

type watching struct {
	path      string
	recursive bool
}

func newFiles() *files {
	f := &files{all: map[string]*file{}, watchers: map[*hostStream]watching{}}
	for _, d := range []string{"/", "/tmp", "/home", "/root", "/work"} {
		f.all[d] = &file{dir: true, mode: 0o755, modified: time.Now()}
	}
	return f
}

func notFound(p string) error { return fault{errkind.NotFound, p + ": there is no such file"} }

func clean(p string) (string, error) {
	if p == "" || strings.ContainsRune(p, 0) || len(p) > 4096 {
		return "", fault{errkind.Invalid, "a path must have 1 to 4096 bytes and no NUL"}
	}
	if !strings.HasPrefix(p, "/") {
		p = "/root/" + p
	}
	return path.Clean(p), nil
}

func (f *files) info(p string, x *file) *boxv1.FileInfo {
	kind := "file"
	if x.dir {
		kind = "dir"
	}
	return &boxv1.FileInfo{Path: p, Size: uint64(len(x.data)), Mode: x.mode, Modified: timestamppb.New(x.modified), Kind: kind}
}

func (f *files) isDir(p string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.all[path.Clean(p)]
	return x != nil && x.dir
}

func (f *files) size() (n uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.all {
		n += uint64(len(x.data))
	}
	return n
}

func (f *files) content(p string) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.all[path.Clean(p)]
	if x == nil {
		return nil, notFound(p)
	}
	if x.dir {
		return nil, fault{errkind.Invalid, p + " is a directory"}
	}
	return x.data, nil
}

// put replaces a file as a whole.
func (f *files) put(p string, data []byte, mode uint32, parents bool) error {
	p, err := clean(p)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.parent(p, parents); err != nil {
		return err
	}
	old := f.all[p]
	if old != nil && old.dir {
		return fault{errkind.Invalid, p + " is a directory"}
	}
	f.all[p] = &file{data: data, mode: mode, modified: time.Now()}
	if old == nil {
		f.changed(p, "create")
	}
	f.changed(p, "write")
	return nil
}

// parent makes sure that the directory of p is there.
func (f *files) parent(p string, create bool) error {
	dir := path.Dir(p)
	switch x := f.all[dir]; {
	case x != nil && x.dir:
		return nil
	case x != nil:
		return fault{errkind.Invalid, dir + " is no directory"}
	case !create:
		return notFound(dir)
	}
	if err := f.parent(dir, true); err != nil {
		return err
	}
	f.all[dir] = &file{dir: true, mode: 0o755, modified: time.Now()}
	f.changed(dir, "create")
	return nil
}

// changed tells the watchers; the lock is held.
func (f *files) changed(p, what string) {
	for st, w := range f.watchers {
		if path.Dir(p) == w.path || p == w.path || w.recursive && strings.HasPrefix(p, strings.TrimSuffix(w.path, "/")+"/") {
			st.send(&boxv1.Frame{Body: &boxv1.Frame_WatchEvent{WatchEvent: &boxv1.WatchEvent{Path: p, What: what}}}, false)
		}
	}
}

func (f *files) stat(r *boxv1.Stat) (*boxv1.Result, error) {
	p, err := clean(r.GetPath())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.all[p]
	if x == nil {
		return nil, notFound(p)
	}
	return &boxv1.Result{File: f.info(r.GetPath(), x)}, nil
}

func (f *files) list(r *boxv1.ListDir) (*boxv1.Result, error) {
	p, err := clean(r.GetPath())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.all[p]
	if x == nil {
		return nil, notFound(p)
	}
	if !x.dir {
		return nil, fault{errkind.Invalid, p + " is no directory"}
	}
	limit := int(r.GetLimit())
	if limit <= 0 || limit > 1000 {
		limit = 1000
	}
	out := &boxv1.Result{}
	for _, q := range slices.Sorted(maps.Keys(f.all)) {
		name := path.Base(q)
		if q == "/" || path.Dir(q) != p || name <= r.GetAfter() {
			continue
		}
		if len(out.Entries) == limit {
			out.Next = out.Entries[limit-1].GetPath()
			break
		}
		out.Entries = append(out.Entries, f.info(name, f.all[q]))
	}
	return out, nil
}

func (f *files) move(r *boxv1.Move) (*boxv1.Result, error) {
	from, err := clean(r.GetFrom())
	if err != nil {
		return nil, err
	}
	to, err := clean(r.GetTo())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all[from] == nil {
		return nil, notFound(from)
	}
	if err := f.parent(to, false); err != nil {
		return nil, err
	}
	for _, q := range slices.Sorted(maps.Keys(f.all)) {
		if q == from || strings.HasPrefix(q, from+"/") {
			f.all[to+strings.TrimPrefix(q, from)] = f.all[q]
			delete(f.all, q)
		}
	}
	f.changed(from, "rename")
	f.changed(to, "create")
	return &boxv1.Result{}, nil
}

func (f *files) remove(r *boxv1.Remove) (*boxv1.Result, error) {
	p, err := clean(r.GetPath())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all[p] == nil {
		return nil, notFound(p)
	}
	for q := range f.all {
		if !strings.HasPrefix(q, p+"/") {
			continue
		}
		if !r.GetRecursive() {
			return nil, fault{errkind.Invalid, p + " is not empty"}
		}
		delete(f.all, q)
	}
	delete(f.all, p)
	f.changed(p, "remove")
	return &boxv1.Result{}, nil
}

func (f *files) mkdir(r *boxv1.MakeDir) (*boxv1.Result, error) {
	p, err := clean(r.GetPath())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if x := f.all[p]; x != nil {
		if x.dir && r.GetParents() {
			return &boxv1.Result{}, nil
		}
		return nil, fault{errkind.Exists, p + " exists already"}
	}
	if err := f.parent(p, r.GetParents()); err != nil {
		return nil, err
	}
	f.all[p] = &file{dir: true, mode: r.GetMode(), modified: time.Now()}
	f.changed(p, "create")
	return &boxv1.Result{}, nil
}

func (f *files) read(st *hostStream, r *boxv1.ReadFile, begin func(uint32, *boxv1.Result)) error {
	p, err := clean(r.GetPath())
	if err != nil {
		return err
	}
	data, err := f.content(p)
	if err != nil {
		return err
	}
	f.mu.Lock()
	info := f.info(p, f.all[p])
	f.mu.Unlock()
	from := min(r.GetOffset(), uint64(len(data)))
	data = data[from:]
	if n := r.GetLength(); n > 0 {
		data = data[:min(n, uint64(len(data)))]
	}
	begin(0, &boxv1.Result{File: info})
	go func() {
		if st.data(boxv1.Channel_CHANNEL_FILE, from, data) {
			st.result(&boxv1.Result{Bytes: uint64(len(data))})
		}
	}()
	return nil
}

func (f *files) write(st *hostStream, r *boxv1.WriteFile, begin func(uint32, *boxv1.Result)) error {
	p, err := clean(r.GetPath())
	if err != nil {
		return err
	}
	f.mu.Lock()
	if !r.GetParents() {
		err = f.parent(p, false)
	}
	f.mu.Unlock()
	if err != nil {
		return err
	}
	var data []byte
	st.handle = func(fr *boxv1.Frame) {
		switch b := fr.GetBody().(type) {
		case *boxv1.Frame_Data:
			if b.Data.GetOffset() != uint64(len(data)) {
				st.fail(fault{errkind.Invalid, "a piece at the wrong offset"})
				return
			}
			data = append(data, b.Data.GetData()...)
			st.grant(len(b.Data.GetData()))
		case *boxv1.Frame_CloseInput:
			if b.CloseInput.GetTotal() != uint64(len(data)) {
				st.fail(fault{errkind.Invalid, "not all of the file came"})
				return
			}
			if err := f.put(p, data, r.GetMode(), r.GetParents()); err != nil {
				st.fail(err)
				return
			}
			f.mu.Lock()
			info := f.info(p, f.all[p])
			f.mu.Unlock()
			st.result(&boxv1.Result{Bytes: uint64(len(data)), File: info})
		case *boxv1.Frame_Cancel:
			st.end()
		}
	}
	begin(maxCredit, nil)
	return nil
}

func (f *files) watch(st *hostStream, r *boxv1.Watch, begin func(uint32, *boxv1.Result)) error {
	p, err := clean(r.GetPath())
	if err != nil {
		return err
	}
	f.mu.Lock()
	known := f.all[p] != nil
	f.mu.Unlock()
	if !known {
		return notFound(p)
	}
	st.handle = func(fr *boxv1.Frame) {
		if fr.GetCancel() != nil {
			st.end()
		}
	}
	f.mu.Lock()
	f.watchers[st] = watching{p, r.GetRecursive()}
	f.mu.Unlock()
	begin(0, nil)
	go func() {
		<-st.done
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.watchers, st)
	}()
	return nil
}
