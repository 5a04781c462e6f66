//go:build !wasip1

package main

import "os"

// arguments are this process's own, where the tool is built for the machine itself.
func arguments() ([]string, error) {
	environment = os.Environ()
	return os.Args, nil
}
