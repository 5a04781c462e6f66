package sdktest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
)

// The files that every session has of its image; the others are its own.
var ofImage = map[string]bool{"/": true, "/tmp": true, "/home": true, "/root": true, "/work": true}

// export streams the session's own files as a tar archive, and the removal of what its image had.
func (f *files) export(st *hostStream, begin func(uint32, *boxv1.Result)) error {
	raw, told, err := f.archive()
	if err != nil {
		return fault{errkind.Internal, err.Error()}
	}
	begin(0, nil)
	go func() {
		if st.data(boxv1.Channel_CHANNEL_FILE, 0, raw) {
			st.result(&boxv1.Result{Bytes: uint64(len(raw)), Archived: told})
		}
	}()
	return nil
}

func (f *files) archive() ([]byte, *boxv1.Archived, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	told := &boxv1.Archived{}
	put := func(h *tar.Header, data []byte) error {
		told.Entries++
		h.Size, h.Format = int64(len(data)), tar.FormatPAX
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	}
	for _, p := range slices.Sorted(maps.Keys(ofImage)) {
		if f.all[p] == nil {
			h := &tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(path.Join(path.Dir(p), ".wh."+path.Base(p)), "/"), Mode: 0o600}
			if err := put(h, nil); err != nil {
				return nil, nil, err
			}
		}
	}
	for _, p := range slices.Sorted(maps.Keys(f.all)) {
		x := f.all[p]
		if ofImage[p] {
			continue
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(p, "/"), Mode: int64(x.mode), ModTime: x.modified}
		if x.dir {
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		}
		if err := put(h, x.data); err != nil {
			return nil, nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), told, err
}

// take reads an archive from the client's frames.
func (f *files) take(st *hostStream, r *boxv1.Import, begin func(uint32, *boxv1.Result)) error {
	dir := r.GetPath()
	if dir == "" {
		dir = "/"
	}
	if dir[0] != '/' {
		return fault{errkind.Invalid, "the path of an import must be absolute"}
	}
	dir = path.Clean(dir)
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
				st.fail(fault{errkind.Invalid, "not all of the archive came"})
				return
			}
			told, err := f.unpack(dir, data)
			if err != nil {
				st.fail(err)
				return
			}
			st.result(&boxv1.Result{Bytes: uint64(len(data)), Archived: told})
		case *boxv1.Frame_Cancel:
			st.end()
		}
	}
	begin(maxCredit, nil)
	return nil
}

// unpack takes files, directories and removals; the fake has no links.
func (f *files) unpack(dir string, raw []byte) (*boxv1.Archived, error) {
	if !f.isDir(dir) {
		return nil, notFound(dir)
	}
	told := &boxv1.Archived{}
	skip := func(name, why string) {
		told.Skipped++
		told.SkippedNames = append(told.SkippedNames, name+": "+why)
	}
	if len(raw) < 1024 || !bytes.Equal(raw[len(raw)-1024:], make([]byte, 1024)) {
		return nil, fault{errkind.Invalid, "the archive cannot be taken: it ends without its end mark, so it was cut off"}
	}
	for r := tar.NewReader(bytes.NewReader(raw)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return told, nil
		}
		if err != nil {
			return nil, fault{errkind.Invalid, "the archive cannot be taken: it is no tar archive, or it is damaged"}
		}
		if slices.Contains(strings.Split(h.Name, "/"), "..") {
			skip(h.Name, "its name leads upward")
			continue
		}
		if h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir {
			skip(h.Name, "it is neither a file nor a directory")
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return nil, fault{errkind.Invalid, "the archive cannot be taken: it is damaged"}
		}
		if err := f.entry(path.Join(dir, path.Clean("/"+h.Name)), h, data); err != nil {
			return nil, err
		}
		told.Entries++
	}
}

func (f *files) entry(p string, h *tar.Header, data []byte) error {
	gone, removal := strings.CutPrefix(path.Base(p), ".wh.")
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case removal && gone == ".wh..opq":
		f.drop(path.Dir(p), false)
		return nil
	case removal:
		f.drop(path.Join(path.Dir(p), gone), true)
		return nil
	case p == "/":
		return nil
	}
	if err := f.parent(p, true); err != nil {
		return err
	}
	if old := f.all[p]; old != nil && old.dir && h.Typeflag != tar.TypeDir {
		f.drop(p, true)
	}
	f.all[p] = &file{dir: h.Typeflag == tar.TypeDir, data: data, mode: uint32(h.Mode) & 0o7777, modified: h.ModTime.Truncate(time.Nanosecond)}
	f.changed(p, "write")
	return nil
}

// drop removes what is below p, and p itself.
func (f *files) drop(p string, itself bool) {
	for q := range f.all {
		if strings.HasPrefix(q, strings.TrimSuffix(p, "/")+"/") && q != "/" || itself && q == p {
			delete(f.all, q)
		}
	}
}
