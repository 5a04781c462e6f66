//go:build cloud

package main

import _ "github.com/berth-dev/berth/services/credentials/cloudkms" // awskms://, gcpkms://, azurekeyvault://
