package archive

import (
	"fmt"
	"strings"

	"lukechampine.com/blake3"

	"github.com/berth-dev/berth/schemas/ids"
)

// A manifest's id is "m" and 32 characters of base32 of the first 20 bytes of a BLAKE3.
func idOf(sum [20]byte) string { return "m" + b32.EncodeToString(sum[:]) }

func idSum(id string) (sum [20]byte, err error) {
	if len(id) != 33 || id[0] != 'm' {
		return sum, fmt.Errorf("%w: snapshot %.64q must be \"m\" and 32 characters of lower-case base32", ids.ErrInvalid, id)
	}
	raw, err := b32.DecodeString(id[1:])
	if err != nil {
		return sum, fmt.Errorf("%w: snapshot %.64q is not lower-case base32", ids.ErrInvalid, id)
	}
	copy(sum[:], raw)
	return sum, nil
}

// ParseID checks a snapshot's id.
func ParseID(id string) error {
	_, err := idSum(id)
	return err
}

// packName says who wrote a pack and what is in it.
type packName struct {
	epoch ids.Epoch
	sum   [20]byte
}

func (p packName) String() string { return p.epoch.String() + "-" + b32.EncodeToString(p.sum[:]) }

func parsePackName(s string) (packName, error) {
	bad := fmt.Errorf("%w: pack %.100q must be <epoch>-<32 characters of base32>", ids.ErrInvalid, s)
	cut := strings.LastIndexByte(s, '-')
	if cut < 0 || len(s)-cut-1 != 32 {
		return packName{}, bad
	}
	epoch, err := ids.ParseEpoch(s[:cut])
	if err != nil {
		return packName{}, bad
	}
	raw, err := b32.DecodeString(s[cut+1:])
	if err != nil {
		return packName{}, bad
	}
	return packName{epoch, [20]byte(raw)}, nil
}

func short(sum [32]byte) [20]byte { return [20]byte(sum[:20]) }

func nameOf(epoch ids.Epoch, object []byte) packName {
	return packName{epoch, short(blake3.Sum256(object))}
}

func (d Disk) pack(p packName) string    { return d.prefix() + "packs/" + p.String() }
func (d Disk) manifest(id string) string { return d.prefix() + "manifests/" + id }
