// Package cloudkms registers the clients of the clouds' key services with
// gocloud.dev/secrets: awskms://, gcpkms:// and azurekeyvault://. credentials
// opens these URLs in a program that imports cloudkms. Only main packages import
// it, in a file with the build tag cloud, because the providers' SDKs double the
// size of a program: docs/adr/0038-cloud-clients.md.
package cloudkms

import (
	_ "gocloud.dev/secrets/awskms"        // awskms://
	_ "gocloud.dev/secrets/azurekeyvault" // azurekeyvault://
	_ "gocloud.dev/secrets/gcpkms"        // gcpkms://
)
