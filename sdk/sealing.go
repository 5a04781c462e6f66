package sdk

import (
	"crypto/rand"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/schemas/seal"
)

// sealTo seals a message. The sender's one-time key is part of the sealed
// bytes; it is returned as well for the field of the contract that names it.
func sealTo(m proto.Message, recipient string) (sealed []byte, sender string, err error) {
	raw, err := proto.Marshal(m)
	if err != nil {
		return nil, "", err
	}
	pub, err := seal.ParsePublic(recipient)
	if err != nil {
		return nil, "", err
	}
	sealed, err = seal.SealTo(pub, raw, rand.Reader)
	if err != nil {
		return nil, "", err
	}
	return sealed, senderOf(sealed), nil
}

// senderOf reads the sender's public key out of an envelope: it stands between
// the version and the box.
func senderOf(sealed []byte) string {
	return string(sealed[1 : 1+seal.Overhead-1-boxOverhead])
}

const (
	boxMagic    = "xkv1"
	boxOverhead = len(boxMagic) + 24 + 16
)

// openSealed opens what was sealed to key and decodes it into m. A bare box,
// whose sender stands beside it, is opened too.
func openSealed(sealed []byte, sender string, key seal.XKey, m proto.Message) error {
	if strings.HasPrefix(string(sealed), boxMagic) {
		sealed = append([]byte("\x01"+sender), sealed...)
	}
	raw, err := key.Open(sealed)
	if err != nil {
		return err
	}
	return proto.Unmarshal(raw, m)
}

func newKey() (seal.XKey, error) { return seal.NewKey(rand.Reader) }
