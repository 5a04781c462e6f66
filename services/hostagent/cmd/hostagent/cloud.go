//go:build cloud

package main

import _ "github.com/berth-dev/berth/internal/blobstore/cloudstore" // s3://, gs://, azblob://
