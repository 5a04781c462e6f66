// Command runtimes builds the container runtimes that Berth runs, from pinned
// source, and prints the directory that holds them all:
//
//	go run ./tools/runtimes           build what is missing, print the directory
//	go run ./tools/runtimes --print   print the directory, or exit 1 if it is missing
//
// It guarantees that the directory is complete, that every binary comes from the
// sources that versions.txt and the shims' go.mod files pin by hash, and that
// nothing is built twice: each component is cached under a hash of its recipe.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/tools/runtimes/locate"
)

func main() {
	printOnly := flag.Bool("print", false, "print the directory without building anything")
	jobs := flag.Int("p", runtime.NumCPU(), "how many compilers run at the same time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, err := run(ctx, *printOnly, *jobs)
	if err != nil {
		fmt.Fprintln(os.Stderr, "runtimes:", err)
		os.Exit(1)
	}
	fmt.Println(dir)
}

func run(ctx context.Context, printOnly bool, jobs int) (string, error) {
	source, err := findSource()
	if err != nil {
		return "", err
	}
	list, err := plan(ctx, source)
	if err != nil {
		return "", err
	}
	home, err := locate.Home()
	if err != nil {
		return "", err
	}
	if printOnly {
		without := slices.DeleteFunc(slices.Clone(list), func(r recipe) bool { return r.Deb != "" })
		for _, l := range [][]recipe{list, without} {
			set := filepath.Join(home, setKey(l))
			if _, err := os.Stat(set); err == nil {
				return locate.Bin(set), nil
			}
		}
		return "", fmt.Errorf("the container runtimes are not built; run: go run ./tools/runtimes")
	}
	b := &builder{home: home, source: source, jobs: jobs, log: os.Stderr}
	set, err := b.all(ctx, list)
	if err != nil {
		return "", err
	}
	return locate.Bin(set), nil
}

// plan returns the recipes with everything that their keys depend on.
func plan(ctx context.Context, source string) ([]recipe, error) {
	pins, err := parseVersions(locate.Versions)
	if err != nil {
		return nil, err
	}
	if _, err := exec.LookPath("go"); err != nil {
		return nil, fmt.Errorf("building the container runtimes needs the go command in PATH: %w", err)
	}
	out, err := goCommand(ctx, source, false, "env", "GOVERSION", "GOOS", "GOARCH")
	if err != nil {
		return nil, err
	}
	list, err := recipes(pins, strings.Join(strings.Fields(string(out)), " "))
	if err != nil {
		return nil, err
	}
	for i, r := range list {
		if r.Source == "" {
			continue
		}
		folders := []string{r.Source, "shims/hold"}
		if r.Deb != "" {
			folders = folders[:1]
		}
		if list[i].Digest, err = digestTree(source, folders...); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// findSource returns tools/runtimes of the source tree around the working directory.
func findSource() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		source := filepath.Join(dir, "tools", "runtimes")
		if _, err := os.Stat(filepath.Join(source, "shims", "hold", "go.mod")); err == nil {
			return source, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("the working directory is not inside Berth's source tree")
		}
		dir = parent
	}
}
