package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Fields of /sys/block/*/stat, counted from zero (Documentation/block/stat.rst).
const (
	writeSectors   = 6
	discardSectors = 13
)

// Written counts the sectors of 512 bytes that were written to a device since it was first bound, or
// discarded; while it does not grow, the file below is unchanged. What is still in the memory of a
// file system on it is not counted. An error where the kernel does not count.
func Written(device string) (sectors uint64, err error) {
	dir := filepath.Join("/sys/block", filepath.Base(device))
	on, err := os.ReadFile(filepath.Join(dir, "queue/iostats"))
	if err != nil {
		return 0, fmt.Errorf("count writes to %s: %w", device, err)
	}
	if strings.TrimSpace(string(on)) == "0" {
		return 0, fmt.Errorf("count writes to %s: its statistics are switched off", device)
	}
	b, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return 0, fmt.Errorf("count writes to %s: %w", device, err)
	}
	if sectors, err = parseStat(string(b)); err != nil {
		return 0, fmt.Errorf("count writes to %s: %w", device, err)
	}
	return sectors, nil
}

func parseStat(s string) (uint64, error) {
	fields := strings.Fields(s)
	if len(fields) <= writeSectors {
		return 0, errors.New("its statistics are too short")
	}
	n, err := strconv.ParseUint(fields[writeSectors], 10, 64)
	if err != nil || len(fields) <= discardSectors {
		return n, err // before 4.18 discards are not told apart
	}
	more, err := strconv.ParseUint(fields[discardSectors], 10, 64)
	return n + more, err
}
