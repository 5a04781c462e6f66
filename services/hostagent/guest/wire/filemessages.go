package wire

import "time"

// At says where and as whom a file operation runs. A relative path is below
// Cwd, an empty Cwd is the user's home. Permissions are those of User.
type At struct {
	Path Text `json:"path"`
	Cwd  Text `json:"cwd,omitempty"`
	User Text `json:"user,omitempty"`
}

// FileRead reads a regular file from Offset, Length bytes or to its end if 0.
type FileRead struct {
	At
	Offset uint64 `json:"offset,omitempty"`
	Length uint64 `json:"length,omitempty"`
}

// FileWrite writes a file. Without InPlace the content goes to a temporary file
// in the same directory that replaces the target by rename when it is complete
// and synced; with InPlace the bytes from Offset on are overwritten.
type FileWrite struct {
	At
	Mode    *uint32 `json:"mode,omitempty"`    // permission bits; nil keeps the old or 0644
	Parents bool    `json:"parents,omitempty"` // make missing directories, 0755
	New     bool    `json:"new,omitempty"`     // refuse to replace
	InPlace bool    `json:"in_place,omitempty"`
	Offset  uint64  `json:"offset,omitempty"`
}

// FileStat asks about a path; Follow resolves a symlink at its end.
type FileStat struct {
	At
	Follow bool `json:"follow,omitempty"`
}

// FileInfo describes a file.
type FileInfo struct {
	Name    Text      `json:"name"` // last element of the path
	Type    string    `json:"type"` // file, dir, symlink, fifo, socket, char, block
	Size    int64     `json:"size"`
	Mode    uint32    `json:"mode"` // permission bits with setuid, setgid and sticky
	UID     uint32    `json:"uid"`
	GID     uint32    `json:"gid"`
	Inode   uint64    `json:"inode"`
	Links   uint64    `json:"links"`
	ModTime time.Time `json:"mod_time"`
	Target  Text      `json:"target,omitempty"` // of a symlink
}

// FileList asks for a page of a directory in byte order of the names.
type FileList struct {
	At
	After Text `json:"after,omitempty"` // names greater than this one
	Limit int  `json:"limit,omitempty"` // at most 1000, 0 for that
}

// FilePage is a page of a directory.
type FilePage struct {
	Files []FileInfo `json:"files"`
	More  bool       `json:"more,omitempty"`
}

// FileMkdir makes a directory.
type FileMkdir struct {
	At
	Mode    uint32 `json:"mode,omitempty"` // 0 for 0755
	Parents bool   `json:"parents,omitempty"`
}

// FileMove renames.
type FileMove struct {
	At
	To      Text `json:"to"`
	Replace bool `json:"replace,omitempty"`
}

// FileRemove removes a file or directory, with all below it if Recursive.
type FileRemove struct {
	At
	Recursive bool `json:"recursive,omitempty"`
}

// FileWatch reports changes of a file or directory.
type FileWatch struct {
	At
	Recursive bool `json:"recursive,omitempty"`
}

// WatchEvent is one change. Overflow means that events were lost.
type WatchEvent struct {
	Path Text   `json:"path,omitempty"`
	Op   string `json:"op"` // create, write, remove, rename, chmod, overflow
}

// FileImport takes the files of a tar archive into a directory, as root.
type FileImport struct {
	Path Text `json:"path"` // absolute
}

// FileImported says what was taken; it is synced to the disk.
type FileImported struct {
	Bytes      uint64 `json:"bytes"`   // of the archive
	Entries    uint64 `json:"entries"` // files, directories, links and removals
	Skipped    uint64 `json:"skipped,omitempty"`
	Names      []Text `json:"names,omitempty"`      // the first that were skipped, with the reason
	Attributes uint64 `json:"attributes,omitempty"` // owners, modes, times that could not be set
}

// FileExported says what an archive holds that went before.
type FileExported struct {
	Entries    uint64 `json:"entries"`
	Skipped    uint64 `json:"skipped,omitempty"`
	Names      []Text `json:"names,omitempty"`      // the first that were skipped, with the reason
	Attributes uint64 `json:"attributes,omitempty"` // extended attributes that an archive cannot hold
}
