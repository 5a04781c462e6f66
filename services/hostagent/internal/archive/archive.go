// Package archive keeps snapshots of disks in a store of objects: fixed chunks, sealed with the
// session generation's own key, packed into a few objects, and one manifest a snapshot that names
// them all. It guarantees that what is read back is byte for byte what was saved or an error, that
// an object is never changed once written, that a manifest is written only after everything that it
// needs, that a sweep deletes nothing that the head, a snapshot in its history or a named manifest
// under way needs, nor anything of a newer epoch, and that two generations share nothing. Calls are
// safe side by side; saves and sweeps of one disk are put in a row by its host.
package archive

import (
	"encoding/base32"
	"io"
	"log/slog"
	"runtime"
	"time"

	"github.com/klauspost/compress/zstd"
	"gocloud.dev/blob"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

const (
	// ChunkSize is the unit of change in bytes: chunks are aligned to it.
	ChunkSize = 128 << 10
	// MaxSize is the largest disk in bytes.
	MaxSize = 1 << 41

	packSize   = 16 << 20
	maxPack    = 64 << 20
	maxObject  = 1 << 30
	maxHistory = 1024
	maxImage   = 512
)

// Key is the data key of one session generation. Nothing is sealed with it directly.
type Key [32]byte

// Disk names the disk of one generation of a session.
type Disk struct {
	Tenant     ids.Tenant
	Session    ids.SessionKey
	Generation ids.Generation
}

// String returns "<tenant>/<session>.<generation>".
func (d Disk) String() string {
	return string(d.Tenant) + "/" + string(d.Session) + "." + d.Generation.String()
}

func (d Disk) prefix() string { return "v1/" + d.String() + "/" }

// Info describes a snapshot. Added is what its packs cost in the store, in bytes; Allocated is
// what is not a hole. TakenAt is in UTC, in milliseconds.
type Info struct {
	ID, Parent             string
	Epoch                  ids.Epoch
	TakenAt                time.Time
	Size, Allocated, Added uint64
	Image                  string
	CrashConsistent        bool
	// VMWritten: a virtual machine wrote the disk; no host mounts it. It stays so in all that follow.
	VMWritten    bool
	RestoredFrom string
}

// Keep says which snapshots stay in a manifest's history: all younger than All, the last of every
// hour younger than Hourly, the last of every UTC day younger than Daily.
type Keep struct{ All, Hourly, Daily time.Duration }

// Source is what a snapshot is taken from: a file that nobody writes to.
type Source struct {
	Image io.ReaderAt
	Size  uint64
	// Data is what is allocated, in ascending order; all else reads as zeros.
	Data []extents.Range
	// Changed is a superset of where Image may differ from Base. nil: unknown, all of Data is read;
	// empty but not nil: nothing changed.
	Changed []extents.Range
	// Base is the parent's index; nil for the first snapshot.
	Base *Index
	// Anew stores everything again: what the parent has in the store may be damaged.
	Anew bool
}

// Meta is what a new manifest says beside its content. Parent and history come from Source.Base.
type Meta struct {
	Epoch           ids.Epoch
	TakenAt         time.Time
	Image           string
	CrashConsistent bool
	VMWritten       bool
	Keep            Keep
}

// Stats says what a save did: bytes read from the image, bytes and objects written to the store
// (the manifest is one), chunks of the snapshot and how many of them the parent had already.
type Stats struct {
	BytesRead, BytesUploaded uint64
	Objects, Chunks, Reused  int
}

// Options of a Depot; zero values are good ones.
type Options struct {
	// Workers read, compress and unseal side by side. Default: one for each core.
	Workers int
	// Attempts at each request to the store, with back-off from Backoff on. Default: 5 from 100 ms.
	Attempts int
	Backoff  time.Duration
	// Timeout of one request to the store. Default: 2 minutes.
	Timeout time.Duration
	// Kind says what kind of failure an error of the store is, beyond what gocloud's codes and the
	// operating system's numbers say; only NoCapacity is asked for (blobstore.Kind knows). May be nil.
	Kind func(error) errkind.Kind
	// Fault is asked at every step (see Steps); its error ends the call there. For tests.
	Fault func(step string) error
	Log   *slog.Logger
}

// Steps are the names that Options.Fault is called with.
var Steps = []string{
	"save.read", "save.pack", "save.packed", "save.manifest", "save.done", "rewind.manifest", "rewind.done",
	"load", "restore.begin", "restore.fetch", "restore.write", "restore.done",
	"sweep.mark", "sweep.list", "sweep.delete", "sweep.done", "verify.read", "erase.list", "erase.delete",
}

// Depot saves disks to one store and brings them back.
type Depot struct {
	bucket   *blob.Bucket
	opt      Options
	packSize int
	enc      *zstd.Encoder
	dec      *zstd.Decoder
	headers  headerCache
}

// Open makes a depot over a bucket, which stays the caller's to close.
func Open(b *blob.Bucket, o Options) *Depot {
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.Attempts <= 0 {
		o.Attempts = 5
	}
	if o.Backoff <= 0 {
		o.Backoff = 100 * time.Millisecond
	}
	if o.Timeout <= 0 {
		o.Timeout = 2 * time.Minute
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	// Neither fails: the options are constants.
	enc, _ := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(o.Workers),
		zstd.WithWindowSize(ChunkSize), zstd.WithEncoderCRC(false))
	dec, _ := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecodeAllCapLimit(true))
	return &Depot{bucket: b, opt: o, packSize: packSize, enc: enc, dec: dec}
}

func (d *Depot) fault(step string) error {
	if d.opt.Fault == nil {
		return nil
	}
	return d.opt.Fault(step)
}

// Chunk tables are packed on their own: seldom, and better.
var (
	tableEnc, _ = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1))
	tableDec, _ = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxObject))
)

var b32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)
