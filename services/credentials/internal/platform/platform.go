// Package platform wraps the key of one record at a time with the platform
// key, which is a file on this machine or lives in a key service (Vault, AWS,
// Google Cloud, Azure) and never leaves it. It guarantees that every call to a
// key service ends within a bound, also where a driver ignores its context or
// panics on an odd answer; that a service which cannot be reached or refuses
// is of kind Unavailable, never data loss; that no unwrapped key is kept; and
// that a key is not used before one was wrapped and unwrapped with it.
//
// The key services of AWS, Google Cloud and Azure need a program that imports
// package cloudkms; without it Open returns an error that names the build which
// has them.
package platform

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"gocloud.dev/secrets"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
)

// RecordKeyBytes is the length of what is wrapped. It is short enough for
// RSA-OAEP-256 with 2048 bits, which takes 190 bytes.
const RecordKeyBytes = 32

const (
	callWait   = 5 * time.Second
	maxWrapped = 8 << 10
	maxCause   = 300
)

// By says what a record's key was wrapped by.
type By byte

// The ways. They are stored in records: append only.
const (
	ByFile    By = 'f'
	ByService By = 's'
)

// Key is the platform key.
type Key struct {
	name    string // as configured
	by      By     // of new records
	file    *secrets.Keeper
	service *secrets.Keeper
	keys    keyfile.Keys
	wait    time.Duration
}

// Open opens the platform key that ref names: "" or "file" is the key file at
// path, which is made if there is none; else it is the URL of a key in a
// service. With a URL the key file is read too if it exists, for the records
// of before, but never made.
func Open(ctx context.Context, ref, path string) (*Key, error) {
	if err := Check(ref); err != nil {
		return nil, err
	}
	k := &Key{name: ref, by: ByFile, wait: callWait}
	if isFile(ref) {
		keys, err := keyfile.Open(path)
		if err != nil {
			return nil, err
		}
		k.name, k.keys = "the key file", keys
	} else {
		keys, err := keyfile.Read(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		k.by, k.keys = ByService, keys
		if k.service, err = openService(ctx, ref); err != nil {
			return nil, errs.E("open platform key", errkind.Invalid, ref, flat(err))
		}
	}
	if len(k.keys) > 0 {
		f, err := newFile(k.keys)
		if err != nil {
			return nil, err
		}
		k.file = secrets.NewKeeper(f)
	}
	if err := k.prove(ctx); err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

// FileKeys are the versions in the key file, none if there is no file; records
// of format 1 are encrypted with them directly.
func (k *Key) FileKeys() keyfile.Keys { return k.keys }

// prove wraps and unwraps a key of no use, so that a service which may encrypt
// and not decrypt is found before the first disk depends on it.
func (k *Key) prove(ctx context.Context) error {
	_, _, err := k.Wrapped(ctx)
	return err
}

// Wrapped makes a new record key and returns it with its wrapped form, which
// was unwrapped again to see that it can be.
func (k *Key) Wrapped(ctx context.Context) (key, wrapped []byte, err error) {
	key = make([]byte, RecordKeyBytes)
	_, _ = rand.Read(key) // never fails: crypto/rand ends the process instead
	if wrapped, err = k.wrap(ctx, key); err != nil {
		return nil, nil, err
	}
	back, err := k.Unwrap(ctx, k.by, wrapped)
	if err != nil {
		return nil, nil, err
	}
	if subtle.ConstantTimeCompare(key, back) != 1 {
		return nil, nil, errs.E("wrap record key", errkind.Unavailable, k.name, "the platform key returned something else than it was given")
	}
	return key, wrapped, nil
}

// By says what new keys are wrapped by.
func (k *Key) By() By { return k.by }

func (k *Key) wrap(ctx context.Context, key []byte) ([]byte, error) {
	const op = "wrap record key"
	keeper := k.file
	if k.by == ByService {
		keeper = k.service
	}
	out, err := k.call(ctx, func(ctx context.Context) ([]byte, error) { return keeper.Encrypt(ctx, key) })
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, k.name, err)
	}
	if len(out) == 0 || len(out) > maxWrapped {
		return nil, errs.Errorf(op, errkind.Unavailable, "%s answered with %d bytes", k.name, len(out))
	}
	return out, nil
}

// Unwrap returns a record key. The kind is DataLoss if the key file says that
// it never wrapped this, or is not there; Unavailable for whatever a key
// service says, which may be repaired.
func (k *Key) Unwrap(ctx context.Context, by By, wrapped []byte) ([]byte, error) {
	const op = "unwrap record key"
	switch {
	case by == ByFile && k.file == nil:
		return nil, errs.E(op, errkind.DataLoss, "", "it was wrapped by the key file, which is not there")
	case by == ByFile:
		key, err := k.file.Decrypt(ctx, wrapped)
		if err != nil {
			return nil, errs.E(op, errkind.DataLoss, "", driverCause(err))
		}
		return key, nil
	case by == ByService && k.service == nil:
		return nil, errs.E(op, errkind.Unavailable, "", "it was wrapped by a key service, and platform_key names none")
	case by != ByService:
		return nil, errs.E(op, errkind.DataLoss, "", "what it was wrapped by is unknown")
	}
	key, err := k.call(ctx, func(ctx context.Context) ([]byte, error) { return k.service.Decrypt(ctx, wrapped) })
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, k.name, err)
	}
	if len(key) != RecordKeyBytes {
		return nil, errs.Errorf(op, errkind.Unavailable, "%s answered with a key of %d bytes", k.name, len(key))
	}
	return key, nil
}

type answer struct {
	out []byte
	err error
}

// call bounds one call in time. A driver that ignores its context goes on by
// itself; its own client ends it.
func (k *Key) call(ctx context.Context, do func(context.Context) ([]byte, error)) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, k.wait)
	defer cancel()
	done := make(chan answer, 1)
	go func() {
		var a answer
		defer func() {
			if p := recover(); p != nil {
				a = answer{err: errors.New("its answer makes no sense")}
			}
			done <- a
		}()
		a.out, a.err = do(ctx)
	}()
	select {
	case a := <-done:
		if a.err != nil && ctx.Err() == nil {
			return nil, fmt.Errorf("the platform key cannot be used: %w", flat(driverCause(a.err)))
		}
		if a.err == nil {
			return a.out, nil
		}
	case <-ctx.Done():
	}
	return nil, fmt.Errorf("the platform key cannot be used: no answer within %s", k.wait)
}

// Close gives up the keepers; nobody may be using them.
func (k *Key) Close() error {
	var err error
	for _, keeper := range []*secrets.Keeper{k.file, k.service} {
		if keeper != nil {
			err = errors.Join(err, keeper.Close())
		}
	}
	return err
}

// driverCause takes off what package secrets puts around a driver's error.
func driverCause(err error) error {
	if inner := errors.Unwrap(err); inner != nil {
		return inner
	}
	return err
}

// flat makes one bounded line of an error; some services answer with a page.
func flat(err error) error {
	s := strings.Join(strings.Fields(err.Error()), " ")
	if len(s) > maxCause {
		s = strings.ToValidUTF8(s[:maxCause], "") + "..."
	}
	return errors.New(s)
}
