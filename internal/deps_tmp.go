// Package internal keeps modules that code to come needs; it goes when that code is there.
package internal

import (
	_ "github.com/johannesboyne/gofakes3"
	_ "github.com/klauspost/compress/zstd"
	_ "gocloud.dev/blob/azureblob"
	_ "gocloud.dev/blob/drivertest"
	_ "gocloud.dev/blob/fileblob"
	_ "gocloud.dev/blob/gcsblob"
	_ "gocloud.dev/blob/memblob"
	_ "gocloud.dev/blob/s3blob"
	_ "gocloud.dev/secrets/localsecrets"
	_ "lukechampine.com/blake3"
)
