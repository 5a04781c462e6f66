// Package internal keeps modules that code to come needs; it goes when that code is there.
package internal

import (
	_ "github.com/klauspost/compress/zstd"
	_ "gocloud.dev/secrets/localsecrets"
	_ "lukechampine.com/blake3"
)
