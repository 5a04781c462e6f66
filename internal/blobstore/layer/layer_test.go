package layer_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/berth-dev/berth/internal/blobstore/layer"
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/blob/drivertest"
	"gocloud.dev/blob/memblob"
)

type harness struct{ below *blob.Bucket }

func (h harness) MakeDriver(context.Context) (driver.Bucket, error) {
	return keepOpen{layer.Driver{Below: h.below}}, nil
}
func (harness) MakeDriverForNonexistentBucket(context.Context) (driver.Bucket, error) {
	return nil, nil
}
func (harness) HTTPClient() *http.Client         { return nil }
func (harness) SupportsCopy() bool               { return true }
func (harness) SupportsNonSlashDelimiters() bool { return true }
func (harness) SkipDownloadAt() bool             { return false }
func (harness) Close()                           {}

type keepOpen struct{ layer.Driver }

func (keepOpen) Close() error { return nil }

// gocloud's own suite, on a layer over its bucket in memory. Skipped by
// design: TestNonexistentBucket and TestSignedURL, which memblob has not.
func TestConformance(t *testing.T) {
	h := harness{memblob.OpenBucket(nil)}
	drivertest.RunConformanceTests(t, func(context.Context, *testing.T) (drivertest.Harness, error) { return h, nil }, nil)
}
