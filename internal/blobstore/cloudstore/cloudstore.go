// Package cloudstore registers the clients of the clouds' object stores with
// gocloud.dev/blob: s3://, gs:// and azblob://. Package blobstore opens these
// URLs in a program that imports cloudstore. Only main packages import it, in a
// file with the build tag cloud, because the providers' SDKs double the size of
// a program: docs/adr/0038-cloud-clients.md.
package cloudstore

import (
	_ "gocloud.dev/blob/azureblob" // azblob://
	_ "gocloud.dev/blob/gcsblob"   // gs://
	_ "gocloud.dev/blob/s3blob"    // s3://
)
