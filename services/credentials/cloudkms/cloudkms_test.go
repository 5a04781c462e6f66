package cloudkms_test

import (
	"context"
	"path/filepath"
	"testing"

	"gocloud.dev/secrets"

	_ "github.com/berth-dev/berth/services/credentials/cloudkms"
	"github.com/berth-dev/berth/services/credentials/internal/platform"
	"github.com/berth-dev/berth/services/credentials/internal/platform/platformtest"
)

// TestRecordKeysOnAFakeOfKMS runs against a fake of AWS KMS in this process: not KMS.
func TestRecordKeysOnAFakeOfKMS(t *testing.T) {
	_, ref := platformtest.KMS(t)
	path := filepath.Join(t.TempDir(), "keys", "k.json")
	platformtest.Records(t, platform.RecordKeyBytes, func() (platformtest.Key, error) {
		k, err := platform.Open(t.Context(), ref, path)
		if err != nil {
			return platformtest.Key{}, err
		}
		return platformtest.Key{Wrapped: k.Wrapped, Close: k.Close, Unwrap: func(ctx context.Context, wrapped []byte) ([]byte, error) {
			return k.Unwrap(ctx, k.By(), wrapped)
		}}, nil
	})
}

func TestEveryCloudsKeyServiceIsRegistered(t *testing.T) {
	for _, scheme := range []string{"awskms", "gcpkms", "azurekeyvault"} {
		if !secrets.DefaultURLMux().ValidKeeperScheme(scheme) {
			t.Errorf("%s:// is not registered", scheme)
		}
	}
}
