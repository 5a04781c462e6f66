package platform

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"fmt"

	"gocloud.dev/gcerrors"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	fileAAD      = "berth/v1/record-key"
	versionBytes = 4
)

var errNotOurs = errors.New("it was changed, or encrypted with another platform key")

// file is a driver.Keeper over the versions of a key file: the version, then
// AES-256-GCM with a random nonce. It is safe for concurrent use.
type file struct {
	newest uint32
	aeads  map[uint32]cipher.AEAD
}

func newFile(keys keyfile.Keys) (*file, error) {
	f := &file{newest: keys.Newest().Version, aeads: map[uint32]cipher.AEAD{}}
	for _, k := range keys {
		block, err := aes.NewCipher(k.Secret)
		if err != nil {
			return nil, errs.E("read platform key", errkind.DataLoss, "", err)
		}
		if f.aeads[k.Version], err = cipher.NewGCMWithRandomNonce(block); err != nil {
			return nil, errs.E("read platform key", errkind.Internal, "", err)
		}
	}
	return f, nil
}

// Encrypt implements driver.Keeper.
func (f *file) Encrypt(_ context.Context, plain []byte) ([]byte, error) {
	return f.aeads[f.newest].Seal(binary.BigEndian.AppendUint32(nil, f.newest), nil, plain, []byte(fileAAD)), nil
}

// Decrypt implements driver.Keeper.
func (f *file) Decrypt(_ context.Context, sealed []byte) ([]byte, error) {
	if len(sealed) < versionBytes {
		return nil, errNotOurs
	}
	version := binary.BigEndian.Uint32(sealed)
	aead := f.aeads[version]
	if aead == nil {
		return nil, fmt.Errorf("it was encrypted with version %d of the platform key, which is not in the key file", version)
	}
	plain, err := aead.Open(nil, nil, sealed[versionBytes:], []byte(fileAAD))
	if err != nil {
		return nil, errNotOurs
	}
	return plain, nil
}

// Close implements driver.Keeper.
func (f *file) Close() error { return nil }

// ErrorAs implements driver.Keeper.
func (f *file) ErrorAs(error, any) bool { return false }

// ErrorCode implements driver.Keeper.
func (f *file) ErrorCode(error) gcerrors.ErrorCode { return gcerrors.InvalidArgument }
