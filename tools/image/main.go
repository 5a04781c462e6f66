// Command image makes the container images that sessions start from, and prints
// the path of the OCI layout:
//
//	go run ./tools/image                the default session image (Debian)
//	go run ./tools/image --image REF    that image: an OCI layout directory, an OCI
//	                                    or docker archive, or a registry reference
//	go run ./tools/image --busybox      a tiny image for tests
//	go run ./tools/image --print        what was made last, or exit 1 if nothing was
//
// It guarantees that the printed layout is complete; a second run prints the same
// path at once.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/berth-dev/berth/tools/image/builder"
)

func main() {
	ref := flag.String("image", os.Getenv(builder.EnvImage), "use this image (default $"+builder.EnvImage+")")
	busybox := flag.Bool("busybox", false, "make the tiny image for tests")
	printOnly := flag.Bool("print", false, "print the default image's path without making it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	path, err := layout(ctx, *ref, *busybox, *printOnly)
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
	fmt.Println(path)
}

func layout(ctx context.Context, ref string, busybox, printOnly bool) (string, error) {
	switch {
	case busybox:
		return builder.Busybox(ctx, os.Stderr)
	case printOnly:
		return builder.Built()
	}
	return builder.Default(ctx, ref, os.Stderr)
}
