package archive

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"lukechampine.com/blake3"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// A manifest object is magic (7 bytes) and format (1), length of the header (4, big endian), header,
// BLAKE3 of the body (32), body: nonce and sealed chunk table. Its id is the BLAKE3 of all before
// the body, and so of the body too: who has the id can check a header without reading the rest.
var magic = []byte("berthmf")

const (
	frontSize  = 8 + 4
	firstRead  = 64 << 10
	bodyDigest = 32
)

// sealManifest makes the object of an index and gives the index its id.
func sealManifest(k *keys, ix *Index) []byte {
	head := ix.header.encode()
	front := slices.Concat(magic, []byte{ix.version()}, binary.BigEndian.AppendUint32(nil, uint32(len(head))), head)
	table := tableEnc.EncodeAll(encodeTable(len(ix.packs), ix.table), nil)
	nonce := make([]byte, nonceSize)
	_, _ = rand.Read(nonce) // never fails
	body := k.manifest.Seal(nonce, nonce, table, front)
	digest := blake3.Sum256(body)
	front = append(front, digest[:]...)
	ix.info.ID = idOf(short(blake3.Sum256(front)))
	return append(front, body...)
}

// formatOf reads the byte behind a magic.
func formatOf(b, magic []byte) (version byte, ok bool) {
	if !bytes.HasPrefix(b, magic) || len(b) <= len(magic) {
		return 0, false
	}
	version = b[len(magic)]
	return version, version >= formatPlain && version <= formatVM
}

// openHeader checks the front of a manifest object against its id. When b is too short for its
// header, it returns how many bytes it needs and no error.
func openHeader(id string, b []byte) (h *header, need int, err error) {
	if len(b) < frontSize {
		return nil, 0, errCut
	}
	version, ok := formatOf(b, magic)
	if !ok {
		return nil, 0, errors.New("it is no manifest of a format that this version knows")
	}
	n := binary.BigEndian.Uint32(b[8:])
	if n > maxHeader {
		return nil, 0, errors.New("its header is too long")
	}
	need = frontSize + int(n) + bodyDigest
	if len(b) < need {
		return nil, need, nil
	}
	if idOf(short(blake3.Sum256(b[:need]))) != id {
		return nil, 0, errors.New("its content is not what its name says")
	}
	h, err = decodeHeader(b[frontSize:frontSize+int(n)], version)
	if err != nil {
		return nil, 0, err
	}
	h.info.ID = id
	return h, need, nil
}

// openManifest checks and unseals a whole manifest object.
func openManifest(k *keys, id string, b []byte) (*Index, error) {
	h, need, err := openHeader(id, b)
	if err != nil {
		return nil, err
	}
	if h == nil {
		return nil, errCut
	}
	if err := checkBody(b, need); err != nil {
		return nil, err
	}
	body := b[need:]
	if len(body) < nonceSize {
		return nil, errCut
	}
	table, err := k.manifest.Open(nil, body[:nonceSize], body[nonceSize:], b[:need-bodyDigest])
	if err != nil {
		return nil, errSealed
	}
	return withTable(h, table)
}

func checkBody(b []byte, need int) error {
	if blake3.Sum256(b[need:]) != [32]byte(b[need-bodyDigest:need]) {
		return errors.New("its content is not what its name says")
	}
	return nil
}

// tableRoom is more than any encoding of one chunk in a table takes, and than the rest of a body.
const (
	tableRoom = 64
	bodyRoom  = 64 << 10
)

// getManifest reads a whole manifest object. Its header, which its id vouches for, says how long it may
// be: whoever keeps the store cannot make a host read more.
func (d *Depot) getManifest(ctx context.Context, disk Disk, id string) ([]byte, error) {
	h, err := d.header(ctx, disk, id)
	if err != nil {
		return nil, err
	}
	return d.getAll(ctx, disk.manifest(id), frontSize+maxHeader+bodyDigest+int64(h.chunks)*tableRoom+bodyRoom)
}

// Load reads a manifest by its id and checks all of it. Kinds: Invalid (no id), DataLoss (missing,
// damaged, of another disk or sealed with another key), Unavailable.
func (d *Depot) Load(ctx context.Context, disk Disk, key Key, id string) (*Index, error) {
	const op = "load snapshot"
	if err := d.fault("load"); err != nil {
		return nil, errs.Wrap(op, id, err)
	}
	k, err := enter(disk, key, id)
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, id, err)
	}
	b, err := d.getManifest(ctx, disk, id)
	if err != nil {
		return nil, notHandedOut(op, id, "its manifest", err)
	}
	ix, err := openManifest(k, id, b)
	if err == nil && ix.disk != disk {
		err = fmt.Errorf("it is of disk %s", ix.disk)
	}
	if err != nil {
		return nil, notHandedOut(op, id, "its manifest "+disk.manifest(id), errs.E("", errkind.DataLoss, "", err))
	}
	d.headers.add(&ix.header)
	return ix, nil
}

func enter(disk Disk, key Key, id string) (*keys, error) {
	if err := disk.check(); err != nil {
		return nil, err
	}
	if err := ParseID(id); err != nil {
		return nil, err
	}
	return deriveKeys(disk, key)
}

// notHandedOut says of damage which object it is and that no one got a wrong byte.
func notHandedOut(op, id, object string, err error) error {
	if !errs.Is(err, errkind.DataLoss) {
		return errs.Wrap(op, id, err)
	}
	return errs.E(op, errkind.DataLoss, id, fmt.Errorf("%s is missing or damaged, and nothing was handed out: %w", object, err))
}

// Snapshots lists what can be restored, newest first; the first is head itself. It needs no key.
func (d *Depot) Snapshots(ctx context.Context, disk Disk, head string) ([]Info, error) {
	const op = "list snapshots"
	if head == "" {
		return nil, nil
	}
	h, err := d.header(ctx, disk, head)
	if err != nil {
		return nil, errs.Wrap(op, head, err)
	}
	return append([]Info{h.info}, h.history...), nil
}

// header reads and checks the plain part of a manifest. A damaged or missing one is DataLoss.
func (d *Depot) header(ctx context.Context, disk Disk, id string) (*header, error) {
	if err := disk.check(); err != nil {
		return nil, err
	}
	if err := ParseID(id); err != nil {
		return nil, err
	}
	if h := d.headers.get(id); h != nil && h.disk == disk {
		return h, nil
	}
	b, err := d.front(ctx, disk.manifest(id), firstRead)
	if err != nil {
		return nil, err
	}
	h, need, err := openHeader(id, b)
	if err == nil && h == nil {
		if b, err = d.front(ctx, disk.manifest(id), need); err == nil {
			if h, _, err = openHeader(id, b); err == nil && h == nil {
				err = errCut
			}
		}
	}
	if err == nil && h.disk != disk {
		err = fmt.Errorf("it is of disk %s", h.disk)
	}
	if err != nil {
		var e *errs.Error
		if errors.As(err, &e) {
			return nil, err
		}
		return nil, errs.E("read manifest", errkind.DataLoss, disk.manifest(id), err)
	}
	d.headers.add(h)
	return h, nil
}

// front reads the first bytes of an object, fewer where it is shorter.
func (d *Depot) front(ctx context.Context, key string, n int) (b []byte, err error) {
	err = d.request(ctx, "read from the store", key, func(ctx context.Context) error {
		r, err := d.bucket.NewRangeReader(ctx, key, 0, int64(n), nil)
		if err != nil {
			return err
		}
		defer r.Close()
		b = make([]byte, min(int64(n), max(r.Size(), 0)))
		return readFull(r, b)
	})
	return b, err
}
