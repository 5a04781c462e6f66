package hostagent

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/blobstore"
	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// openSaves opens the store of disks. One that cannot be reached now is no reason not to start: what
// needs it then says so.
func (h *host) openSaves(ctx context.Context, store *disk.Store) error {
	bucket, err := blobstore.Open(ctx, h.cfg.Disk.Store, h.conn)
	if err != nil {
		return err
	}
	h.bucket = bucket
	if err := h.sameStore(ctx); err != nil {
		return err
	}
	depot := archive.Open(bucket, archive.Options{Kind: blobstore.Kind, Timeout: storeTimeout, Log: h.log})
	h.vault = depot
	h.saves = saver.New(store, depot, saver.Outside{
		Key: h.dataKey, Check: h.may,
		Commit: func(ctx context.Context, on saver.Session, m archive.Info, sealed bool) error {
			return h.commitManifest(ctx, savingRef(on), h.manifest(on.Generation, m), sealed)
		},
	}, h.log)
	return os.MkdirAll(h.eraseDir(), 0o700)
}

// dataKey asks for the key of a session's generation, which only the owner of the epoch gets.
func (h *host) dataKey(ctx context.Context, on saver.Session) (archive.Key, error) {
	const op = "get data key"
	var reply *credentialsv1.DataKeyReply
	err := h.persist(ctx, func(ctx context.Context) (err error) {
		if err := h.may("data_key"); err != nil {
			return err
		}
		reply, err = bus.Invoke[*credentialsv1.DataKeyReply](ctx, h.conn, "credentials", "datakey",
			&credentialsv1.DataKeyRequest{Session: savingRef(on), HostKey: h.key.Public().String()})
		return err
	})
	if err != nil {
		return archive.Key{}, err
	}
	plain, err := h.key.Open(reply.GetSealedKey())
	if err != nil || len(plain) != len(archive.Key{}) {
		return archive.Key{}, errs.E(op, errkind.Internal, on.Session.String(), "credentials gave no key that this host can open")
	}
	return archive.Key(plain), nil
}

func savingRef(on saver.Session) *corev1.SessionRef {
	return &corev1.SessionRef{
		Tenant: string(on.Tenant), Session: string(on.Session),
		Generation: stamp(ids.Epoch(on.Generation)), Epoch: stamp(on.Epoch),
	}
}

// saving names the disk of a session as it is recorded.
func (h *host) saving(r inventory.Record) saver.Session {
	on := saver.Session{
		Key: disk.Key{Session: r.Session, Generation: r.Generation}, Tenant: r.Tenant, Epoch: r.Epoch,
		Keep: keepOf(termsOf(r)),
	}
	if len(r.Terms) == 0 {
		on.Keep = archive.Keep{All: keepAll} // its terms are not known here: nothing is thinned by a guess
	}
	return on
}

const keepAll = 100 * 365 * 24 * time.Hour

// termsOf reads the terms of the wake; none are known of what an older version woke.
func termsOf(r inventory.Record) *corev1.Terms {
	t := &corev1.Terms{}
	_ = fromJSON(r.Terms, t)
	return t
}

func keepOf(t *corev1.Terms) archive.Keep {
	s := t.GetSnapshots()
	return archive.Keep{All: s.GetKeepAll().AsDuration(), Hourly: s.GetKeepHourly().AsDuration(), Daily: s.GetKeepDaily().AsDuration()}
}

func ephemeral(t *corev1.Terms) bool {
	return t.GetPersistence() == corev1.Persistence_PERSISTENCE_EPHEMERAL
}

func (h *host) manifest(g ids.Generation, m archive.Info) *corev1.Manifest {
	return &corev1.Manifest{
		Id: m.ID, Generation: stamp(ids.Epoch(g)), Epoch: stamp(m.Epoch), Parent: m.Parent, ImageDigest: m.Image, TakenAt: timestamppb.New(m.TakenAt),
		SizeBytes: m.Size, AllocatedBytes: m.Allocated, Host: string(h.id),
		CrashConsistent: m.CrashConsistent, RestoredFrom: m.RestoredFrom, VmWritten: m.VMWritten,
	}
}

// storeTimeout bounds one request to the store, of at most 16 MiB. One that hangs is asked once more.
const storeTimeout = 45 * time.Second

// storeProbe bounds the look whether the store takes anything, before compute is stopped for it.
const storeProbe = 3 * time.Second

// storeReady fails if the store of disks would take nothing now.
func (h *host) storeReady(ctx context.Context) error {
	if h.bucket == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, storeProbe)
	defer cancel()
	return blobstore.Reachable(ctx, h.bucket)
}

func (h *host) eraseDir() string { return filepath.Join(h.cfg.Dir, "erase") }
