package sdk

import (
	"crypto/rand"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/schemas/seal"
)

// sealTo seals a message in the name of sender, which is also returned for the
// field of the contract that names it.
func sealTo(sender *seal.Box, m proto.Message, recipient string) (sealed []byte, name string, err error) {
	raw, err := proto.Marshal(m)
	if err != nil {
		return nil, "", err
	}
	sealed, err = sender.Envelope(recipient, raw)
	return sealed, sender.Public(), err
}

const boxMagic = "xkv1"

// openSealed opens what was sealed to a key and decodes it into m. A bare box,
// whose sender stands beside it, is opened too.
func openSealed(sealed []byte, sender string, open func(envelope []byte) ([]byte, error), m proto.Message) error {
	if strings.HasPrefix(string(sealed[:min(len(sealed), len(boxMagic))]), boxMagic) {
		sealed = append([]byte("\x01"+sender), sealed...)
	}
	raw, err := open(sealed)
	if err != nil {
		return err
	}
	return proto.Unmarshal(raw, m)
}

func newKey() (seal.XKey, error) { return seal.NewKey(rand.Reader) }
